"""The usage spool: a finished request is on disk before its last byte leaves the gate.

Each gate worker writes its own folder, one JSON line a request, in segments named by their first
sequence number. A line is handed to the kernel with one `write` before the answer ends, so that
killing the gate loses nothing; the disk is synchronised once a second (or at every line, when
asked), so that a power cut loses a second at most.

The courier carries lines to the Redis stream and forgets a segment only when the collector has
acknowledged all of it. It starts again from the last acknowledged line when the stream has lost
what it was given; a usage record is known by its request id, so repeats change nothing. Folders of
workers that died are adopted by the living.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from mmadmin.core.snapshot import USAGE_ACK_KEY, USAGE_STREAM, Usage

SEGMENT_LIMIT_BYTES = 4 * 1024 * 1024
SEGMENT_LIMIT_S = 60.0
BATCH_LINES = 300
STEP_S = 0.25
ADOPT_EVERY_S = 5.0
_UNPLACED = b'"gate":"","seq":0}'
"""How a usage event ends before it has a place in a spool."""
LOST_AFTER_S = 5.0
"""Lines sent and not acknowledged for this long are looked for in the stream."""
_ADD = """
local id = ''
for i = 1, #ARGV do id = redis.call('XADD', KEYS[1], '*', 'event', ARGV[i]) end
return id
"""
log = logging.getLogger("mmadmin.gate.spool")


def _lock(folder: Path) -> int | None:
    """The folder's lock, held until the descriptor closes; None when another process has it."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def segments(folder: Path) -> list[Path]:
    """The segments of a spool folder, oldest first."""
    return sorted(folder.glob("*.jsonl"))


class Spool:
    """The writing side: one worker's folder."""

    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self.id = secrets.token_hex(8)
        self._id = self.id.encode()
        self.folder = root / self.id
        self.folder.mkdir(parents=True, mode=0o700)
        self._guard = _lock(self.folder)
        self._fsync = fsync
        self._file = -1
        self._size = 0
        self._opened = 0.0
        self._unwritten: deque[bytes] = deque()
        self.seq = 0
        self.errors = 0
        self._dirty = False
        self._open()

    def record(self, usage: Usage) -> None:
        """Write one line; it survives the death of this process once this returns.

        When the disk refuses, the line waits in memory and goes out with the next one.
        """
        self.seq += 1
        line = orjson.dumps(usage)
        if not line.endswith(_UNPLACED):
            raise ValueError(f"usage {usage.id} has a place in a spool already")
        line = b'%b"gate":"%b","seq":%d}\n' % (line[: -len(_UNPLACED)], self._id, self.seq)
        if self._unwritten:
            self._unwritten.append(line)
            line = b"".join(self._unwritten)
        try:
            written = os.write(self._file, line)
            if written != len(line):
                os.ftruncate(self._file, self._size)
                raise OSError("the disk took a part of a line")  # noqa: TRY301 (one exit)
        except OSError:
            self.errors += 1
            log.exception("the usage spool cannot be written")
            if not self._unwritten:
                self._unwritten.append(line)
            return
        self._unwritten.clear()
        self._size += written
        self._dirty = True
        if self._fsync:
            self.sync()

    def sync(self) -> None:
        """Put on the disk what was written (blocks for the disk)."""
        if self._dirty:
            self._dirty = False
            os.fdatasync(self._file)

    def rotate(self) -> None:
        """Start a new segment when this one is large or old, so that it can be forgotten."""
        if self._size > SEGMENT_LIMIT_BYTES or (
            self._size and time.monotonic() - self._opened > SEGMENT_LIMIT_S
        ):
            self.sync()
            os.close(self._file)
            self._open()

    def close(self) -> None:
        """Let go of the folder; whoever comes next delivers what is left."""
        self.sync()
        os.close(self._file)
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None

    def _open(self) -> None:
        path = self.folder / f"{self.seq + 1:016d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._opened = time.monotonic()


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines to send, and where reading goes on after them."""

    lines: tuple[tuple[int, bytes], ...]
    """Sequence number and JSON, oldest first."""
    segment: str
    offset: int


class Parcel:
    """The delivering side of one folder: what was sent, what was acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segment = ""
        self._offset = 0
        self.sent = 0
        self.acked = 0
        self.batches: deque[tuple[int, Any]] = deque()
        """Sent and not acknowledged: last sequence number and its id in the stream."""
        self.moved_at = time.monotonic()

    def rewind(self) -> None:
        """Send again everything that was not acknowledged."""
        self._segment, self._offset, self.sent = "", 0, self.acked
        self.batches.clear()

    def next_batch(self) -> Batch:
        """What is to be sent next; looking changes nothing."""
        segment, offset = self._segment, self._offset
        found: list[tuple[int, bytes]] = []
        for path in segments(self.folder):
            if path.name < segment:
                continue
            if path.name != segment:
                segment, offset = path.name, 0
            with path.open("rb") as file:
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    offset += len(line)
                    self._collect(found, line)
                    if len(found) == BATCH_LINES:
                        return Batch(tuple(found), segment, offset)
        return Batch(tuple(found), segment, offset)

    def was_sent(self, batch: Batch, last_id: Any) -> None:
        """The stream has it."""
        self._segment, self._offset = batch.segment, batch.offset
        if batch.lines:
            self.sent = batch.lines[-1][0]
            self.batches.append((self.sent, last_id))
            self.moved_at = time.monotonic()

    def _collect(self, found: list[tuple[int, bytes]], line: bytes) -> None:
        seq = _seq(line)
        if seq is None:
            seq, line = self._mended(found)
        if seq > self.sent:
            found.append((seq, line[:-1]))

    def _mended(self, found: list[tuple[int, bytes]]) -> tuple[int, bytes]:
        """A line in place of a damaged one: the usage records show that something was here."""
        seq = (found[-1][0] if found else self.sent) + 1
        log.error("line %d of the usage spool %s is damaged", seq, self.folder.name)
        usage = Usage(
            id=f"damaged-{self.folder.name}-{seq}",
            at=time.time(),
            key_id="",
            deployment="",
            generation=0,
            endpoint="",
            status=0,
            outcome="failed",
            exact=False,
            gate=self.folder.name,
            seq=seq,
        )
        return seq, orjson.dumps(usage) + b"\n"

    def forget(self) -> None:
        """Delete the segments that are acknowledged whole; the newest one stays."""
        for path, following in itertools.pairwise(segments(self.folder)):
            if int(following.stem) - 1 <= self.acked:
                path.unlink()


def _seq(line: bytes) -> int | None:
    """The number of a line: `seq` is its last field."""
    try:
        return int(line.rpartition(b'"seq":')[2].rstrip(b"}\n"))
    except ValueError:
        return None


class Courier:
    """Carries the lines of this worker, and of workers that died, to the stream."""

    def __init__(self, redis: Redis, root: Path, spool: Spool) -> None:
        self._redis = redis
        self._root = root
        self._spool = spool
        self._own = Parcel(spool.folder)
        self._adopted: dict[Path, tuple[Parcel, int]] = {}
        self._looked_at = 0.0

    @property
    def undelivered(self) -> int:
        """Lines of this worker that are not acknowledged yet."""
        return self._spool.seq - self._own.acked

    async def run(self) -> None:
        """Deliver until cancelled; while the broker is away, records wait on disk."""
        pause = STEP_S
        while True:
            try:
                more = await self.step()
                pause = 0.0 if more else STEP_S
            except (RedisError, OSError) as error:
                log.debug("the broker does not take usage: %s", error)
                pause = min(max(pause, STEP_S) * 2, 2.0)
            await asyncio.sleep(pause)

    async def step(self) -> bool:
        """One round: send, learn what was acknowledged, forget. True = there is more."""
        self._spool.rotate()
        self._adopt()
        more = await self._deliver(self._own)
        for parcel, _ in tuple(self._adopted.values()):
            more = await self._deliver(parcel) or more
        self._finish_adopted()
        return more

    async def flush(self, *, within_s: float) -> None:
        """At the end: give the stream what it will take."""
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(within_s):
                while await self._deliver(self._own):
                    pass

    def close(self) -> None:
        """Let go of adopted folders."""
        for _, guard in self._adopted.values():
            os.close(guard)
        self._adopted.clear()

    async def _deliver(self, parcel: Parcel) -> bool:
        batch = parcel.next_batch()
        last_id = None
        if batch.lines:
            events = [line for _, line in batch.lines]
            try:
                last_id = await self._redis.eval(_ADD, 1, USAGE_STREAM, *events)
            except (RedisError, OSError):
                parcel.rewind()
                raise
        parcel.was_sent(batch, last_id)
        if parcel.sent > parcel.acked:
            await self._learn_acks(parcel)
        return len(batch.lines) >= BATCH_LINES // 2

    async def _learn_acks(self, parcel: Parcel) -> None:
        """Forget what was collected; send again what the stream no longer has."""
        acked = int(await self._redis.hget(USAGE_ACK_KEY, parcel.folder.name) or 0)
        now = time.monotonic()
        if acked > parcel.acked:
            parcel.acked = acked
            parcel.moved_at = now
            while parcel.batches and parcel.batches[0][0] <= acked:
                parcel.batches.popleft()
            parcel.forget()
        elif now - parcel.moved_at > LOST_AFTER_S and parcel.batches:
            parcel.moved_at = now
            oldest = parcel.batches[0][1]
            if not await self._redis.xrange(USAGE_STREAM, oldest, oldest):
                parcel.rewind()

    def _adopt(self) -> None:
        if time.monotonic() - self._looked_at < ADOPT_EVERY_S:
            return
        self._looked_at = time.monotonic()
        for folder in _folders(self._root):
            if folder == self._spool.folder or folder in self._adopted:
                continue
            guard = _lock(folder)
            if guard is not None:
                self._adopted[folder] = (Parcel(folder), guard)

    def _finish_adopted(self) -> None:
        for folder, (parcel, guard) in tuple(self._adopted.items()):
            if not parcel.next_batch().lines and parcel.acked >= parcel.sent:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(guard)
                del self._adopted[folder]


def _folders(root: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from (path for path in root.iterdir() if path.is_dir())
