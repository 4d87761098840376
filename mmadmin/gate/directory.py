"""The gate's only window on the rest: the snapshot it serves from, and where usage goes.

`RedisDirectory` learns of a new snapshot by a nudge (pub/sub) and, in case a nudge was lost, by a
timer; it also takes the file that the panel writes beside it. The newest version wins, an older
one never comes back, and the last good one is kept on disk: with broker, panel and database gone,
a restarted gate serves from it. The id of a revoked key is published
as well, so that the key is dead before a snapshot of ten thousand keys has been written and read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from mmadmin.core.errors import InvalidInput
from mmadmin.core.snapshot import (
    NUDGE_CHANNEL,
    REVOKE_CHANNEL,
    SNAPSHOT_KEY,
    Snapshot,
    Usage,
    snapshot_from_json,
)
from mmadmin.gate.spool import Courier, Spool

TIMER_S = 1.0
CONNECT_S, ANSWER_S = 1.0, 2.0
"""A broker that is silent for longer is away."""
EMPTY = Snapshot(version=0, routes={}, keys={})
PUBLISHED = "snapshot.json"
"""Written by the panel's side, where it shares the host."""
KEPT = "snapshot.kept.json"
"""Written by the gate: what it served from last."""
log = logging.getLogger("mmadmin.gate.directory")

Listener = Callable[[Snapshot], None]


class Directory(Protocol):
    """What the gate needs from the outside. No call waits for the network."""

    async def snapshot(self) -> Snapshot:
        """The newest snapshot known here."""
        ...

    def watch(self, listener: Listener) -> None:
        """Call `listener` with every newer snapshot, in the event loop."""
        ...

    def record(self, usages: Sequence[Usage]) -> None:
        """Put finished requests where they survive this process, before this returns."""
        ...


def connect(url: str) -> Redis:
    """A client that fails fast: the gate never waits long for the broker."""
    return Redis.from_url(
        url,
        socket_timeout=ANSWER_S,
        socket_connect_timeout=CONNECT_S,
        retry=Retry(NoBackoff(), 0),
    )


class RedisDirectory:
    """Directory over the broker, with files for when it is away."""

    def __init__(self, redis: Redis, folder: Path, spool: Spool) -> None:
        self._redis = redis
        self._folder = folder
        self._spool = spool
        self.courier = Courier(redis, folder / "spool", spool)
        self._snapshot = EMPTY
        self._revoked: set[str] = set()
        """Published by id, and not yet confirmed by a snapshot."""
        self._raw: bytes = b""
        self._file_mark = (0, 0)
        self._listeners: list[Listener] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._one_at_a_time = asyncio.Lock()
        self._to_keep = asyncio.Event()
        self.connected = False

    async def snapshot(self) -> Snapshot:
        """The newest snapshot known here."""
        return self._snapshot

    def watch(self, listener: Listener) -> None:
        """Call `listener` with every newer snapshot."""
        self._listeners.append(listener)

    def record(self, usages: Sequence[Usage]) -> None:
        """Into the spool; the courier does the rest."""
        for usage in usages:
            self._spool.record(usage)

    async def start(self) -> None:
        """Load what the disk has, ask the broker once, then follow both."""
        self._read_file(self._folder / KEPT)
        self._read_published()
        with contextlib.suppress(RedisError, OSError):
            await self.refresh()
        self._tasks = [
            asyncio.create_task(self._follow()),
            asyncio.create_task(self._tick()),
            asyncio.create_task(self._keep_for_ever()),
            asyncio.create_task(self.courier.run()),
        ]

    async def stop(self) -> None:
        """End the followers, hand over what the broker takes, let the spool go."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.courier.flush(within_s=2.0)
        self.courier.close()
        self._spool.close()

    async def refresh(self) -> None:
        """Ask the broker for the snapshot; the same bytes as last time cost no parsing."""
        async with self._one_at_a_time:
            raw = await self._redis.get(SNAPSHOT_KEY)
            if isinstance(raw, bytes) and raw != self._raw:
                self._raw = raw
                if self._take(raw, "the broker"):
                    self._to_keep.set()

    async def _follow(self) -> None:
        """Listen for nudges; connect again when the broker went away."""
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(NUDGE_CHANNEL, REVOKE_CHANNEL)
                    await self.refresh()
                    self.connected = True
                    async for message in channel.listen():
                        if message["type"] != "message":
                            continue
                        if message["channel"] == REVOKE_CHANNEL.encode():
                            self._revoke(message["data"].decode())
                        else:
                            await self.refresh()
            except (RedisError, OSError) as error:
                if self.connected:
                    log.warning("the broker is away (%s): serving from memory", error)
                self.connected = False
            await asyncio.sleep(0.25)

    async def _keep_for_ever(self) -> None:
        """Keep a copy of what is served from; apart, so that a slow disk delays no revocation."""
        while True:
            await self._to_keep.wait()
            self._to_keep.clear()
            await asyncio.to_thread(_keep, self._folder / KEPT, self._raw)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TIMER_S)
            self._read_published()
            with contextlib.suppress(RedisError, OSError):
                await self.refresh()
            await asyncio.to_thread(self._spool.sync)

    def _read_published(self) -> None:
        path = self._folder / PUBLISHED
        try:
            stat = path.stat()
        except OSError:
            return
        mark = (stat.st_mtime_ns, stat.st_ino)
        if mark != self._file_mark:
            self._file_mark = mark
            self._read_file(path)

    def _read_file(self, path: Path) -> None:
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
            return
        self._take(raw, str(path))

    def _take(self, raw: bytes, source: str) -> bool:
        """Serve from it when it is newer; a damaged one is reported and left alone."""
        try:
            snapshot = snapshot_from_json(raw)
        except InvalidInput as error:
            log.error("the snapshot from %s is not used: %s", source, error)  # noqa: TRY400
            return False
        if snapshot.version <= self._snapshot.version:
            return False
        self._revoked = {key_id for key_id in self._revoked if _is_active(snapshot, key_id)}
        self._use(_without(snapshot, self._revoked))
        return True

    def _revoke(self, key_id: str) -> None:
        """A key is dead from here on, whatever an older snapshot that comes in between says."""
        if _is_active(self._snapshot, key_id):
            self._revoked.add(key_id)
            self._use(_without(self._snapshot, {key_id}))

    def _use(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        for listener in self._listeners:
            listener(snapshot)


def _is_active(snapshot: Snapshot, key_id: str) -> bool:
    key = snapshot.keys.get(key_id)
    return key is not None and key.state != "revoked"


def _without(snapshot: Snapshot, key_ids: set[str]) -> Snapshot:
    """The snapshot with these keys revoked."""
    if not key_ids:
        return snapshot
    dead = {key_id: replace(snapshot.keys[key_id], state="revoked") for key_id in key_ids}
    return replace(snapshot, keys={**snapshot.keys, **dead})


def _keep(path: Path, raw: bytes) -> None:
    """Write the copy whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".snapshot-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        log.exception("the snapshot copy cannot be kept")
