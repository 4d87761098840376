"""`mm logs`: what a deployment's engine, a service, a build or an activation says."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mmadmin.cli.completion import deployment_names
from mmadmin.cli.output import JsonFlag, coloured, emit_json
from mmadmin.cli.records import actor
from mmadmin.core.errors import NotFound
from mmadmin.core.home import Home

SERVICES = ("broker", "panel", "gate", "worker", "beat", "watchdog", "supervisord")
POLL_S = 0.3
CHUNKS = 500
LINES = 100
"""Of a log file, unless told otherwise."""


def logs(
    name: Annotated[
        str,
        typer.Argument(
            help="A deployment, or broker, panel, gate, worker, beat.",
            metavar="NAME",
            autocompletion=deployment_names,
        ),
    ] = "",
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows.")] = False,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "-n",
            help="How many lines back: 100; of a build or an activation, all.",
            metavar="NUMBER",
            min=1,
        ),
    ] = None,
    build: Annotated[
        int | None, typer.Option(help="The log of this build instead.", metavar="NUMBER", min=1)
    ] = None,
    activation: Annotated[
        int | None, typer.Option(help="The log of this activation.", metavar="NUMBER", min=1)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the log of a deployment's engine (NAME/N: of that generation's), a service or a job.

    Example: mm logs smollm2-135m -f

    Example: mm logs gate -n 20

    Example: mm logs --build 3 -n 20
    """
    if build or activation:
        _job_log(build or 0, activation or 0, lines=lines, follow=follow, as_json=as_json)
        return
    if not name:
        raise typer.BadParameter(
            "whose log? Name a deployment or a service, or use --build or --activation",
            param_hint="'NAME'",
        )
    path = _log_file(name)
    if as_json:
        emit_json({"path": str(path), "lines": tail(path, lines or LINES)})
        return
    for line in tail(path, lines or LINES):
        sys.stdout.write(coloured(line) + "\n")
    if follow:
        _follow_file(path)


def tail(path: Path, lines: int, *, chunk: int = 64 * 1024) -> list[str]:
    """The last lines of a log file; [] when there is none."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - chunk))
        return file.read().decode(errors="replace").splitlines()[-lines:]


def _log_file(name: str) -> Path:
    home = Home.from_env()
    if name in SERVICES:
        return _existing(home.logs / f"{name}.log", name)
    person = actor()
    from django.conf import settings

    from deployments import queries
    from deployments.models import Replica

    deployment, _, number = name.partition("/")
    row = queries.deployment(person, deployment)
    engines = Replica.objects.filter(generation__deployment=row.deployment).order_by("-id")
    if number.isdecimal():
        replica = engines.filter(
            generation=queries.generation(person, deployment, int(number)).generation
        ).first()
    else:
        replica = engines.filter(trial=None).first()
    if replica is None:
        raise NotFound(
            f"{name} has never run an engine", remedy=f"read its builds: mm history {name}"
        )
    if replica.host.name != settings.HOST_NAME:
        raise NotFound(
            f"{name} runs on the host {replica.host.name}; its log is there",
            remedy=f"run `mm logs {name}` on that machine",
        )
    return _existing(home.engine_log(replica.uid), name)


def _existing(path: Path, name: str) -> Path:
    if not path.exists():
        raise NotFound(f"{name} has no log at {path}", remedy="is it started? mm status")
    return path


def _follow_file(path: Path, *, until: Callable[[], bool] = lambda: False) -> None:
    """Print what is added, across rotation and truncation, until interrupted."""
    with path.open("rb") as file:
        file.seek(0, 2)
        inode = path.stat().st_ino
        while not until():
            text = file.read()
            if text:
                sys.stdout.write(coloured(text.decode(errors="replace")))
                sys.stdout.flush()
                continue
            time.sleep(POLL_S)
            if path.exists() and (path.stat().st_ino != inode or path.stat().st_size < file.tell()):
                _follow_file_from_start(path, until)
                return


def _follow_file_from_start(path: Path, until: Callable[[], bool]) -> None:
    sys.stdout.write(coloured(path.read_text(encoding="utf-8", errors="replace")))
    _follow_file(path, until=until)


def _job_log(
    build: int, activation: int, *, lines: int | None, follow: bool, as_json: bool
) -> None:
    """Print a job's last lines, or all; then, if told to, what comes until it has ended."""
    person = actor()
    from deployments import queries
    from mmadmin.core.generations.lifecycle import ENDED, JobState

    job: Callable[[], Any] = (
        (lambda: queries.build(person, build))
        if build
        else (lambda: queries.activation(person, activation))
    )
    back: deque[str] = deque(maxlen=lines)
    after, caught_up = 0, False
    while True:
        ended = JobState(job().state) in ENDED
        chunks = queries.build_log(
            person, build_id=build, activation_id=activation, after_id=after, limit=CHUNKS
        )
        for chunk in chunks:
            after = max(after, chunk.pk)
            back.extend(chunk.text.removesuffix("\n").split("\n"))
        if not as_json and (caught_up or not chunks):
            sys.stdout.writelines(f"{coloured(line)}\n" for line in back)
            sys.stdout.flush()
            back.clear()
        if chunks:
            continue
        if not caught_up and not as_json:
            back = deque()  # what comes from now on is printed whole
        caught_up = True
        if ended or not follow:
            break
        time.sleep(POLL_S)
    if as_json:
        emit_json({"build": build or None, "activation": activation or None, "lines": list(back)})
