"""Room is promised before work begins."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from mmadmin.core.errors import DiskFull
from mmadmin.core.store import Store
from mmadmin.core.store.disk import used_bytes
from tests.core.workshop import in_child

GIB = 1 << 30


class Counted(Store):
    """A store on a disk whose free space the test decides."""

    free = 10 * GIB

    def __init__(self, root: Path, floor_bytes: int = GIB) -> None:
        super().__init__(root, floor_bytes=floor_bytes)
        self.disk.free_bytes = lambda: self.free  # type: ignore[method-assign]


@pytest.fixture
def store(tmp_path: Path) -> Counted:
    """An empty store on a disk with 10 GiB free."""
    return Counted(tmp_path / "store")


def test_the_floor_stays_free(store: Counted) -> None:
    """Exactly what lies above the floor can be had."""
    with store.reserve(9 * GIB):
        pass
    with (
        pytest.raises(
            DiskFull, match=r"need 9.0 GiB, have 10.0 GiB free, and 1.0 GiB must stay free"
        ) as caught,
        store.reserve(9 * GIB + 1),
    ):
        pass
    assert caught.value.details["need_bytes"] == 9 * GIB + 1
    assert "mm store gc" in caught.value.remedy


def test_two_that_fit_alone_but_not_together(store: Counted) -> None:
    """The second is refused with a message, and gets its room when the first is done."""
    with (
        store.reserve(5 * GIB, owner="merge of A"),
        pytest.raises(DiskFull, match=r"5.0 GiB are promised \(5.0 GiB to merge of A\)"),
        store.reserve(5 * GIB),
    ):
        pass
    with store.reserve(5 * GIB):
        pass


def test_the_second_may_wait(store: Counted) -> None:
    """With time to wait, the second hears why and goes on once the first is done."""
    heard: list[str] = []
    done = threading.Event()

    def first() -> None:
        with store.reserve(5 * GIB, owner="first"):
            started.set()
            done.wait(60)

    started = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(60)

    def hear(why: str) -> None:
        heard.append(why)
        done.set()

    with store.reserve(5 * GIB, wait_s=60, on_wait=hear):
        pass
    thread.join()
    assert "promised" in heard[0]


def test_what_is_written_is_no_longer_owed(store: Counted, tmp_path: Path) -> None:
    """A promise counts only for what its holder still has to write."""
    folder = tmp_path / "work"
    folder.mkdir()
    with store.reserve(64 << 20, covers=folder):
        (before,) = store.disk.reservations()
        (folder / "part").write_bytes(os.urandom(16 << 20))
        (after,) = store.disk.reservations()
    assert (before.used_bytes, before.owed_bytes) == (0, 64 << 20)
    assert after.used_bytes >= 16 << 20
    assert after.owed_bytes == (64 << 20) - after.used_bytes


def test_promises_die_with_their_process(store: Counted) -> None:
    """A killed job's promise is forgotten."""

    def reserve_and_die() -> None:
        with store.reserve(9 * GIB):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(reserve_and_die) == -signal.SIGKILL
    with store.reserve(9 * GIB):
        pass
    assert list(store.layout.reservations.iterdir()) == []


def test_an_attempt_keeps_its_promise_to_its_end(store: Counted) -> None:
    """`Staging.reserve` holds until the attempt is over."""
    with store.lease("x") as lease:
        with store.staging(lease) as staging:
            staging.reserve(5 * GIB)
            assert [r.owner for r in store.disk.reservations()] == ["x"]
            with pytest.raises(DiskFull):
                staging.reserve(5 * GIB)
        assert store.disk.reservations() == []


def test_used_bytes_counts_blocks_and_forgives_what_vanishes(tmp_path: Path) -> None:
    """Folders are walked; a folder that is gone holds nothing."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_bytes(b"x" * 10_000)
    assert 10_000 <= used_bytes(tmp_path / "a") <= 64 << 10
    assert used_bytes(tmp_path / "none") == 0
