"""Drift: what runs, compared with what should run.

Looks at a live engine from outside, without asking it: command, program, files, environment. A
file of a sealed object that was deleted, replaced or written to under a running engine is told
too: the engine may still answer from its old mapping, and would fail at its next start.
"""

from __future__ import annotations

import hmac
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from mmadmin.core.engine import LaunchSpec, System
from mmadmin.core.home import Home
from mmadmin.core.store import Store
from mmadmin.host.engine_process import has_become_engine, launch_file, process

LAUNCH_S = 10.0
POLL_S = 0.05
SEALED_MTIME = 1
"""Every file of the store has this modification time, seconds."""
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_FOREIGN = "LLAMA_ARG_"
"""Prefix of environment variables that would change the server behind its argv."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One thing that is not as it should be."""

    what: str
    """`process`, `command`, `program`, `file`, `environment` or `launch-file`."""
    words: str
    """What is wrong, in words; never a secret."""


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
        running = psutil.Process(found.pid)
        if not _wait_for_engine(running):
            return [Drift("process", f"{uid} is still being launched")]
        return [
            *_command(running, launch),
            *_environment(running, launch, secret),
            *_files(system, store),
            *_launch_file(home, uid),
        ]
    except psutil.NoSuchProcess:
        return [Drift("process", f"{uid} ended just now")]


def _wait_for_engine(running: psutil.Process) -> bool:
    """False when the launcher has not handed over after a while (it takes a tenth of a second)."""
    give_up = time.monotonic() + LAUNCH_S
    while not has_become_engine(running.cmdline()):
        if time.monotonic() > give_up:
            return False
        time.sleep(POLL_S)
    return True


def _command(running: psutil.Process, launch: LaunchSpec) -> Iterator[Drift]:
    argv = running.cmdline()
    if argv != list(launch.argv):
        extra = [word for word in argv if word not in launch.argv]
        gone = [word for word in launch.argv if word not in argv]
        yield Drift(
            "command",
            f"it runs with {_listed(extra)} too, and without {_listed(gone)}"
            if extra or gone
            else "it runs with the same words in another order",
        )
    wanted = Path(launch.argv[0])
    try:
        program = Path(running.exe())
    except (psutil.AccessDenied, FileNotFoundError):
        return
    if not wanted.exists():
        yield Drift("program", f"{wanted} is gone; the engine would not start again")
    elif not program.exists() or not program.samefile(wanted):
        # A script's program is its interpreter: then the command has told all there is.
        if argv[:1] == [str(wanted)] and program.name.startswith("python"):
            return
        yield Drift("program", f"it runs {program}, planned was {wanted}")


def _environment(running: psutil.Process, launch: LaunchSpec, secret: str) -> Iterator[Drift]:
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
        if name.startswith(_FOREIGN):
            yield Drift("environment", f"{name} is set, which changes the engine")


def _files(system: System, store: Store) -> Iterator[Drift]:
    """Every file of the objects that the engine serves from, by a stat."""
    for part in (system.engine, system.model, system.template, system.mmproj):
        if part is None:
            continue
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


def _launch_file(home: Home, uid: str) -> Iterator[Drift]:
    path = launch_file(home, uid)
    if not path.exists():
        yield Drift("launch-file", "its launch file is gone; the engine would not start again")
    elif stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield Drift("launch-file", "others may read its launch file, which holds its secret")


def _listed(words: list[str]) -> str:
    return " ".join(words) or "nothing"
