"""Ending processes for certain: by pid and start time, with patience, then by force.

A pid alone is never trusted: it may belong to another program by now.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

PATIENCE_S = 10.0
FORCE_S = 10.0
CLOCK_S = 0.05
"""Start times are read from jiffies; two readings of one process differ by less than this."""
_POLL_S = 0.05


def process(pid: int, started: float) -> psutil.Process | None:
    """The process with that pid and start time (Unix seconds); None when it is gone."""
    try:
        found = psutil.Process(pid)
        same = abs(found.create_time() - started) < CLOCK_S
        dead = found.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return found if same and not dead else None


def is_alive(pid: int, started: float) -> bool:
    """True while that very process runs (a zombie does not)."""
    return process(pid, started) is not None


def end_processes(
    processes: Sequence[tuple[int, float]], *, patience_s: float = PATIENCE_S
) -> list[int]:
    """SIGTERM, then after `patience_s` SIGKILL; the pids that had to be killed.

    Their children, as they were at the beginning, end with them.
    """
    family: dict[int, psutil.Process] = {}
    for pid, started in processes:
        found = process(pid, started)
        if found is None:
            continue
        family[found.pid] = found
        try:
            family.update({child.pid: child for child in found.children(recursive=True)})
        except psutil.NoSuchProcess:
            continue
    if patience_s > 0:
        for one in family.values():
            _signal(one, force=False)
    left = _wait(list(family.values()), patience_s)
    for one in left:
        _signal(one, force=True)
    _wait(left, FORCE_S)
    return [one.pid for one in left]


def _signal(one: psutil.Process, *, force: bool) -> None:
    try:
        if force:
            one.kill()
        else:
            one.terminate()
    except psutil.NoSuchProcess:
        return


def _wait(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after `timeout_s`; reaps nothing, unlike `psutil.wait_procs`."""
    give_up = time.monotonic() + timeout_s
    left = [one for one in processes if _runs(one)]
    while left and time.monotonic() < give_up:
        time.sleep(_POLL_S)
        left = [one for one in left if _runs(one)]
    return left


def _runs(one: psutil.Process) -> bool:
    try:
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
