"""A file that did not change is not read again; one that did always is."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmadmin.core.errors import Conflict
from mmadmin.host import known_digests
from mmadmin.host.known_digests import KnownDigests

LONG_AGO_S = time.time() - 1000


def digest(data: bytes) -> str:
    """The truth."""
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were really read; the file system's clock counts in nothing."""
    monkeypatch.setattr(known_digests, "TICK_NS", 0)
    return note_reads(monkeypatch)


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each reading of a file."""
    done: list[str] = []
    real = known_digests.hash_file

    def noted(path: Path) -> tuple[str, int]:
        done.append(os.path.realpath(path))
        return real(path)

    monkeypatch.setattr(known_digests, "hash_file", noted)
    return done


@pytest.fixture
def known(tmp_path: Path) -> KnownDigests:
    """An empty memory."""
    return KnownDigests(tmp_path / "digests.sqlite3")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def settle() -> None:
    """Let the kernel's coarse clock go on, so that what follows has another time."""
    time.sleep(0.02)


def test_an_unchanged_file_is_read_once(
    known: KnownDigests, model: Path, reads: list[str], tmp_path: Path
) -> None:
    """Also by another name, through a link, and by another process's memory of the same file."""
    settle()
    first = known.hash_file(model)
    assert first == (digest(b"weights"), 7)
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert known.hash_file(model) == known.hash_file(link) == first
    model.rename(tmp_path / "renamed.gguf")  # changes the time of change: read once more
    settle()
    for _ in range(2):
        assert KnownDigests(known.path).hash_file(tmp_path / "renamed.gguf") == first
    assert len(reads) <= 2


def other_bytes(path: Path) -> None:
    """Same size, other bytes, the time of modification put back."""
    before = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def replaced(path: Path) -> None:
    """Another inode of the same size and time of modification."""
    before = path.stat()
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"WEIGHTS")
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.replace(path)


def pointed_elsewhere(path: Path) -> None:
    """A link that leads to another file now."""
    fresh = path.with_suffix(".other")
    fresh.write_bytes(b"WEIGHTS")
    path.unlink()
    path.symlink_to(fresh)


def grown(path: Path) -> None:
    """More bytes at its end."""
    with path.open("ab") as file:
        file.write(b"!")


@pytest.mark.parametrize("change", [other_bytes, replaced, pointed_elsewhere, grown])
def test_a_changed_file_is_read_again(
    known: KnownDigests, model: Path, reads: list[str], change: Callable[[Path], None]
) -> None:
    """Whatever was done to hide the change."""
    settle()
    known.hash_file(model)
    settle()
    change(model)
    assert known.hash_file(model)[0] == digest(model.read_bytes()) != digest(b"weights")


def test_a_file_that_just_changed_is_not_trusted(
    known: KnownDigests, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within one tick of the clock would leave the same times."""
    reads = note_reads(monkeypatch)
    for _ in range(2):
        known.hash_file(model)
    assert len(reads) == 2
    monkeypatch.setattr(known_digests, "TICK_NS", 0)
    settle()
    for _ in range(2):
        known.hash_file(model)
    assert len(reads) == 3


def test_times_in_the_future_are_not_trusted(
    known: KnownDigests, model: Path, reads: list[str]
) -> None:
    """As they come with a clock that was wrong."""
    later = time.time() + 1000
    os.utime(model, (later, later))
    for _ in range(2):
        known.hash_file(model)
    assert len(reads) == 2


def test_a_file_that_grows_while_it_is_read_is_refused(
    known: KnownDigests, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest would be of something that never was, and is not remembered."""
    monkeypatch.setattr(known_digests, "TICK_NS", 0)
    settle()
    real = known_digests.hash_file

    def growing(path: Path) -> tuple[str, int]:
        found = real(path)
        grown(model)
        return found

    monkeypatch.setattr(known_digests, "hash_file", growing)
    with pytest.raises(Conflict):
        known.hash_file(model)
    monkeypatch.setattr(known_digests, "hash_file", real)
    assert known.hash_file(model)[0] == digest(b"weights!")


def test_rehash_doubts_the_memory(known: KnownDigests, model: Path, reads: list[str]) -> None:
    """What was forgotten is read again; a path that is not there is no reason to fail."""
    settle()
    known.hash_file(model)
    known.forget([model, model.with_suffix(".none")])
    known.hash_file(model)
    assert len(reads) == 2


def test_it_is_bounded(
    known: KnownDigests, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those go that were not asked for the longest."""
    monkeypatch.setattr(known_digests, "MOST", 3)
    files = [tmp_path / str(n) for n in range(5)]
    for path in files:
        path.write_text(path.name)
    settle()
    for path in [*files[:3], files[0], *files[3:]]:
        known.hash_file(path)
    with sqlite3.connect(known.path) as database:
        ((count,),) = database.execute("SELECT count(*) FROM digests").fetchall()
    assert count == 3
    reads.clear()
    for path in files[0], *files[3:]:
        known.hash_file(path)
    assert not reads


@pytest.mark.parametrize("damage", [b"not a database" * 100, b""])
def test_a_damaged_memory_only_costs_time(
    known: KnownDigests, model: Path, reads: list[str], damage: bytes
) -> None:
    """The truth comes from the file; the memory is made anew."""
    settle()
    known.path.write_bytes(damage)
    for _ in range(3):
        assert known.hash_file(model)[0] == digest(b"weights")
    assert len(reads) <= 2


def test_a_memory_that_cannot_be_written_only_costs_time(tmp_path: Path, model: Path) -> None:
    """A folder that is not there, for instance."""
    known = KnownDigests(tmp_path / "none" / "digests.sqlite3")
    assert known.hash_file(model)[0] == digest(b"weights")
    known.forget([model])


def _hash_until_killed(path: Path, folder: Path) -> None:
    known_digests.TICK_NS = 0
    known = KnownDigests(path)
    while True:
        for file in folder.iterdir():
            assert known.hash_file(file)[0] == digest(file.read_bytes())
            known.forget([file])


def test_writers_that_are_killed_leave_it_whole(tmp_path: Path) -> None:
    """Several processes at once, each killed at any moment."""
    folder = tmp_path / "files"
    folder.mkdir()
    for n in range(5):
        (folder / str(n)).write_bytes(bytes([n]) * 100)
    path = tmp_path / "digests.sqlite3"
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        writers = [
            context.Process(target=_hash_until_killed, args=(path, folder)) for _ in range(3)
        ]
        for writer in writers:
            writer.start()
        time.sleep(1.5)
        for writer in writers:
            assert writer.is_alive()
            writer.kill()
        for writer in writers:
            writer.join()
            assert writer.exitcode == -signal.SIGKILL
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    for file in folder.iterdir():
        assert KnownDigests(path).hash_file(file)[0] == digest(file.read_bytes())


def test_threads_share_it(known: KnownDigests, model: Path, reads: list[str]) -> None:
    """A worker's threads and the panel's."""
    settle()
    found: set[tuple[str, int]] = set()
    threads = [threading.Thread(target=lambda: found.add(known.hash_file(model))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(digest(b"weights"), 7)}


TICK_HERE_NS = 10_000_000
"""Longer than a tick of the kernel's clock here, and short enough to wait for."""
CHANGES = st.lists(
    st.tuples(st.sampled_from("wtrls"), st.integers(0, 2), st.binary(min_size=4, max_size=4)),
    max_size=12,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(CHANGES)
def test_it_never_tells_an_untruth(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int, bytes]]
) -> None:
    """Whatever is written, touched, replaced or linked: the rule for the clock's ticks holds."""
    folder = tmp_path_factory.mktemp("untruth")
    known = KnownDigests(folder / "digests.sqlite3")
    paths = [folder / str(n) for n in range(3)]
    for path in paths:
        path.write_bytes(b"....")
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(known_digests, "TICK_NS", TICK_HERE_NS)
        for what, n, data in changes:
            path = paths[n]
            if what == "w":
                path.write_bytes(data)
            elif what == "t":
                os.utime(path, (LONG_AGO_S, LONG_AGO_S))
            elif what == "r":
                fresh = folder / "fresh"
                fresh.write_bytes(data)
                os.utime(fresh, (LONG_AGO_S, LONG_AGO_S))
                fresh.replace(path)
            elif what == "s":
                time.sleep(2 * TICK_HERE_NS / 1e9)
            else:
                path.unlink()
                os.link(paths[(n + 1) % 3], path)
            for each in paths:
                assert known.hash_file(each)[0] == digest(each.read_bytes())
