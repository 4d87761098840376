"""`mm status`: what runs and what is live, as far as it can be known.

What one part cannot tell does not keep the others from speaking: services are known without the
database, deployments without the supervisor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
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
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import MmError, NotFound, Unreachable
from mmadmin.core.home import Home, Ports

if TYPE_CHECKING:
    from deployments.queries import DeploymentRow, GpuRow
    from mmadmin.host.supervisor import ProgramStatus


@dataclass(frozen=True, slots=True)
class Status:
    """What runs and what is live, as far as it is known."""

    home: Home
    ports: Ports
    without_socket: int | None
    """Pid of a supervisor whose socket was removed."""
    services: list[dict[str, Any]]
    down: bool
    """True where this home's engines ran and its supervisor does not."""
    deployments: list[DeploymentRow]
    gpus: list[GpuRow]
    problem: MmError | None
    """Why the records cannot be read."""

    def state_of(self, row: DeploymentRow) -> str:
        """A deployment's state; without the supervisor nothing of this host is live."""
        from django.conf import settings

        here = row.deployment.host.name == settings.HOST_NAME
        stopped = self.down and here and row.state in ("live", "host away")
        return "stopped" if stopped else row.state

    def as_json(self) -> dict[str, Any]:
        """For programs; a deployment as in the REST API."""
        return {
            "home": str(self.home.root),
            "panel_url": installation.panel_url(self.ports),
            "gate_url": installation.public_gate_url(self.ports),
            "supervisor": bool(self.services),
            "without_socket": self.without_socket,
            "services": self.services,
            "deployments": [self._deployment(row) for row in self.deployments],
            "gpus": self.gpus,
            "database": self.problem.as_json() if self.problem else None,
        }

    def _deployment(self, row: DeploymentRow) -> dict[str, Any]:
        from deployments import schemas as s

        return s.DeploymentOut(**s.DeploymentOut.of(row) | {"state": self.state_of(row)}).dict()


def status_of(home: Home, ports: Ports) -> Status:
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
    deployments: list[DeploymentRow] = []
    gpus: list[GpuRow] = []
    proved: set[tuple[str, int | None]] = set()
    without_socket = None if programs else supervisor.without_socket()
    try:
        deployments, gpus = _deployments()
        proved = _proved_engines() if deployments and programs else set()
    except Exception as error:
        problem = _of_the_records(error)
        if problem is None:
            raise
    return Status(
        home=home,
        ports=ports,
        without_socket=without_socket,
        services=[
            {
                "name": program.name,
                "state": _state(program, proved, silent),
                "pid": program.pid,
                "uptime_s": program.uptime_s,
            }
            for program in programs
        ],
        down=not programs and was_up(home) and without_socket is None,
        deployments=deployments,
        gpus=gpus,
        problem=problem,
    )


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


def _deployments() -> tuple[list[DeploymentRow], list[GpuRow]]:
    from mmadmin.cli.records import ACTING_AS, actor

    try:
        person = actor()
    except NotFound:
        if ACTING_AS.get():
            raise
        return [], []  # not set up to the end: nobody could have deployed anything
    from deployments import queries

    rows = queries.deployments_overview(person)
    return rows, queries.gpus(person, rows)


def status(*, as_json: JsonFlag = False) -> None:
    """Say what runs, where the panel and the API are, what is served, GPUs and open alarms.

    Ends with 1 when the database cannot be asked; what is known without it is said all the same.

    Example: mm status --json
    """
    home, ports = Home.from_env(), Ports.from_env()
    found = status_of(home, ports)
    if as_json:
        emit_json(found.as_json())
        raise typer.Exit(1 if found.problem else 0)
    console.print(
        f"panel  {installation.panel_url(ports)}\nAPI    {installation.public_gate_url(ports)}/v1\n"
    )
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
            for s in found.services
        ],
        empty=(
            f"the supervisor runs (pid {found.without_socket}), but its socket was removed; it"
            " makes it again within seconds"
            if found.without_socket
            else "nothing runs; start it with: mm up"
        ),
    )
    console.print()
    if found.problem:
        report(found.problem, as_json=False)
        raise typer.Exit(1)
    table(
        [
            Column("deployment", whole=True),
            Column("model name", drop=1),
            Column("host", drop=2),
            Column("live", whole=True),
            Column("state", whole=True),
            Column("GPUs", whole=True, drop=3),
        ],
        [
            [
                escape(row.deployment.name),
                escape(row.deployment.public_name),
                escape(row.deployment.host.name),
                str(row.live.number if row.live else "-"),
                styled(found.state_of(row)),
                _gpus_of(row),
            ]
            for row in found.deployments
        ],
        empty="no deployments; make one with: mm deploy deployments/catalog/smollm2-135m.toml",
    )
    _show_gpus(found.gpus)
    for row in found.deployments:
        for alarm in row.alarms:
            about = alarm.generation.uid if alarm.generation else row.deployment.name
            console.print(
                f"\n[red]alarm[/]  [bold]{escape(about)}[/] {escape(alarm.kind)}, "
                f"{escape(alarm.subject)}: {escape(alarm.message)} "
                f"[dim](since {when_text(alarm.raised_at)})[/]",
                soft_wrap=True,
            )


def _gpus_of(row: DeploymentRow) -> str:
    """The GPUs that its serving engines were given; empty where they were given none by number."""
    indices = {index for replica in row.serving for index in replica.gpu_indices or ()}
    return ", ".join(map(str, sorted(indices)))


def _show_gpus(gpus: list[GpuRow]) -> None:
    if not gpus:
        return
    console.print()
    table(
        [
            Column("GPU", whole=True, right=True),
            Column("host", drop=1),
            Column("name", drop=2),
            Column("memory free", whole=True, right=True),
            Column("used by"),
        ],
        [
            [
                str(gpu.index),
                escape(gpu.host),
                escape(gpu.name),
                f"{bytes_text(gpu.memory_free_bytes)} of {bytes_text(gpu.memory_total_bytes)}",
                escape(", ".join(f"{h.name} {bytes_text(h.memory_bytes)}" for h in gpu.used_by)),
            ]
            for gpu in gpus
        ],
        empty="",
    )
