"""The bytes of a download so far, and one transfer of them at a time."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mmadmin.core.store.disk import disk_full
from mmadmin.host.download.answers import wait_for


@contextmanager
def one_transfer(
    path: Path, label: str, cancelled: Callable[[], bool], log: Callable[[str], None]
) -> Iterator[None]:
    """One transfer of one digest at a time on this host; the others wait for its bytes."""
    told = False
    while True:
        with path.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and path.stat().st_ino == os.fstat(handle.fileno()).st_ino:
                    try:
                        yield
                    finally:
                        path.unlink(missing_ok=True)
                    return
            except BlockingIOError:
                if not told:
                    log(f"waiting for another download of {label}")
                    told = True
        wait_for(0.1, cancelled, label)


class Part:
    """The bytes so far and which segments of them are finished."""

    def __init__(self, folder: Path, sha256: str, size: int, segment_bytes: int) -> None:
        self.path = folder / f"{sha256}.part"
        self.state = folder / f"{sha256}.state"
        self.size = size
        self.segment = segment_bytes
        self.etag = ""
        self.done: set[int] = set()
        self._changed = threading.Condition()
        self._load()
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if size:
                os.posix_fallocate(self.fd, 0, size)
            os.ftruncate(self.fd, size)
        except OSError as error:
            os.close(self.fd)
            raise disk_full(error, doing=f"reserving {size} bytes") or error from error

    @property
    def count(self) -> int:
        """How many segments the file has."""
        return -(-self.size // self.segment)

    def span(self, index: int) -> tuple[int, int]:
        """Start and end (exclusive) of a segment, bytes."""
        start = index * self.segment
        return start, min(self.size, start + self.segment)

    def missing(self) -> list[int]:
        """The segments that are not finished."""
        return [index for index in range(self.count) if index not in self.done]

    def prefix(self) -> int:
        """Bytes from the start that are finished without a gap."""
        index = 0
        while index in self.done:
            index += 1
        return min(self.size, index * self.segment)

    def finish(self, index: int) -> None:
        """A segment is on the disk: say so durably."""
        os.fdatasync(self.fd)
        with self._changed:
            self.done.add(index)
            self._save()
            self._changed.notify_all()

    def forget(self, etag: str) -> None:
        """Start over: the source has changed, or cannot resume."""
        with self._changed:
            self.done.clear()
            self.etag = etag
            self._save()

    def note_etag(self, etag: str) -> None:
        """Remember which state of the source the segments are of."""
        with self._changed:
            if etag != self.etag:
                self.etag = etag
                self._save()

    def wait_beyond(self, offset: int, timeout: float) -> int:
        """Wait until more than `offset` bytes are finished from the start; how many they are."""
        with self._changed:
            self._changed.wait_for(lambda: self.prefix() > offset, timeout)
            return self.prefix()

    def _load(self) -> None:
        try:
            state = json.loads(self.state.read_text())
            same = state["size"] == self.size and self.path.stat().st_size == self.size
            if same:
                self.segment = int(state["segment"])
                self.etag = str(state["etag"])
                self.done = {int(index) for index in state["done"] if 0 <= index < self.count}
        except (OSError, ValueError, KeyError, TypeError):
            self.done = set()  # no state, or a torn one: fetch all again

    def _save(self) -> None:
        state = {
            "size": self.size,
            "segment": self.segment,
            "etag": self.etag,
            "done": sorted(self.done),
        }
        fresh = self.state.with_suffix(".state.new")
        with fresh.open("w") as handle:
            json.dump(state, handle)
            handle.flush()
            os.fsync(handle.fileno())
        fresh.replace(self.state)

    def drop(self) -> None:
        """Forget the bytes; the open file stays readable until it is closed."""
        self.path.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)
