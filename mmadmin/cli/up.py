"""`mm up`, `mm down`: bring an installation up, end it.

Bringing up may be interrupted anywhere and run again: each step looks first at what is there.
Services are children of supervisord, never of `mm`, so that an interrupted `mm up` ends nothing.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli import installation
from mmadmin.cli.output import JsonFlag, console, emit_json, escape, seconds_text
from mmadmin.cli.settings_file import check_settings
from mmadmin.cli.status import status_of
from mmadmin.core.callbacks import silent
from mmadmin.core.errors import Unreachable
from mmadmin.core.home import DEFAULT_BIND, Home, Ports
from mmadmin.core.variables import PYTHON_SERVICES, REMEMBERED

if TYPE_CHECKING:
    from mmadmin.core.callbacks import Report
    from mmadmin.host.supervisor import Supervisor

QUIET_S = 0.5
SOCKET_S = 15.0
"""A supervisor looks for its socket every five seconds."""
STOP_DEADLINE_S = 200.0
"""Programs stop one after the other: worker 15 s, gate 130 s, engines 15 s, broker 20 s at most."""
PASSWORD_BYTES = 12


@contextmanager
def step(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show that something is under way, then that it is done and how long it took."""
    began = time.monotonic()
    if quiet:
        yield
        return
    with console.status(f"{what} …"):
        yield
    took = time.monotonic() - began
    if took >= QUIET_S:
        console.print(f"  [green]✓[/] {what} [dim]({seconds_text(took)})[/]")


@dataclass(frozen=True, slots=True)
class Admin:
    """The administrator's login; the password is known only right after it was made."""

    username: str
    password: str | None


def up(
    *,
    demo: Annotated[bool, typer.Option(help="Deploy the small demo model the first time.")] = True,
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart panel, gate, worker and beat.")
    ] = False,
    since: Annotated[
        int,
        typer.Option(help="When set-up began, in Unix time; `make up` says it.", hidden=True),
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Start everything; the first time also set up, and deploy a small model.

    Runs broker, panel, gate, worker and beat under one supervisor, and waits until each of them
    answers. Safe to run again at any time.

    Example: MM_PANEL_PORT=8001 MM_GATE_PORT=20001 mm up
    """
    began = time.monotonic() - (max(time.time() - since, 0) if since else 0)
    home, ports = Home.from_env(), Ports.from_env()
    installation.check_settings_file(home)
    installation.refuse_other_database(home, os.environ.get("DATABASE_URL", ""))
    first = not installation.is_set_up(home)
    installation.prepare(home)
    if not as_json:
        console.print(f"mmadmin in [bold]{escape(str(home.root))}[/]{' (new)' if first else ''}")
    start_services(home, ports, restart=restart, quiet=as_json)
    admin = ensure_admin()
    if admin.password and not as_json:  # said at once: what follows may be interrupted
        console.print(
            f"\npanel   [bold]{installation.panel_url(ports)}[/]\n"
            f"login   [bold]{escape(admin.username)}[/], password [bold]{admin.password}[/]"
            "  [yellow](shown only now)[/]"
        )
    from mmadmin.cli import first_run

    outcome = first_run.run(home, ports, quiet=as_json) if demo else None
    if as_json:
        emit_json(
            status_of(home, ports).as_json()
            | {
                "admin": admin.username,
                "password": admin.password,
                "first_answer": outcome.as_json() if outcome else None,
            }
        )
        return
    if outcome:
        first_run.show(outcome, ports)
    _show_welcome(home, ports, None if admin.password else admin, time.monotonic() - began)


def start_services(home: Home, ports: Ports, *, restart: bool, quiet: bool) -> None:
    """Migrate, then have every service running and answering."""
    from mmadmin.host.supervisor import Supervisor

    check_settings(os.environ)
    supervisor = Supervisor(home)
    with supervisor.alone("`mm up`", waiting(quiet=quiet)):
        _start_services(supervisor, ports, restart=restart, quiet=quiet)


def waiting(*, quiet: bool) -> Report:
    """What tells a person, once, that another command is at it."""
    said: set[str] = set()

    def say(holder: str) -> None:
        if not quiet and holder not in said:
            console.print(f"  waiting for {escape(holder)} to finish")
        said.add(holder)

    return say


def _clear_the_way(supervisor: Supervisor, *, quiet: bool) -> bool:
    """True when the supervisor runs; else nothing of an earlier run is left."""
    if supervisor.without_socket() is not None:
        with step("the supervisor makes its socket again", quiet=quiet):
            give_up = time.monotonic() + SOCKET_S
            while not supervisor.running() and time.monotonic() < give_up:
                time.sleep(0.2)
    state = supervisor.state()
    if state == "running":
        return True
    if state == "silent":
        raise Unreachable(
            "the supervisor runs and does not answer",
            remedy="end everything with `mm down`, then run `mm up` again",
        )
    with step("an earlier run has ended", quiet=quiet or state == "absent"):
        ended = supervisor.shutdown(STOP_DEADLINE_S, silent)
    for leftover in ended if not quiet else ():
        console.print(f"  [yellow]ended[/] what an earlier run left: {escape(leftover)}")
    return False


def _start_services(supervisor: Supervisor, ports: Ports, *, restart: bool, quiet: bool) -> None:
    from mmadmin.cli.services import (
        Service,
        Started,
        environment,
        services,
        wait_until_answering,
    )
    from mmadmin.host import watchdog

    home = supervisor.home
    env = environment(home, ports, watchdog.NAME)
    wanted = [*services(home, ports), Service(watchdog.program(home, env), lambda: True)]
    running = _clear_the_way(supervisor, quiet=quiet)
    own = {p.name for p in supervisor.status() if p.pid} if running else set()
    if "panel" not in own:
        installation.check_port(ports.panel, "MM_PANEL_PORT", "panel")
    if "gate" not in own:
        installation.check_port(ports.gate, "MM_GATE_PORT", "gate")
        installation.check_port(ports.metrics, "MM_METRICS_PORT", "metrics of the gate")
    installation.remember(home)
    with step("database", quiet=quiet):
        migrate()
    if not running:
        _forget_moved_engines(home, quiet=quiet)
    present, stamp = Started.now(home), home.run_dir / "services-code"
    before = Started.read(stamp)
    with step("supervisor", quiet=quiet):
        changed = supervisor.launch([service.spec for service in wanted], without=REMEMBERED)
        for program in supervisor.status():
            if program.state == "FATAL" and supervisor.is_service(program.name):
                supervisor.start_again(program.name)
    due = set(PYTHON_SERVICES) if restart else present.to_restart(before)
    for name in changed if not quiet else ():
        console.print(f"  [green]✓[/] {name}: restarted with the new settings")
    for name in PYTHON_SERVICES if running else ():
        if name in own and name in due and name not in changed:
            what = "the present code" if restart or present.code != before.code else "new settings"
            with step(f"{name}: restarted with {what}", quiet=quiet):
                supervisor.restart_program(name)
    for service in wanted:
        with step(service.spec.name, quiet=quiet):
            wait_until_answering(supervisor, service)
    present.write(stamp)


def _forget_moved_engines(home: Home, *, quiet: bool) -> None:
    """After MM_HOME was moved, the worker restarts engines by their present paths."""
    from mmadmin.host.engine_process import forget_moved

    if not forget_moved(home):
        return
    from deployments.jobs.hosts import forget_engines

    forget_engines()
    if not quiet:
        console.print("  MM_HOME was moved: engines are restarted")


def migrate() -> None:
    """Bring the database to the present schema."""
    import django
    from django.core.management import call_command
    from django.db import OperationalError

    django.setup()
    try:
        call_command("migrate", verbosity=0, interactive=False)
    except OperationalError as error:
        raise Unreachable(
            f"the database does not answer: {error}",
            remedy="check DATABASE_URL, or the disk of MM_HOME",
        ) from error


def ensure_admin(password: str = "") -> Admin:
    """The first administrator; where there is none, made with this or a generated password."""
    from deployments.models import Role, User

    present = User.objects.filter(role=Role.ADMIN, is_active=True).order_by("id").first()
    if present is not None:
        return Admin(username=present.username, password=None)
    if password:
        from deployments.actions.people import check_password

        check_password(password, User(username="admin"))
    password = password or secrets.token_urlsafe(PASSWORD_BYTES)
    User.objects.create_superuser(username="admin", password=password, role=Role.ADMIN)
    return Admin(username="admin", password=password)


def _show_welcome(home: Home, ports: Ports, admin: Admin | None, took: float) -> None:
    """Where everything is; without `admin`, panel and login were shown by this command."""
    if admin is not None:
        console.print(f"\npanel   [bold]{installation.panel_url(ports)}[/]")
        console.print(
            f"login   [bold]{escape(admin.username)}[/], "
            "password as it was shown the first time, or a new one by: mm password"
        )
    console.print(f"API     [bold]{installation.public_gate_url(ports)}/v1[/]")
    if installation.bind_address() == DEFAULT_BIND:
        console.print("        [dim]only from this machine; for others: MM_BIND=0.0.0.0 mm up[/]")
    console.print(f"logs    {escape(str(home.logs))}, or: mm logs panel")
    console.print(f"[dim]ready in {seconds_text(took)}; `mm down` ends everything[/]")


def down(*, as_json: JsonFlag = False) -> None:
    """End everything that `mm up` started, engines included. Nothing is lost.

    Example: mm down
    """
    from mmadmin.host.supervisor import Supervisor

    home = Home.from_env()
    was_running, ended = False, []
    if installation.is_set_up(home):  # else there is not a folder, and nothing to wait for
        supervisor = Supervisor(home)
        with supervisor.alone("`mm down`", waiting(quiet=as_json)):
            was_running = supervisor.state() != "absent"
            with step("everything ended", quiet=as_json or not was_running):
                ended = supervisor.shutdown(STOP_DEADLINE_S, silent)
    if as_json:
        emit_json({"was_running": was_running, "leftovers": ended})
    elif not was_running and not ended:
        console.print("nothing was running")
    for leftover in ended if not as_json else ():
        console.print(f"  ended what an earlier run left: {escape(leftover)}")


def password(
    username: Annotated[str, typer.Argument(help="Whose password.", metavar="USERNAME")] = "admin",
    *,
    reset_second_factor: Annotated[
        bool, typer.Option("--reset-second-factor", help="Their phone is lost: turn it off, too.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Give a person a new generated password, shown once.

    Example: mm password admin
    """
    from mmadmin.cli.records import actor

    person = actor()
    from deployments import actions

    fresh = secrets.token_urlsafe(PASSWORD_BYTES)
    actions.set_password(person, username, fresh)
    if reset_second_factor:
        actions.reset_second_factor(person, username, on_the_machine=True)
    if as_json:
        emit_json({"username": username, "password": fresh})
    else:
        console.print(f"[bold]{escape(username)}[/]: {fresh}  [yellow](shown only now)[/]")
