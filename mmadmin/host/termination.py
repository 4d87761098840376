"""Termination of processes: SIGTERM, then SIGKILL after a wait.

A pid alone is never trusted, because it may belong to another program by now.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

from mmadmin.core.process_identity import ProcessIdentity

PATIENCE_S = 10.0
FORCE_S = 10.0
_POLL_S = 0.05


def end_processes(
    processes: Sequence[ProcessIdentity], *, patience_s: float = PATIENCE_S
) -> list[int]:
    """SIGTERM, then after `patience_s` SIGKILL; the pids that had to be killed.

    Their children, as they were at the beginning, end with them.
    """
    family: dict[int, psutil.Process] = {}
    for process in processes:
        try:
            found = psutil.Process(process.pid)
            # Looked at after psutil has noted whose pid it is: what it signals is this process.
            if process.alive:
                family[found.pid] = found
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
