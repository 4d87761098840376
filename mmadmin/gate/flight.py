"""A flight: one request from its first byte to its line in the books."""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import Any

from mmadmin.core.snapshot import KeyRecord, Route
from mmadmin.gate.limits import Reservation
from mmadmin.gate.meter import Tokens
from mmadmin.gate.sse import SseTap
from mmadmin.gate.surface import Endpoint
from mmadmin.gate.turnstile import Ticket, Turnstile
from mmadmin.gate.upstream import Connection, Upstream


class Stop(Enum):
    """Why a running request was ended from outside."""

    GONE = "the client left"
    REVOKED = "the key was revoked"
    DEADLINE = "it took too long"
    CLOSED = "the deployment was closed"
    STOPPING = "the gate stops"


class Flight:
    """What is known of one running request. Owned by the task that serves it."""

    __slots__ = (
        "body_bytes",
        "client",
        "client_request_id",
        "connection",
        "deadline",
        "endpoint",
        "first_at",
        "generation",
        "generation_uid",
        "head_sent",
        "key",
        "last_sent",
        "model",
        "path",
        "queued_s",
        "receive",
        "request_id",
        "reservation",
        "route",
        "settled",
        "standing",
        "started",
        "stopped",
        "streamed",
        "tap",
        "task",
        "ticket",
        "tokens",
        "turnstile",
        "upstream",
        "waiter",
        "watcher",
    )

    def __init__(self, request_id: str, path: str, client: Any) -> None:
        self.request_id = request_id
        self.path = path
        self.client = client
        self.client_request_id = ""
        self.started = time.monotonic()
        self.endpoint: Endpoint | None = None
        self.key: KeyRecord | None = None
        self.model = ""
        self.route: Route | None = None
        self.generation = 0
        self.generation_uid = ""
        self.streamed = False
        self.body_bytes = 0
        self.queued_s = 0.0
        self.first_at = 0.0
        self.last_sent = self.started
        self.deadline = 0.0
        self.head_sent = False
        self.receive: Any = None
        """The client's side, once the body has been read: it then only tells of leaving."""
        self.watcher: asyncio.Task[None] | None = None
        self.settled = False
        self.stopped: Stop | None = None
        self.tap: SseTap | None = None
        self.tokens: Tokens | None = None
        self.task: asyncio.Task[Any] | None = None
        self.turnstile: Turnstile | None = None
        self.ticket: Ticket | None = None
        self.upstream: Upstream | None = None
        self.connection: Connection | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.reservation: Reservation | None = None
        self.standing: list[tuple[bytes, bytes]] = []
        """Headers that tell the client what is left of its limits."""

    @property
    def waiting(self) -> bool:
        """Whether it stands in the line."""
        return self.ticket is not None and not self.ticket.admitted

    @property
    def state(self) -> str:
        """For people who watch: queued, prefill or answering."""
        if self.waiting:
            return "queued"
        return "answering" if self.first_at else "prefill"

    def wake(self) -> None:
        """Its turn came, or a comment is due."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def poke(self) -> None:
        """Let the task look around although nothing came."""
        if self.connection is not None:
            self.connection.poke()
        else:
            self.wake()

    def stop(self, why: Stop) -> None:
        """End it from outside, wherever it waits."""
        if not self.settled and self.stopped is None and self.task is not None:
            self.stopped = why
            self.task.cancel()

    def forget_connection(self) -> None:
        """Close the engine's connection now, if there is one."""
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
