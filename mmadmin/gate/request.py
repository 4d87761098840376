"""One request, from its first byte to its usage record."""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import Any

from mmadmin.core.snapshot import KeyRecord, Route
from mmadmin.gate.endpoints import Endpoint
from mmadmin.gate.limits import Reservation
from mmadmin.gate.queue import Place, Queue
from mmadmin.gate.sse import SseTap
from mmadmin.gate.tokens import Tokens
from mmadmin.gate.upstream import Connection, Upstream

Body = tuple[bytes, bytes | bytearray | memoryview]
"""What goes to the engine: a beginning, and the rest, which is not copied."""


BODY_SILENCE_S = 60.0
"""A body of which nothing arrives for this long is given up."""


class Stop(Enum):
    """Why a running request was ended from outside."""

    GONE = "the client left"
    REVOKED = "the key was revoked"
    DEADLINE = "it took too long"
    CLOSED = "the deployment was closed"
    STOPPING = "the gate is stopping"


class Request:
    """What is known of a request so far; owned by the task that serves it.

    Fields stay empty until their stage: a request that is refused early has no route, and one that
    waits in the queue has no upstream. Code that needs them all works on an `Exchange`.
    """

    __slots__ = (
        "answers",
        "body",
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
        "held_bytes",
        "key",
        "last_sent",
        "limit_headers",
        "model",
        "path",
        "place",
        "queue",
        "queued_s",
        "receive",
        "request_id",
        "reservation",
        "route",
        "settled",
        "slots",
        "started",
        "stopped",
        "streamed",
        "tap",
        "task",
        "tokens",
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
        self.body: Body = (b"", b"")
        """What goes to the engine; dropped once its response begins."""
        self.body_bytes = 0
        self.held_bytes = 0
        """Bytes of the body that are in memory."""
        self.answers = 1
        """How many answers it asks for."""
        self.slots = 1
        """How many of the engine's slots it takes."""
        self.queued_s = 0.0
        self.first_at = 0.0
        self.last_sent = self.started
        self.deadline = 0.0
        self.head_sent = False
        self.receive: Any = None
        """The client's side, set once the body has been read: then it only reports a disconnect."""
        self.watcher: asyncio.Task[None] | None = None
        self.settled = False
        self.stopped: Stop | None = None
        self.tap: SseTap | None = None
        self.tokens: Tokens | None = None
        self.task: asyncio.Task[Any] | None = None
        self.queue: Queue | None = None
        self.place: Place | None = None
        self.upstream: Upstream | None = None
        self.connection: Connection | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.reservation: Reservation | None = None
        self.limit_headers: list[tuple[bytes, bytes]] = []
        """Headers that tell the client what is left of its limits."""

    @property
    def waiting(self) -> bool:
        """Whether it waits in the queue."""
        return self.place is not None and not self.place.admitted

    @property
    def state(self) -> str:
        """Shown in `mm top`: queued, prefill or answering."""
        if self.waiting:
            return "queued"
        return "answering" if self.first_at else "prefill"

    def lead_to(self, route: Route) -> None:
        """Take a route, and the generation that it leads to now."""
        self.route = route
        self.generation = route.generation or 0
        self.generation_uid = route.generation_uid or ""

    def wake(self) -> None:
        """Resume the task that waits in the queue: it was admitted, or a comment is due."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def wake_for_comment(self) -> None:
        """Resume the task, wherever it waits, although nothing arrived."""
        if self.connection is not None:
            self.connection.wake_reader()
        else:
            self.wake()

    def stop(self, why: Stop) -> None:
        """End it from outside, wherever it waits."""
        if not self.settled and self.stopped is None and self.task is not None:
            self.stopped = why
            self.task.cancel()

    def wait_for_body(self) -> None:
        """The client has a while to send more."""
        self.deadline = time.monotonic() + BODY_SILENCE_S

    def forget_connection(self) -> None:
        """Close the engine's connection now, if there is one."""
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
