"""`mm init`, `mm run`, `mm healthy`: one service at a time, for containers and other supervisors.

`docker-compose.yml` uses nothing else. The worker brings a supervisor along, because the engines
of its host run under that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli import installation
from mmadmin.cli.output import JsonFlag, console, emit_json, escape
from mmadmin.cli.up import STOP_DEADLINE_S, ensure_admin, migrate
from mmadmin.core.callbacks import silent
from mmadmin.core.errors import InvalidInput, NotFound, Unreachable
from mmadmin.core.home import Home, Ports

if TYPE_CHECKING:
    from mmadmin.cli.services import Service

ServiceName = Annotated[
    str, typer.Argument(help="panel, gate, worker, beat or broker.", metavar="SERVICE")
]


def _service(name: str) -> Service:
    from mmadmin.cli.services import services

    found = {s.spec.name: s for s in services(Home.from_env(), Ports.from_env())}
    if name not in found:
        raise NotFound(f"there is no service {name}", remedy=f"use {', '.join(found)}")
    return found[name]


def init(
    *,
    admin_password_file: Annotated[
        Path | None, typer.Option(help="The first administrator's password; else it is made.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Prepare folder, secrets, database and first administrator; start nothing. Idempotent.

    Example: mm init --admin-password-file /run/secrets/admin_password
    """
    home = Home.from_env()
    installation.check_settings_file(home)
    installation.refuse_other_database(home, os.environ.get("DATABASE_URL", ""))
    installation.prepare(home)
    installation.remember(home)
    migrate()
    password = ""
    if admin_password_file is not None:
        try:
            password = admin_password_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InvalidInput(f"{admin_password_file} cannot be read: {error}") from error
    admin = ensure_admin(password)
    shown = admin.password if not password else None
    if as_json:
        emit_json({"admin": admin.username, "password": shown})
    elif shown:
        console.print(f"login [bold]{escape(admin.username)}[/], password {shown}")


def run(name: ServiceName) -> None:
    """Run one service in the foreground, as a container does.

    The worker comes with the supervisor of its host's engines.

    Example: mm run panel
    """
    installation.check_settings_file(Home.from_env())
    service = _service(name)
    installation.prepare(Home.from_env())
    if name == "worker":
        _run_worker(service)
        return
    spec = service.spec
    os.chdir(spec.cwd or "/")
    sys.stdout.flush()
    os.execvpe(spec.argv[0], list(spec.argv), {**os.environ, **spec.env})  # noqa: S606 (its own argv)


def _run_worker(service: Service) -> None:
    """Keep supervisor, worker and engines up until SIGTERM or SIGINT."""
    from mmadmin.host.supervisor import Supervisor

    supervisor = Supervisor(Home.from_env())
    supervisor.end_leftovers()
    supervisor.launch([service.spec])
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    while not stopping.wait(1.0):
        if not supervisor.running():
            raise Unreachable("the supervisor has ended", remedy=f"read {service.spec.log}")
    supervisor.shutdown(STOP_DEADLINE_S, silent)


def healthy(name: ServiceName, *, as_json: JsonFlag = False) -> None:
    """End with 0 when a service answers, else with 1: for health checks.

    Example: mm healthy gate
    """
    if not _service(name).answers():
        raise Unreachable(f"{name} does not answer", remedy="read its log")
    if as_json:
        emit_json({"service": name, "answers": True})
