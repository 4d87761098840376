"""Bytes that come in are written once and hashed on the way."""

from __future__ import annotations

import hashlib
import os
import resource
from pathlib import Path

import pytest

from mmadmin.core.store.ingest import BUFFER_BYTES, HashingWriter, copy_hashing, hash_file

SIZES = [0, 1, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 40 * BUFFER_BYTES + 7]


@pytest.mark.parametrize("size", SIZES)
def test_copies_are_equal_and_hashed(tmp_path: Path, size: int) -> None:
    """Bytes, size and digest are right at every boundary of the buffers."""
    data = os.urandom(min(size, BUFFER_BYTES * 3)) * (size // (BUFFER_BYTES * 3) + 1)
    data = data[:size]
    (tmp_path / "a").write_bytes(data)
    seen: list[tuple[int, int]] = []
    found = copy_hashing(
        tmp_path / "a", tmp_path / "b", progress=lambda done, total: seen.append((done, total))
    )
    assert found == (hashlib.sha256(data).hexdigest(), size)
    assert (tmp_path / "b").read_bytes() == data
    assert hash_file(tmp_path / "b") == found
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert not seen or seen[-1] == (size, size)


@pytest.mark.parametrize("parts", [[], [b""], [b"a", b"", b"bc" * BUFFER_BYTES], [b"x" * 10] * 500])
def test_writing_hashes(tmp_path: Path, parts: list[bytes]) -> None:
    """A stream of parts of any size has the digest of their whole."""
    with HashingWriter(tmp_path / "a") as file:
        for part in parts:
            file.write(part)
    data = b"".join(parts)
    assert (file.sha256, file.size) == (hashlib.sha256(data).hexdigest(), len(data))
    assert (tmp_path / "a").read_bytes() == data


def test_holes_stay_holes_and_memory_is_bounded(tmp_path: Path) -> None:
    """A sparse file needs neither its size on the disk nor in memory."""
    size = 256 << 20
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"island")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sha256, copied = copy_hashing(tmp_path / "sparse", tmp_path / "copy")
    assert copied == size == (tmp_path / "copy").stat().st_size
    assert (tmp_path / "copy").stat().st_blocks * 512 < 8 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    with (tmp_path / "copy").open("rb") as file:
        file.seek(size // 2)
        assert file.read(6) == b"island"
        file.seek(0)
        assert hashlib.file_digest(file, "sha256").hexdigest() == sha256


def test_an_error_of_the_disk_reaches_the_caller(tmp_path: Path) -> None:
    """A write that fails raises; the hashing thread does not hang."""
    (tmp_path / "a").write_bytes(b"x" * (30 * BUFFER_BYTES))
    with pytest.raises(FileExistsError):
        copy_hashing(tmp_path / "a", tmp_path / "a")

    def stop(done: int, total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        copy_hashing(tmp_path / "a", tmp_path / "b", progress=stop)
