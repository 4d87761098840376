"""The sandbox that an engine runs in: it sees its own objects and its GPUs, and has no network.

| level | network | files | processes | privileges |
|---|---|---|---|---|
| bubblewrap | none | its objects, the system's libraries, two own folders | its own | none |
| unshare | none | as the caller | its own | as the caller |
| none | as the caller | as the caller | as the caller | as the caller |

bubblewrap also filters system calls (`system_calls`). At every level the launcher sets limits.
`holds_here` runs a program at the level and reports what it was kept from, so what is shown is
measured. Inside, the engine is the second process of its pid namespace, which is how `engine_of`
finds it from outside.
"""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidInput, ToolMissing
from mmadmin.host.guard import descendants
from mmadmin.host.sandbox import (
    AS_SECOND,
    LEVELS,
    TRIAL_TIMEOUT_S,
    Level,
    bubblewrap_program,
    unshare_command,
)
from mmadmin.host.system_calls import filter_descriptor

SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Of the root; most systems have links to `/usr` in their place."""
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
TOPOLOGY = ("/sys/devices/system/cpu", "/sys/devices/system/node")
"""An engine counts cores by these; without them it starts another number of threads."""
GPU_TOPOLOGY = ("/sys/devices", "/sys/bus/pci", "/sys/class/pci_bus")
"""By these NCCL finds the paths between GPUs."""
LIBRARY_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
TMP_BYTES = 256 << 20
"""Of `/tmp`, which lies in memory."""
OPEN_FILES = 65_536
PROCESSES = 32_768
"""Processes and threads; the kernel does not count those of root."""
FILE_BYTES = 64 << 30
OUT_OF_MEMORY_SCORE = 500
"""Where memory runs out, the kernel ends engines before the panel, the gate and the broker."""
SECOND = 2


@dataclass(frozen=True, slots=True)
class EngineSandbox:
    """What one engine may see and write."""

    level: Level
    readable: Sequence[str] = ()
    """Folders and files, read-only: its objects."""
    writable: Sequence[str] = ()
    """Folders of its own."""
    devices: Sequence[str] = ()
    """Device files of its GPUs."""

    def as_json(self) -> dict[str, Json]:
        """Plain data, for the launch file."""
        return {
            "level": self.level,
            "readable": list(self.readable),
            "writable": list(self.writable),
            "devices": list(self.devices),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineSandbox:
        """The inverse of `as_json`."""
        return cls(data["level"], data["readable"], data["writable"], data["devices"])

    @contextmanager
    def enclosing(
        self, argv: Sequence[str], env: Mapping[str, str]
    ) -> Iterator[tuple[list[str], dict[str, str], tuple[int, ...]]]:
        """The command that runs `argv` inside, its environment, and what it must inherit."""
        if self.level == "none":
            yield list(argv), dict(env), ()
        elif self.level == "unshare":
            # Its end takes all with it; that it ends with us is not in its own power.
            tied = ["setpriv", "--pdeathsig", "KILL", "--", *unshare_command()]
            yield [*tied, "--", *AS_SECOND, *argv], dict(env), ()
        else:
            descriptor = filter_descriptor()
            given = () if descriptor is None else (descriptor,)
            try:
                yield self._bubblewrap(argv, env, descriptor), self._environment(env), given
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """What is not visible inside is not named either."""
        home = self.writable[0] if self.writable else "/tmp"  # noqa: S108 (its own)
        own = {"HOME": home, "TMPDIR": "/tmp", "USER": "engine", "LOGNAME": "engine"}  # noqa: S108
        return {**env, **own}

    def _bubblewrap(
        self, argv: Sequence[str], env: Mapping[str, str], descriptor: int | None
    ) -> list[str]:
        args = [str(bubblewrap_program()), "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]  # noqa: S108
        args += [*_system(env), "--dev", "/dev", "--proc", "/proc"]
        for path in (*TOPOLOGY, *(GPU_TOPOLOGY if self.devices else ())):
            args += ["--ro-bind-try", path, path]
        for node in self.devices:
            args += ["--dev-bind", node, node]
        for path in self.readable:
            args += ["--ro-bind", path, path]
        for path in self.writable:
            args += ["--bind", path, path]
        if descriptor is not None:
            args += ["--seccomp", str(descriptor)]
        return [
            *args,
            *("--unshare-all", "--hostname", "engine", "--cap-drop", "ALL"),
            *("--die-with-parent", "--new-session", "--remount-ro", "/"),
            *("--chdir", self.writable[0] if self.writable else "/", "--", *argv),
        ]


def _system(env: Mapping[str, str]) -> list[str]:
    """The host's programs, libraries and Python, read-only, and what the dynamic linker reads."""
    args = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_FOLDERS:
        path = Path("/") / name
        if path.is_symlink():
            args += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    for file in SYSTEM_FILES:
        args += ["--ro-bind-try", file, file]
    named = [folder for name in LIBRARY_VARIABLES for folder in env.get(name, "").split(":")]
    for folder in dict.fromkeys([*linker_folders(), *named, sys.base_prefix]):
        if _is_elsewhere(folder):
            args += ["--ro-bind-try", folder, folder]
    return args


def _is_elsewhere(folder: str) -> bool:
    """True for a folder that is not among the system's own."""
    path = Path(folder)
    top = path.parts[1:2]
    return path.is_absolute() and bool(top) and top[0] not in ("usr", *SYSTEM_FOLDERS)


@functools.cache
def linker_folders() -> tuple[str, ...]:
    """The folders of the dynamic linker's cache, also those that its entries resolve to.

    The driver's libraries may lie in a folder that nothing else names.
    """
    try:
        listed = subprocess.run(
            ["/sbin/ldconfig", "-p"],
            capture_output=True,
            text=True,
            timeout=TRIAL_TIMEOUT_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):  # a system without such a cache
        return ()
    files = [Path(line.split(" => ")[1]) for line in listed.splitlines() if " => " in line]
    found = {str(path.parent) for file in files for path in (file, file.resolve())}
    return tuple(sorted(folder for folder in found if _is_elsewhere(folder)))


def limit_resources(*, on_gpus: bool) -> None:
    """Put this process, which becomes or starts an engine, under an engine's limits.

    A core dump would hold prompts and the engine's secret. Memory is limited where the engine has
    no GPU: a CUDA program reserves addresses far beyond what it uses.
    """
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: PROCESSES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
    }
    if not on_gpus:
        limits[resource.RLIMIT_DATA] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))
    with suppress(OSError):  # a container may not let us
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE), encoding="ascii")


def engine_of(launcher: int) -> int | None:
    """The pid, seen from here, of the program in the sandbox that a launcher's process made.

    None = it is not there yet. It is the second process of a pid namespace below the launcher's,
    once it runs another program than the first.
    """
    depth = len(_pids(launcher))
    for pid in descendants(launcher):
        pids = _pids(pid)
        if (
            len(pids) == depth + 1
            and pids[-1] == SECOND
            and _command(pid) != _command(_parent(pid))
        ):
            return pid
    return None


def _pids(pid: int) -> list[int]:
    """A process's pid in each pid namespace, from ours inwards; empty when it has ended."""
    return [int(word) for word in _status(pid, "NSpid").split()]


def _parent(pid: int) -> int:
    return int(_status(pid, "PPid") or 0)


def _status(pid: int, name: str) -> str:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return next(
        (line[len(name) + 1 :] for line in text.splitlines() if line.startswith(f"{name}:")), ""
    )


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# -- what holds here


@dataclass(frozen=True, slots=True)
class Holds:
    """What a program in an engine's sandbox was kept from, as it was tried on this host."""

    level: Level
    network: bool
    files: bool
    processes: bool
    privileges: bool
    system_calls: bool

    @property
    def message(self) -> str:
        """The level and what holds, in one line."""
        names = {
            "no network": self.network,
            "no files but their own": self.files,
            "no other processes": self.processes,
            "no privileges": self.privileges,
            "system calls filtered": self.system_calls,
        }
        held = ", ".join(name for name, value in names.items() if value)
        return f"{self.level}: {held or 'engines are not fenced in at all'}"

    @property
    def all(self) -> bool:
        """True when an engine is kept from everything."""
        return all((self.network, self.files, self.processes, self.privileges, self.system_calls))


_LOOK = """
test -r "$1" && echo files
readlink /proc/self/ns/pid /proc/self/ns/net
grep -q '^NoNewPrivs:.1' /proc/self/status || echo privileges
grep -q '^Seccomp:.2' /proc/self/status || echo system_calls
sed 1,2d /proc/net/dev | grep -qv '^ *lo:' && echo interfaces
echo looked
"""


def _look(level: Level) -> Holds | None:
    """Run a program at a level; None = the level does not work here."""
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as own:
        sandbox = EngineSandbox(level, writable=[own])
        argv = ["/bin/sh", "-c", _LOOK, "sh", file.name]
        try:
            with sandbox.enclosing(argv, {"PATH": os.defpath}) as (command, env, given):
                done = subprocess.run(
                    command,
                    env=env,
                    pass_fds=given,
                    capture_output=True,
                    text=True,
                    timeout=TRIAL_TIMEOUT_S,
                    check=False,
                )
        except (OSError, ToolMissing, subprocess.TimeoutExpired):
            return None
    found = set(done.stdout.split())
    if "looked" not in found:
        return None
    return Holds(
        level,
        network=not found & {"interfaces", _namespace("net")},
        files="files" not in found,
        processes=_namespace("pid") not in found,
        privileges="privileges" not in found,
        system_calls="system_calls" not in found,
    )


def _namespace(kind: str) -> str:
    """The namespace that this process is in."""
    return str(Path(f"/proc/self/ns/{kind}").readlink())


@functools.cache
def holds_here(setting: str = "auto") -> Holds:
    """What holds for engines on this host, at the best level or at the one that `MM_SANDBOX` names.

    Tried once a process. Raises `ToolMissing` when the named level does not work here, and
    `InvalidInput` for a word that names none.
    """
    if setting not in ("auto", *LEVELS):
        raise InvalidInput(
            f"MM_SANDBOX is {setting!r}", remedy=f"use auto or one of {', '.join(LEVELS)}"
        )
    for level in LEVELS:
        if setting in ("auto", level) and (found := _look(level)) is not None:
            return found
    raise ToolMissing(
        f"sandbox level {setting} does not work for engines on this host",
        remedy="set MM_SANDBOX=auto, or allow user namespaces",
    )


def level_setting(env: Mapping[str, str] = os.environ) -> str:
    """`MM_SANDBOX`, `auto` where it is not set."""
    return env.get("MM_SANDBOX") or "auto"
