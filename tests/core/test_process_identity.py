"""What tells a process from a later one with the same pid."""

from __future__ import annotations

import os
import subprocess
import sys

from mmadmin.core.process_identity import ProcessIdentity, process_identity_from, start_time

NO_PID = 2**22 + 1
"""Above the kernel's largest pid."""


def test_a_reused_pid_is_another_process() -> None:
    """Pid, start time and boot make a process; any other of them is another process."""
    me = ProcessIdentity.me()
    assert me.alive
    assert me == ProcessIdentity.of(os.getpid())
    assert not ProcessIdentity(me.pid, me.started + 1, me.boot).alive
    assert not ProcessIdentity(me.pid, me.started, "another boot").alive
    assert start_time(NO_PID) is None
    assert ProcessIdentity.of(NO_PID) is None


def test_its_age_is_counted_from_the_boot() -> None:
    """A process that was just started is younger than the one that started it."""
    child = subprocess.Popen(["/bin/sleep", "600"])
    try:
        young = ProcessIdentity.of(child.pid)
        assert young
        assert -1 < young.age_s < ProcessIdentity.me().age_s + 0.02  # a tick is a hundredth
    finally:
        child.kill()
        child.wait()


def test_a_zombie_is_dead() -> None:
    """A process that only waits to be reaped runs no more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(child.pid) is None
    assert ProcessIdentity.of(child.pid) is None
    child.wait()


def test_a_record_of_another_form_is_unknown() -> None:
    """What an earlier version or half a write left is no process at all."""
    me = ProcessIdentity.me()
    assert process_identity_from(me.as_json()) == me
    assert process_identity_from({**me.as_json(), "started": 1764518400.25}) is None
    assert process_identity_from({"pid": me.pid, "started": me.started}) is None
    assert process_identity_from([me.pid, me.started, me.boot]) is None
    assert process_identity_from(None) is None
