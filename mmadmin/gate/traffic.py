"""What a gate worker keeps in memory: the snapshot it serves from, and the requests in progress.

The application and the relay share it; it knows neither of them. Everything here is immediate: no
method waits for a broker, a disk or a database.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time

from mmadmin.core.access import engine_secret
from mmadmin.core.snapshot import KeyRecord, Route, Snapshot, Usage
from mmadmin.gate.directory import EMPTY, Directory
from mmadmin.gate.keys import KeyRing
from mmadmin.gate.limits import Limiter
from mmadmin.gate.metrics import Metrics
from mmadmin.gate.queue import Queue
from mmadmin.gate.rates import Rates
from mmadmin.gate.request import Request, Stop
from mmadmin.gate.settings import GateSettings
from mmadmin.gate.upstream import Upstream
from mmadmin.gate.usage import AccessLog, Outcome, count, tokens_of, usage_of


class Traffic:
    """Routes, queues, upstreams and running requests of one worker."""

    def __init__(
        self, settings: GateSettings, directory: Directory, limiter: Limiter, worker: str
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.limiter = limiter
        self.snapshot: Snapshot = EMPTY
        self.keys = KeyRing(EMPTY, settings.pepper)
        self.metrics = Metrics(worker)
        self.rates = Rates()
        self.access_log = AccessLog(enabled=settings.access_log)
        self.requests: dict[str, Request] = {}
        self.inflight: dict[str, int] = {}
        """Requests at an engine, by generation uid."""
        self.queues: dict[str, Queue] = {}
        """By deployment, or by generation on trial."""
        self.upstreams: dict[str, Upstream] = {}
        """By replica uid."""
        self.changed = asyncio.Event()
        """Set when the heartbeat should be sent at once."""
        self.body_bytes = 0
        """Bytes of all request bodies held now."""
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self._id_head = "req_" + secrets.token_hex(8)
        self._ids = itertools.count(1)
        self.metrics.queues = self._queue_lengths

    @property
    def ready(self) -> bool:
        """Whether it has a snapshot to serve from, and is not stopping."""
        return self.snapshot.version > 0 and not self.stopping

    def new_id(self) -> str:
        """A request id, unique among all gates."""
        return f"{self._id_head}{next(self._ids):x}"

    # the snapshot

    def use(self, snapshot: Snapshot) -> None:
        """Serve from `snapshot` from now on, and end what it no longer allows."""
        self.snapshot = snapshot
        self.keys = KeyRing(snapshot, self.settings.pepper)
        wanted: dict[str, Upstream] = {}
        for route in (*snapshot.routes.values(), *snapshot.trials.values()):
            queue = self.queues.get(route.queue_name)
            if queue is None:
                queue = self.queues[route.queue_name] = Queue(capacity=0, limit=0)
            slots = sum(max(replica.slots, 1) for replica in route.replicas)
            queue.capacity = -(-slots // self.settings.workers) if slots else 0
            queue.limit = self.settings.queue_limit
            queue.open = route.mode == "open" and bool(route.replicas)
            for replica in route.replicas:
                known = self.upstreams.get(replica.uid)
                if known is None or known.socket != replica.socket:
                    known = Upstream(
                        uid=replica.uid,
                        socket=replica.socket,
                        secret=engine_secret(self.settings.engine_master, replica.uid),
                        slots=replica.slots,
                    )
                known.slots = max(replica.slots, 1)
                wanted[replica.uid] = known
        for uid, upstream in self.upstreams.items():
            if wanted.get(uid) is not upstream:
                upstream.retire()
        self.upstreams = wanted
        for request in tuple(self.requests.values()):
            self._stop_forbidden(request)
        for queue in self.queues.values():
            queue.admit_waiting()
        self._drop_queues(snapshot)
        self.changed.set()

    def _drop_queues(self, snapshot: Snapshot) -> None:
        """Remove queues without a route, once they are empty."""
        used = {r.queue_name for r in (*snapshot.routes.values(), *snapshot.trials.values())}
        for name, queue in tuple(self.queues.items()):
            if name not in used and not queue.running and not queue.waiting:
                del self.queues[name]

    def _stop_forbidden(self, request: Request) -> None:
        """End a running request that the new snapshot forbids."""
        if request.key is not None:
            record = self.snapshot.keys.get(request.key.key_id)
            if record is None or record.state != "active":
                request.stop(Stop.REVOKED)
        if request.entry.waiting and request.route is not None:
            route = self.snapshot.now(request.route)
            if route is None or not route.is_served:
                request.stop(Stop.CLOSED)

    def usable(self, key: KeyRecord, *, trials: bool = False) -> list[Route]:
        """The routes that a key may use and that are served."""
        on_trial = self.snapshot.trials.values() if trials and key.trials else ()
        return [
            route
            for route in (*self.snapshot.routes.values(), *on_trial)
            if (not key.deployments or route.deployment in key.deployments) and route.is_served
        ]

    # bodies

    def hold_body(self, request: Request, size: int) -> None:
        """Count bytes of a body that are held."""
        request.body.size_bytes += size
        request.body.held_bytes += size
        self.body_bytes += size

    def drop_body(self, request: Request) -> None:
        """Let its body go: it has been sent, or is not needed any more."""
        request.body.parts = (b"", b"")
        self.body_bytes -= request.body.held_bytes
        request.body.held_bytes = 0

    # upstreams

    def take(self, request: Request, upstream: Upstream) -> None:
        """Count a request at a replica."""
        request.engine.upstream = upstream
        upstream.running += request.entry.slots
        uid = request.generation_uid
        self.inflight[uid] = self.inflight.get(uid, 0) + 1

    def release(self, request: Request) -> None:
        """The request is no longer at a replica."""
        if request.engine.upstream is None:
            return
        request.engine.upstream.running -= request.entry.slots
        request.engine.upstream = None
        left = self.inflight.get(request.generation_uid, 0) - 1
        if left > 0:
            self.inflight[request.generation_uid] = left
        else:
            self.inflight.pop(request.generation_uid, None)
            self.changed.set()

    # the end of a request

    def generation_headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        """The headers that every response carries."""
        headers = [(b"x-request-id", request.request_id.encode())]
        if request.generation_uid:
            headers.append((b"x-mm-generation", request.generation_uid.encode()))
        return headers

    def settle(self, request: Request, status: int, outcome: Outcome) -> None:
        """End a request: write its usage record, free its place. Does nothing the second time.

        Metrics and log follow after the response has left.
        """
        if request.settled:
            return
        request.settled = True
        now = time.monotonic()
        tokens, exact = tokens_of(request)
        usage = usage_of(request, status, outcome, tokens, exact=exact, now=now)
        if request.key is not None and request.endpoint is not None:
            self.directory.record((usage,))
        if request.reservation is not None:
            self.limiter.settle(request.reservation, tokens.prompt + tokens.completion)
        at_engine = request.engine.upstream is not None
        self.release(request)
        self._leave_queue(request)
        self._loop.call_soon(self._count, request, usage, now, at_engine)

    def _leave_queue(self, request: Request) -> None:
        queue, place = request.entry.queue, request.entry.place
        request.entry.queue = request.entry.place = None
        if queue is None:
            return
        if place is None:
            queue.leave(request.entry.slots)
        else:
            queue.give_up(place)

    def _count(self, request: Request, usage: Usage, now: float, at_engine: bool) -> None:  # noqa: FBT001 (call_soon passes positions)
        """Add a finished request to metrics, rates and log."""
        if usage.key_id and usage.endpoint:
            self.rates.add(
                usage.deployment, usage.key_id, usage.prompt_tokens, usage.completion_tokens
            )
        count(self.metrics, usage, request, now, at_engine=at_engine)
        if self.access_log.enabled:
            self.access_log.add(request, usage, now)

    def wait_estimate_s(self, route: Route) -> int:
        """Seconds until a full queue has room: its length at the recent rate of requests."""
        rate = max(self.rates.per_second(route.deployment), 0.1)
        return max(1, min(60, round(self.queues[route.queue_name].waiting / rate)))

    def _queue_lengths(self) -> dict[str, tuple[int, int]]:
        return {name: (queue.running, queue.waiting) for name, queue in self.queues.items()}
