"""Process identity: what tells a process from a later one with the same pid.

The kernel counts a process's start in clock ticks since boot. A time of day would move with the
clock: after a correction (NTP at boot, a hand on the clock) every process would look like another.
The boot's id goes with it, because ticks restart at each boot. This is the only form in which
mmadmin remembers processes: in lease files, in the supervisor's records, in the database.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

START_TIME_FIELD = 19
"""Position of the start time after the process name in /proc/<pid>/stat (field 22, proc(5))."""


@cache
def boot_id() -> str:
    """What tells one boot of the machine from the next."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_time(pid: int) -> int | None:
    """When a process started (clock ticks since boot); None when there is none, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[START_TIME_FIELD])


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told apart from a later one with the same pid."""

    pid: int
    started: int
    """Clock ticks since boot."""
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process that has this pid now; None when there is none."""
        started = start_time(pid)
        return None if started is None else cls(pid, started, boot_id())

    @classmethod
    def me(cls) -> ProcessIdentity:
        """The process that asks."""
        found = cls.of(os.getpid())
        if found is None:
            raise RuntimeError("this process is not in /proc")
        return found

    @property
    def alive(self) -> bool:
        """True while that very process runs (a zombie does not)."""
        return self.boot == boot_id() and start_time(self.pid) == self.started

    @property
    def age_s(self) -> float:
        """Seconds since it started, whatever the clock of the day did meanwhile."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return now - self.started / os.sysconf("SC_CLK_TCK")

    def as_json(self) -> dict[str, int | str]:
        """The process as data."""
        return {"pid": self.pid, "started": self.started, "boot": self.boot}


def process_identity_from(value: object) -> ProcessIdentity | None:
    """The process that a record names; None when the record has another form or is half-written."""
    if not isinstance(value, Mapping):
        return None
    pid, started, boot = value.get("pid"), value.get("started"), value.get("boot")
    if isinstance(pid, int) and isinstance(started, int) and isinstance(boot, str):
        return ProcessIdentity(pid, started, boot)
    return None
