"""What open pages are told while they are open, as server-sent events.

One subscription to the broker a process is fanned out to every page that listens.

An event says only *that* something changed; the page fetches the fragment that shows it. Bursts are
joined, so that a page is told at once and then at most every `window_s`. When the broker is away,
every page is told to look again every two seconds instead, and nothing is lost but speed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import redis.asyncio
from django.conf import settings
from redis.exceptions import RedisError

from deployments.broker.feed import EVENTS_CHANNEL, SESSION

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0
RETRY_S = 2.0
LEAST_WINDOW_S = 0.25
MOST_WINDOW_S = 0.5
WINDOW_A_LISTENER_S = 0.004
"""Many open pages are told a little later each, so that their questions do not pile up."""
NOISY = frozenset({"log", "step", "usage", SESSION})
"""Kinds that are told only to pages that follow the very thing."""


_epoch = [0]


def epoch() -> int:
    """Grows with every event: what was made before the last one may be out of date."""
    return _epoch[0]


class Listener:
    """One open page: the topics that it follows and what it has not been told yet."""

    def __init__(self, topics: Iterable[str]) -> None:
        self.topics = frozenset(topics)
        self._pending: set[str] = set()
        self._wake = asyncio.Event()

    def offer(self, kind: str, topics: frozenset[str]) -> None:
        """Note an event when the page follows one of its topics."""
        follows_all = "*" in self.topics and kind not in NOISY
        if kind == "tick" or follows_all or self.topics & topics:
            self._pending.add(kind)
            self._wake.set()

    async def next(self, timeout_s: float) -> frozenset[str]:
        """The kinds that changed since the last call; empty after `timeout_s` of silence."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        self._wake.clear()
        kinds, self._pending = frozenset(self._pending), set()
        return kinds


def topics_of(event: Mapping[str, Any]) -> frozenset[str]:
    """The topics under which an event is told: its kind, and each thing that it names."""
    topics = {str(event.get("kind", ""))}
    for thing in ("deployment", "build", "activation"):
        if event.get(thing):
            topics.add(f"{thing}:{event[thing]}")
    if event.get("kind") == SESSION:
        topics.add(sessions_of(event.get("id")))
    return frozenset(topics)


def sessions_of(user_id: object) -> str:
    """The topic of what happens to a person's sessions."""
    return f"{SESSION}:{user_id}"


class Hub:
    """The listeners of one event loop and the task that reads the broker for them."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()
        self._reader: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def window_s(self) -> float:
        """How long a page waits between two tellings."""
        return min(MOST_WINDOW_S, LEAST_WINDOW_S + WINDOW_A_LISTENER_S * len(self._listeners))

    @asynccontextmanager
    async def listening(self, topics: Iterable[str]) -> AsyncIterator[Listener]:
        """Listen until the block ends; the reader runs while anybody listens."""
        listener = Listener(topics)
        self._listeners.add(listener)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(), name="live-events")
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._reader is not None:
                self._ending.add(self._reader)  # it closes its connection before it is gone
                self._reader.add_done_callback(self._ending.discard)
                self._reader.cancel()
                self._reader = None

    def tell(self, event: Mapping[str, Any]) -> None:
        """Hand an event to every page that follows it."""
        _epoch[0] += 1
        topics = topics_of(event)
        kind = str(event.get("kind", ""))
        for listener in self._listeners:
            listener.offer(kind, topics)

    async def _read(self) -> None:
        while True:
            broker = redis.asyncio.Redis.from_url(settings.REDIS_URL, socket_connect_timeout=2)
            try:
                async with broker.pubsub() as channel:
                    await channel.subscribe(EVENTS_CHANNEL)
                    async for message in channel.listen():
                        if message["type"] == "subscribe":  # what was said before, nobody heard
                            self.tell({"kind": "tick"})
                        elif message["type"] == "message":
                            self._take(message["data"])
            except (RedisError, OSError) as error:
                log.info("live pages look for themselves: the broker is away (%s)", error)
                self.tell({"kind": "tick"})
                await asyncio.sleep(LOOK_AGAIN_S)
            finally:
                await broker.aclose()

    def _take(self, data: bytes) -> None:
        try:
            event = json.loads(data)
        except ValueError:
            log.warning("an event on %s is not JSON", EVENTS_CHANNEL)
            return
        if isinstance(event, dict):
            self.tell(event)


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def hub() -> Hub:
    """The running loop's hub."""
    return _hubs.setdefault(asyncio.get_running_loop(), Hub())


def message(event: str, data: Any) -> bytes:
    """One server-sent event."""
    return f"event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
