"""One request, from its first byte to its usage record."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mmadmin.core.snapshot import KeyRecord, Route
from mmadmin.gate.endpoints import Endpoint
from mmadmin.gate.limits import Reservation
from mmadmin.gate.queue import Place, Queue
from mmadmin.gate.sse import SseTap
from mmadmin.gate.tokens import Tokens
from mmadmin.gate.upstream import Connection, Upstream

BodyParts = tuple[bytes, bytes | bytearray | memoryview]
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


@dataclass(slots=True)
class RequestBody:
    """What the client sent."""

    parts: BodyParts = (b"", b"")
    """What goes to the engine; dropped once its response begins."""
    size_bytes: int = 0
    held_bytes: int = 0
    """Of that, what is in memory."""


@dataclass(slots=True)
class QueueEntry:
    """Its way through the queue of its deployment."""

    queue: Queue | None = None
    """Set while the request counts there, waiting or admitted."""
    place: Place | None = None
    """Set when it had to wait."""
    slots: int = 1
    """How many of the engine's slots it takes."""
    waited_s: float = 0.0
    waiter: asyncio.Future[None] | None = None

    @property
    def waiting(self) -> bool:
        """Whether it waits to be admitted."""
        return self.place is not None and not self.place.admitted

    def wake(self) -> None:
        """Resume the task that waits in the queue: it was admitted, or a comment is due."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


@dataclass(slots=True)
class EngineLink:
    """The replica that answers it; empty before one is chosen."""

    upstream: Upstream | None = None
    connection: Connection | None = None

    def disconnect(self) -> None:
        """Close the engine's connection now, if there is one."""
        if self.connection is not None:
            self.connection.abort()
            self.connection = None


@dataclass(slots=True)
class Response:
    """What the client has been sent."""

    last_sent: float
    """When the last bytes went; at first, when the request came."""
    streamed: bool = False
    """Whether it is a stream of events: as was asked for, then as the engine answers."""
    head_sent: bool = False
    first_at: float = 0.0
    """When the engine's first event or byte came; 0 = not yet."""
    tap: SseTap | None = None
    tokens: Tokens | None = None
    limit_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Headers that tell the client what is left of its limits."""


class Request:
    """A request that the gate works on; owned by the task that serves it.

    Who asks for what is filled in while it is admitted (a refused one may have no route). Each
    later stage keeps its state in an object of its own, which starts empty. Code that needs key,
    endpoint and route works on an `Exchange`.
    """

    __slots__ = (
        "answers",
        "body",
        "client",
        "client_request_id",
        "deadline",
        "endpoint",
        "engine",
        "entry",
        "generation",
        "generation_uid",
        "key",
        "model",
        "path",
        "receive",
        "request_id",
        "reservation",
        "response",
        "route",
        "settled",
        "started",
        "stopped",
        "task",
        "watcher",
    )

    def __init__(self, request_id: str, path: str, client: Any) -> None:
        self.request_id = request_id
        self.path = path
        self.client = client
        self.client_request_id = ""
        self.started = time.monotonic()
        # who asks for what
        self.endpoint: Endpoint | None = None
        self.key: KeyRecord | None = None
        self.model = ""
        self.route: Route | None = None
        self.generation = 0
        self.generation_uid = ""
        self.answers = 1
        """How many answers it asks for."""
        self.reservation: Reservation | None = None
        # the stages
        self.body = RequestBody()
        self.entry = QueueEntry()
        self.engine = EngineLink()
        self.response = Response(last_sent=self.started)
        # how it ends
        self.task: asyncio.Task[Any] | None = None
        self.deadline = 0.0
        self.receive: Any = None
        """The client's side, set once the body has been read: then it only reports a disconnect."""
        self.watcher: asyncio.Task[None] | None = None
        self.stopped: Stop | None = None
        self.settled = False

    @property
    def state(self) -> str:
        """Shown in `mm top`: queued, prefill or answering."""
        if self.entry.waiting:
            return "queued"
        return "answering" if self.response.first_at else "prefill"

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the engine's first event or byte; None = it has not come."""
        first_at = self.response.first_at
        return first_at - self.started if first_at else None

    def lead_to(self, route: Route) -> None:
        """Take a route, and the generation that it leads to now."""
        self.route = route
        self.generation = route.generation or 0
        self.generation_uid = route.generation_uid or ""

    def wake_for_comment(self) -> None:
        """Resume the task, wherever it waits, although nothing arrived."""
        if self.engine.connection is not None:
            self.engine.connection.wake_reader()
        else:
            self.entry.wake()

    def stop(self, why: Stop) -> None:
        """End it from outside, wherever it waits."""
        if not self.settled and self.stopped is None and self.task is not None:
            self.stopped = why
            self.task.cancel()

    def wait_for_body(self) -> None:
        """The client has a while to send more."""
        self.deadline = time.monotonic() + BODY_SILENCE_S
