"""Bringing bytes in: written once, hashed while they are written, by a second thread.

Memory is bounded by a pool of buffers, whatever the file's size.
"""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from mmadmin.core.callbacks import Progress, silent

BUFFER_BYTES = 1 << 20
BUFFERS = 16


class HashThread:
    """Hashes buffers in their order while the caller goes on; buffers come back by `take`."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._full: queue.SimpleQueue[tuple[bytearray, int] | None] = queue.SimpleQueue()
        self._empty: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._empty.put(bytearray())
        self._thread = threading.Thread(target=self._work, name="sha256", daemon=True)
        self._thread.start()

    def take(self) -> bytearray:
        """An empty buffer of `BUFFER_BYTES`; waits while all are being hashed."""
        buffer = self._empty.get()
        if not buffer:
            buffer.extend(bytes(BUFFER_BYTES))
        return buffer

    def give(self, buffer: bytearray, count: int) -> None:
        """Hash the first `count` bytes; the buffer must not be changed any more."""
        self._full.put((buffer, count))

    def close(self) -> str:
        """Wait for the thread; the hex digest of all that was given."""
        self._full.put(None)
        self._thread.join()
        return self._sha256.hexdigest()

    def _work(self) -> None:
        while (item := self._full.get()) is not None:
            buffer, count = item
            self._sha256.update(memoryview(buffer)[:count])
            self._empty.put(buffer)


class HashingWriter:
    """A file that is hashed while it is written; for bytes that arrive from a network.

    `with HashingWriter(path) as file: file.write(…)`; afterwards `sha256` and `size` tell what
    was written. The bytes are on the disk (fsync) when the block ends without an error. With
    `resume`, what is in the file already stays, is read once to be hashed, and counts.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.size = 0
        self.sha256 = ""
        self._resume = resume

    def __enter__(self) -> Self:
        begin = os.O_APPEND if self._resume else os.O_TRUNC
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | begin, 0o644)
        self._hash = HashThread()
        while self._resume:
            buffer = self._hash.take()
            count = os.preadv(self._fd, [buffer], self.size)
            if count == 0:
                break
            self._hash.give(buffer, count)
            self.size += count
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            part = view[:BUFFER_BYTES]
            buffer = self._hash.take()
            buffer[: len(part)] = part
            self._hash.give(buffer, len(part))
            _write_all(self._fd, part)
            self.size += len(part)
            view = view[len(part) :]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sha256 = self._hash.close()
        try:
            if kind is None:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


def copy_hashing(source: Path, target: Path, *, progress: Progress = silent) -> tuple[str, int]:
    """Copy a file, hashing it on the way: its sha256 and size.

    One read, one write; holes of a sparse file stay holes. The target is fsynced. Raises
    `OSError` as the file system does; a partial target is the caller's to remove.
    """
    with source.open("rb", buffering=0) as read:
        info = os.fstat(read.fileno())
        sparse = info.st_blocks * 512 < info.st_size
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            if info.st_size and not sparse:
                _claim(fd, info.st_size)
            found = _pump(read.fileno(), fd, info.st_size, progress, sparse=sparse)
            os.fsync(fd)
        finally:
            os.close(fd)
    return found


def _claim(fd: int, size: int) -> None:
    """Have the file system set the room aside, where it can: a full disk shows at once."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise


def _pump(
    source: int, target: int, total: int, progress: Progress, *, sparse: bool
) -> tuple[str, int]:
    hashing = HashThread()
    done = 0
    zeros = bytes(BUFFER_BYTES)
    try:
        while True:
            buffer = hashing.take()
            count = os.readv(source, [buffer])
            if count == 0:
                break
            hashing.give(buffer, count)
            view = memoryview(buffer)[:count]
            if sparse and view == memoryview(zeros)[:count]:
                os.lseek(target, count, os.SEEK_CUR)
            else:
                _write_all(target, view)
            done += count
            progress(done, max(total, done))
        os.ftruncate(target, done)
    finally:
        sha256 = hashing.close()
    return sha256, done


def _write_all(fd: int, view: memoryview | bytes) -> None:
    view = memoryview(view)
    while view:
        view = view[os.write(fd, view) :]


def hash_file(path: Path, *, progress: Progress = silent) -> tuple[str, int]:
    """The sha256 and size of a file: reading and hashing overlap, memory is bounded."""
    hashing = HashThread()
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            total = os.fstat(file.fileno()).st_size
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while True:
                buffer = hashing.take()
                count = os.readv(file.fileno(), [buffer])
                if count == 0:
                    break
                hashing.give(buffer, count)
                done += count
                progress(done, max(total, done))
    finally:
        sha256 = hashing.close()
    return sha256, done
