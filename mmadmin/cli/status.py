"""`mm status`: what runs and what is live, as far as it can be known.

What one part cannot tell does not keep the others from speaking: services are known without the
database, deployments without the supervisor.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from mmadmin.cli import installation
from mmadmin.cli.doctor import of_the_database
from mmadmin.cli.output import (
    JsonFlag,
    console,
    emit_json,
    escape,
    report,
    seconds_text,
    styled,
    when_text,
)
from mmadmin.cli.tables import Column, table
from mmadmin.core.errors import MmError, NotFound, Unreachable
from mmadmin.core.home import Home, Ports

if TYPE_CHECKING:
    from deployments.models import Alarm
    from mmadmin.host.supervisor import ProgramStatus


def status_of(home: Home, ports: Ports) -> dict[str, Any]:
    """What runs and what is live; works while panel, broker and database are down."""
    from mmadmin.host.broker_health import broker_problem
    from mmadmin.host.service_health import silent_services
    from mmadmin.host.supervisor import Supervisor

    supervisor = Supervisor(home)
    programs = supervisor.status() if supervisor.running() else []
    silent = {program.name: "not answering" for program in silent_services(programs, ports)}
    if programs and (trouble := broker_problem(os.environ.get("REDIS_URL") or home.broker_url)):
        silent["broker"] = "refuses writes" if trouble.answers else "not answering"
    problem: MmError | None = None
    deployments: list[dict[str, Any]] = []
    proved: set[tuple[str, int | None]] = set()
    try:
        down = not programs and was_up(home) and supervisor.without_socket() is None
        deployments = _deployments(down=down)
        proved = _proved_engines() if deployments and programs else set()
    except Exception as error:
        problem = _of_the_records(error)
        if problem is None:
            raise
    return {
        "home": str(home.root),
        "panel_url": installation.panel_url(ports),
        "gate_url": installation.public_gate_url(ports),
        "supervisor": bool(programs),
        "without_socket": None if programs else supervisor.without_socket(),
        "services": [
            {
                "name": program.name,
                "state": _state(program, proved, silent),
                "pid": program.pid,
                "uptime_s": program.uptime_s,
            }
            for program in programs
        ],
        "deployments": deployments,
        "database": problem.as_json() if problem else None,
    }


def _state(
    program: ProgramStatus, proved: set[tuple[str, int | None]], trouble: dict[str, str]
) -> str:
    """A program's state in one or two words."""
    if program.name in trouble and program.state == "RUNNING":
        return trouble[program.name]
    return "running" if (program.name, program.pid) in proved else program.state.lower()


def _of_the_records(error: Exception) -> MmError | None:
    """Why the records cannot be read; None for an error that is not theirs."""
    cause = error.__cause__ if isinstance(error, Unreachable) else error
    found = of_the_database(cause) if cause is not None else None
    return found or (error if isinstance(error, Unreachable) else None)


def was_up(home: Home) -> bool:
    """True where engines run under this home's own supervisor: without it, none of them runs."""
    return (home.supervisor / "supervisord.conf").exists()


def _proved_engines() -> set[tuple[str, int | None]]:
    """Engines of this machine that have proved themselves, each with its process.

    The supervisor calls a program "starting" until it has run for as long as its model may take
    to load; the probes know sooner.
    """
    from django.conf import settings

    from deployments.models import Replica, ReplicaState

    ready = Replica.objects.filter(state=ReplicaState.READY, host__name=settings.HOST_NAME)
    return set(ready.values_list("uid", "pid"))


def _deployments(*, down: bool) -> list[dict[str, Any]]:
    from mmadmin.cli.records import ACTING_AS, actor

    try:
        person = actor()
    except NotFound:
        if ACTING_AS.get():
            raise
        return []  # not set up to the end: nobody could have deployed anything
    from django.conf import settings

    from deployments import queries

    return [
        {
            "name": row.deployment.name,
            "public_name": row.deployment.public_name,
            "host": row.deployment.host.name,
            "live_generation": row.live.number if row.live else None,
            "state": (
                "stopped"
                if down
                and row.state in ("live", "host away")
                and row.deployment.host.name == settings.HOST_NAME
                else row.state
            ),
            "newest_generation": row.newest.number if row.newest else None,
            "alarms": [_alarm(alarm) for alarm in row.alarms],
        }
        for row in queries.deployments_overview(person)
    ]


def _alarm(alarm: Alarm) -> dict[str, Any]:
    return {
        "kind": alarm.kind,
        "subject": alarm.subject,
        "message": alarm.message,
        "generation": alarm.generation.number if alarm.generation else None,
        "raised_at": alarm.raised_at,
    }


def status(*, as_json: JsonFlag = False) -> None:
    """Say what runs, where the panel and the API are, what each deployment serves, open alarms.

    Ends with 1 when the database cannot be asked; what is known without it is said all the same.

    Example: mm status --json
    """
    home, ports = Home.from_env(), Ports.from_env()
    found = status_of(home, ports)
    if as_json:
        emit_json(found)
        raise typer.Exit(1 if found["database"] else 0)
    console.print(f"panel  {found['panel_url']}\nAPI    {found['gate_url']}/v1\n")
    table(
        [
            Column("service", whole=True),
            Column("state", whole=True),
            Column("pid", whole=True, right=True, drop=2),
            Column("up for", whole=True, drop=1),
        ],
        [
            [
                escape(s["name"]),
                styled(s["state"]),
                str(s["pid"] or ""),
                seconds_text(s["uptime_s"]) if s["pid"] else "",
            ]
            for s in found["services"]
        ],
        empty=(
            f"the supervisor runs (pid {found['without_socket']}), but its socket was removed; it"
            " makes it again within seconds"
            if found["without_socket"]
            else "nothing runs; start it with: mm up"
        ),
    )
    console.print()
    if found["database"]:
        known = found["database"]
        report(Unreachable(known["message"], remedy=known["remedy"]), as_json=False)
        raise typer.Exit(1)
    table(
        [
            Column("deployment", whole=True),
            Column("model name", drop=1),
            Column("host", drop=2),
            Column("live", whole=True),
            Column("state", whole=True),
        ],
        [
            [
                escape(d["name"]),
                escape(d["public_name"]),
                escape(d["host"]),
                str(d["live_generation"] or "-"),
                styled(d["state"]),
            ]
            for d in found["deployments"]
        ],
        empty="no deployments; make one with: mm deploy deployments/catalog/smollm2-135m.toml",
    )
    for deployment in found["deployments"]:
        for alarm in deployment["alarms"]:
            number = alarm["generation"]
            uid = f"{deployment['name']}/{number}" if number else deployment["name"]
            console.print(
                f"\n[red]alarm[/]  [bold]{escape(uid)}[/] {escape(alarm['kind'])}, "
                f"{escape(alarm['subject'])}: {escape(alarm['message'])} "
                f"[dim](since {when_text(alarm['raised_at'])})[/]",
                soft_wrap=True,
            )
