"""Locks that children inherit, and leases that die with their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mmadmin.core.store import Store
from mmadmin.core.store.locks import file_lock, leases_in
from tests.core.workshop import in_child


class Busy(Exception):
    """Raised by a hook that does not want to wait."""


def busy(holder: str) -> None:
    """Do not wait."""
    raise Busy(holder)


def is_free(path: Path) -> bool:
    """Whether the lock can be had now."""
    try:
        with file_lock(path, on_wait=busy):
            return True
    except Busy:
        return False


def test_one_at_a_time_and_the_file_goes_away(tmp_path: Path) -> None:
    """Whoever waits hears who holds it; nothing is left when all is done."""
    path = tmp_path / "x.lock"
    with (
        file_lock(path, owner="build 3"),
        pytest.raises(Busy, match="build 3"),
        file_lock(path, on_wait=busy),
    ):
        pass
    assert is_free(path)
    assert list(tmp_path.iterdir()) == []


def test_who_waits_may_be_asked_at_every_look(tmp_path: Path) -> None:
    """With no pause between reports the hook ends a wait within one look."""
    path, heard = tmp_path / "x.lock", []

    def hear(holder: str) -> None:
        heard.append(holder)
        if len(heard) == 3:
            raise Busy(holder)

    with (
        file_lock(path, owner="build 3"),
        pytest.raises(Busy),
        file_lock(path, on_wait=hear, report_every_s=0),
    ):
        pass
    assert heard == ["build 3"] * 3


def test_many_may_share(tmp_path: Path) -> None:
    """Shared holders exclude an exclusive one, and the other way round."""
    path = tmp_path / "x.lock"
    with file_lock(path, shared=True), file_lock(path, shared=True):
        assert not is_free(path)
    with file_lock(path), pytest.raises(Busy), file_lock(path, shared=True, on_wait=busy):
        pass


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    """A counter guarded by the lock loses no step, though the file comes and goes."""
    path, count = tmp_path / "x.lock", tmp_path / "count"
    count.write_text("0")

    def work() -> None:
        for _ in range(20):
            with file_lock(path):
                count.write_text(str(int(count.read_text()) + 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.read_text() == "80"


def test_a_child_that_inherits_keeps_the_lock(tmp_path: Path) -> None:
    """The lock outlives a killed holder for as long as its program runs."""
    path = tmp_path / "x.lock"
    pid_file = tmp_path / "pid"

    def hold_and_die() -> None:
        with file_lock(path) as fd:
            child = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[fd]
            )
            pid_file.write_text(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(hold_and_die) == -signal.SIGKILL
    assert not is_free(path)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    with file_lock(path):
        pass


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    """Without a child, the lock ends with its process."""
    path = tmp_path / "x.lock"

    def hold_and_die() -> None:
        with file_lock(path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(hold_and_die) == -signal.SIGKILL
    assert is_free(path)


def test_leases_die_with_their_process(tmp_path: Path) -> None:
    """A killed holder's lease counts at once as gone, and the next lease clears it away."""
    store = Store(tmp_path / "store", floor_bytes=0)

    def hold_and_die() -> None:
        with store.lease("dying") as lease, store.staging(lease) as staging:
            staging.reserve(1 << 20)
            (staging.out / "half").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(hold_and_die) == -signal.SIGKILL
    assert store.leases() == []
    assert list(store.layout.leases.iterdir()) != []
    (folder,) = store.layout.staging.iterdir()
    time.sleep(1.1)  # a folder younger than a second may belong to a lease not yet seen
    with store.lease("next") as lease:
        assert [(found.id, found.owner) for found in leases_in(store.layout.leases)] == [
            (lease.id, "next")
        ]
        assert not folder.exists()
        assert list(store.layout.reservations.iterdir()) == []
    assert list(store.layout.leases.iterdir()) == []
    assert list(store.layout.trash.iterdir()) == []
