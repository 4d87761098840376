"""Drift: what runs, compared with what should run.

Looks at a live engine from outside, without asking it: command, program, files, environment. A
file of a sealed object that was deleted, replaced or written to under a running engine counts too:
the engine may still answer from its old mapping, and would fail at its next start. The command and
the environment of an engine that overwrites both are compared in its launch file only.
"""

from __future__ import annotations

import hmac
import json
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mmadmin.core.engines.protocol import LaunchSpec, System
from mmadmin.core.home import Home
from mmadmin.core.store import Store
from mmadmin.host.engine_process import launch_file, process, program

LAUNCH_S = 10.0
POLL_S = 0.05
SEALED_MTIME = 1
"""Every file of the store has this modification time, seconds."""
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Drift:
    """One thing that is not as it should be."""

    what: str
    """`process`, `command`, `program`, `file`, `environment` or `launch-file`."""
    message: str
    """What is wrong; never a secret."""


def drift(
    home: Home, uid: str, launch: LaunchSpec, *, system: System, secret: str, store: Store
) -> list[Drift]:
    """What differs between a running engine and its plan; empty = nothing.

    Blocking, milliseconds; reads no file contents. Raises `Unreachable` without a supervisor.
    """
    found = process(home, uid)
    if found is None:
        return [Drift("process", f"{uid} should run and does not")]
    try:
        pid = _engine(found.pid)
        if pid is None:
            return [Drift("process", f"{uid} is still being launched")]
        running = psutil.Process(pid)
        return [
            *_command(running, launch),
            *_environment(running, launch, secret),
            *_files(system, store),
            *_launch_file(home, uid, launch, secret),
        ]
    except psutil.NoSuchProcess:
        return [Drift("process", f"{uid} ended just now")]


def _engine(launcher: int) -> int | None:
    """The engine's own pid; None when its launcher has not started it after a while."""
    give_up = time.monotonic() + LAUNCH_S
    while (pid := program(launcher)) is None and time.monotonic() < give_up:
        time.sleep(POLL_S)
    return pid


def _command(running: psutil.Process, launch: LaunchSpec) -> Iterator[Drift]:
    wanted = Path(launch.argv[0])
    argv = running.cmdline()
    keeps_command = launch.questions.keeps_command
    if keeps_command and (message := differing(argv, launch.argv)):
        yield Drift("command", message)
    try:
        program = Path(running.exe())
    except (psutil.AccessDenied, FileNotFoundError):
        return
    if not wanted.exists():
        yield Drift("program", f"{wanted} is gone; the engine would not start again")
    elif keeps_command and (not program.exists() or not program.samefile(wanted)):
        # A script's program is its interpreter: then the comparison of the command is enough.
        if argv[:1] == [str(wanted)] and program.name.startswith("python"):
            return
        yield Drift("program", f"it runs {program}, planned was {wanted}")


def differing(found: Sequence[str], planned: Sequence[str]) -> str:
    """How a command differs from the planned one, option by option; empty = not at all."""
    if list(found) == list(planned):
        return ""
    has, wanted = _options(found), _options(planned)
    differences = [
        f"{name} is {has[name] or 'without a value'}, planned was {value or 'without a value'}"
        if name in has
        else f"{name}{' ' if value else ''}{value} is missing"
        for name, value in wanted.items()
        if has.get(name) != value
    ]
    differences += [
        f"{name}{' ' if value else ''}{value} was not planned"
        for name, value in has.items()
        if name not in wanted
    ]
    return ", ".join(differences) or "it has the planned options in another order"


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Option → its values; the program first."""
    options: dict[str, list[str]] = {}
    name = "the program"
    for word in argv:
        if word.startswith("--"):
            name = word
            options.setdefault(name, [])
        else:
            options.setdefault(name, []).append(word)
    return {option: " ".join(values) for option, values in options.items()}


def _environment(running: psutil.Process, launch: LaunchSpec, secret: str) -> Iterator[Drift]:
    if not launch.questions.keeps_command:
        return
    try:
        env = running.environ()
    except psutil.AccessDenied:
        return
    if not hmac.compare_digest(env.get(launch.secret_env, "").encode(), secret.encode()):
        yield Drift("environment", "its secret is not the one that the gate uses")
    for name, value in launch.env.items():
        if env.get(name) != value:
            yield Drift("environment", f"{name} is {env.get(name, 'not set')}, planned was {value}")
    for name in sorted(env):
        if name.startswith(tuple(launch.questions.own_environment)):
            yield Drift("environment", f"{name} is set, which changes the engine")


def _files(system: System, store: Store) -> Iterator[Drift]:
    """Every file of the objects that the engine serves from, by a stat."""
    for part in system.parts.values():
        name = part.relative_to(store.root / "objects").parts[0]
        known = store.recorded(name)
        if known is None:
            yield Drift("file", f"{name} is no longer in the store's index")
            continue
        for file in (entry for entry in known.files if entry.kind == "file"):
            path = store.object_path(name) / file.path
            problem = _problem(path, file.size)
            if problem:
                yield Drift("file", f"{name}: {file.path} {problem}")


def _problem(path: Path, size: int) -> str:
    """What is wrong with a sealed file, or the empty text."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return "was deleted"
    if found.st_size != size:
        return f"has {found.st_size} bytes, sealed were {size}"
    if found.st_mode & _WRITABLE:
        return "was made writable"
    if int(found.st_mtime) != SEALED_MTIME:
        return "was written to"
    return ""


def _launch_file(home: Home, uid: str, launch: LaunchSpec, secret: str) -> Iterator[Drift]:
    """What the supervisor would start the engine from, were it to fall now."""
    path = launch_file(home, uid)
    try:
        mode = path.stat().st_mode
        holds: Any = json.loads(path.read_text(encoding="utf-8"))
        argv = [str(word) for word in holds["argv"]]
        its_secret, env = str(holds["secret"]), dict(holds["env"])
    except FileNotFoundError:
        yield Drift("launch-file", "its launch file is gone; the engine would not start again")
        return
    except (OSError, ValueError, KeyError, TypeError):
        yield Drift("launch-file", "its launch file is damaged; the engine would not start again")
        return
    if stat.S_IMODE(mode) & 0o077:
        yield Drift("launch-file", "others may read its launch file, which holds its secret")
    if message := differing(argv, launch.argv):
        yield Drift("launch-file", f"its launch file was changed, for its next start: {message}")
    if not hmac.compare_digest(its_secret.encode(), secret.encode()):
        yield Drift("launch-file", "its launch file has another secret than the gate uses")
    if env != dict(launch.env):
        yield Drift("launch-file", "its launch file has another environment than planned")
