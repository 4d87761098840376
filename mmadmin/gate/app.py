"""The gate: an ASGI application that knows keys and routes.

A request's journey: allowed path → key → body → model → limits → turnstile → engine → books.
Everything that can be known is in memory; nothing here waits for a broker, a disk or a database
(keys with limits ask the broker, and do without it when it is away).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import orjson

from mmadmin.core.access import engine_secret
from mmadmin.core.snapshot import KeyRecord, Route, Snapshot, Usage
from mmadmin.gate.directory import EMPTY, Directory
from mmadmin.gate.flight import Flight, Stop
from mmadmin.gate.intake import Head, answers, model_card, model_of_form, payload_of, too_large
from mmadmin.gate.keys import KeyRing
from mmadmin.gate.ledger import AccessLog, Outcome, count, note_rate, tokens_of, usage_of
from mmadmin.gate.limits import Limiter
from mmadmin.gate.metrics import Metrics
from mmadmin.gate.rates import Rates
from mmadmin.gate.refusal import Dialect, Refusal, no_model, not_served, wrong_key
from mmadmin.gate.relay import Relay
from mmadmin.gate.settings import GateSettings
from mmadmin.gate.surface import MODEL, MODELS, POSTS
from mmadmin.gate.turnstile import Turnstile
from mmadmin.gate.upstream import Upstream

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CLIENT_LEFT = 499
BODIES_AT_ONCE = 16
"""A worker holds at most so many bodies of the largest size."""
HEADER_LIMIT_BYTES = 64 * 1024
"""Names and values of a request's headers together."""
_JSON = (b"content-type", b"application/json")
log = logging.getLogger("mmadmin.gate")


class Gone(Exception):
    """The client left before its request was whole."""


class Gate:
    """The ASGI application and everything that it keeps in memory."""

    def __init__(
        self,
        settings: GateSettings,
        directory: Directory,
        *,
        limiter: Limiter,
        worker: str = "0",
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.limiter = limiter
        self.snapshot: Snapshot = EMPTY
        self._keys = KeyRing(EMPTY, settings.pepper)
        self.metrics = Metrics(worker)
        self.rates = Rates()
        self.access_log = AccessLog(enabled=settings.access_log)
        self.flights: dict[str, Flight] = {}
        self.inflight: dict[str, int] = {}
        """Requests at an engine, by generation uid."""
        self.turnstiles: dict[str, Turnstile] = {}
        """By line: the deployment, or the generation on trial."""
        self.upstreams: dict[str, Upstream] = {}
        """By replica uid."""
        self.changed = asyncio.Event()
        """Set when the presence ought to be told anew at once."""
        self.body_bytes = 0
        """Of all requests that are held now."""
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self._relay = Relay(self)
        self._id_head = "req_" + secrets.token_hex(8)
        self._ids = itertools.count(1)
        self.metrics.lines = self._lines

    # the snapshot

    async def start(self) -> None:
        """Take the first snapshot and every later one."""
        self.directory.watch(self.use)
        self.use(await self.directory.snapshot())

    def use(self, snapshot: Snapshot) -> None:
        """Serve from `snapshot` from now on, and end what it no longer allows."""
        self.snapshot = snapshot
        self._keys = KeyRing(snapshot, self.settings.pepper)
        wanted: dict[str, Upstream] = {}
        for route in (*snapshot.routes.values(), *snapshot.trials.values()):
            turnstile = self.turnstiles.get(route.line)
            if turnstile is None:
                turnstile = self.turnstiles[route.line] = Turnstile(capacity=0, limit=0)
            slots = sum(max(replica.slots, 1) for replica in route.replicas)
            turnstile.capacity = -(-slots // self.settings.workers) if slots else 0
            turnstile.limit = route.queue_limit
            turnstile.open = route.mode == "open" and bool(route.replicas)
            for replica in route.replicas:
                known = self.upstreams.get(replica.uid)
                if known is None or known.url != replica.url:
                    known = Upstream(
                        uid=replica.uid,
                        url=replica.url,
                        secret=engine_secret(self.settings.engine_master, replica.uid),
                        slots=replica.slots,
                    )
                known.slots = max(replica.slots, 1)
                wanted[replica.uid] = known
        for uid, upstream in self.upstreams.items():
            if wanted.get(uid) is not upstream:
                upstream.retire()
        self.upstreams = wanted
        for flight in tuple(self.flights.values()):
            self._judge(flight)
        for turnstile in self.turnstiles.values():
            turnstile.pump()
        self._forget_lines(snapshot)
        self.changed.set()

    def _forget_lines(self, snapshot: Snapshot) -> None:
        """Drop the lines that lead nowhere any more, once nobody is in them."""
        lead = {route.line for route in (*snapshot.routes.values(), *snapshot.trials.values())}
        for line, turnstile in tuple(self.turnstiles.items()):
            if line not in lead and not turnstile.running and not turnstile.waiting:
                del self.turnstiles[line]

    def _judge(self, flight: Flight) -> None:
        """End a running request that the new snapshot forbids."""
        if flight.key is not None:
            record = self.snapshot.keys.get(flight.key.key_id)
            if record is None or record.state != "active":
                flight.stop(Stop.REVOKED)
        if flight.waiting and flight.route is not None:
            route = self.snapshot.now(flight.route)
            if route is None or route.mode == "closed" or not answers(route):
                flight.stop(Stop.CLOSED)

    # ASGI

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        flight = Flight(
            f"{self._id_head}{next(self._ids):x}", path.decode("latin-1"), scope.get("client")
        )
        dialect: Dialect = "openai"
        try:
            endpoint = POSTS.get(path)
            if endpoint is not None and scope["method"] == "POST":
                flight.endpoint = endpoint
                dialect = endpoint.dialect
                await self._serve(flight, scope["headers"], receive, send)
            else:
                await self._answer_about_models(flight, scope, path, send)
        except Refusal as refusal:
            await self._refuse(flight, refusal, dialect, send)
        except Gone:
            self.settle(flight, CLIENT_LEFT, "cancelled")
        except asyncio.CancelledError:
            await self._stopped(flight, dialect, send)
        except Exception:
            log.exception("request %s ended by a bug of the gate", flight.request_id)
            broken = Refusal(500, "The gateway failed.", reason="internal_error")
            await self._refuse(flight, broken, dialect, send, outcome="failed")
        finally:
            flight.forget_connection()
            self.body_bytes -= flight.body_bytes
            self.flights.pop(flight.request_id, None)
            if not flight.settled:
                self.settle(flight, CLIENT_LEFT, "cancelled")

    async def _serve(
        self,
        flight: Flight,
        headers: list[tuple[bytes, bytes]],
        receive: Receive,
        send: Send,
    ) -> None:
        head = Head(headers)
        key = self._authenticate(flight, head)
        body = await self._read_request(flight, head, receive)
        endpoint = flight.endpoint
        assert endpoint is not None  # noqa: S101 (set by the caller)
        payload: dict[str, Any] = {}
        if endpoint.body == "json":
            payload = payload_of(body)
            name = payload.get("model")
            flight.streamed = endpoint.streams and payload.get("stream") is True
        else:
            name = model_of_form(body)
        route = self._route(flight, key, name)
        if key.endpoints and endpoint.name not in key.endpoints:
            raise Refusal(
                403,
                f"This API key may not use {endpoint.name}.",
                reason="endpoint_not_allowed",
            )
        if route.endpoints and endpoint.name not in route.endpoints:
            raise Refusal(404, "This model does not offer this endpoint.", reason="not_supported")
        await self._relay.serve(
            flight, route, send, body=body, payload=payload, passed_on=head.passed_on
        )

    def _authenticate(self, flight: Flight, head: Head) -> KeyRecord:
        if head.size > HEADER_LIMIT_BYTES:
            raise Refusal(
                431,
                f"The request headers may have {HEADER_LIMIT_BYTES // 1024} KiB in all.",
                reason="headers_too_large",
            )
        key = self._keys.check(head.key_text)
        flight.key = key
        flight.task = asyncio.current_task(self._loop)
        self.flights[flight.request_id] = flight
        flight.deadline = flight.started + self.settings.request_timeout_s
        return key

    async def _read_request(self, flight: Flight, head: Head, receive: Receive) -> bytes:
        """The body, whole."""
        limit = self.settings.body_limit_bytes
        flight.client_request_id = head.client_id
        if head.body_bytes > limit:
            raise too_large(limit)
        if head.packed:
            raise Refusal(415, "Send the request body without Content-Encoding.")
        body = await self._read_body(flight, receive, limit)
        flight.receive = receive
        return body

    async def _read_body(self, flight: Flight, receive: Receive, limit: int) -> bytes:
        """The whole body; `Gone` when the client leaves, `Refusal` when it is too large."""
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            parts.append(part)
            flight.body_bytes += len(part)
            self.body_bytes += len(part)
            if flight.body_bytes > limit:
                raise too_large(limit)
            if self.body_bytes > limit * BODIES_AT_ONCE:
                raise Refusal(
                    503,
                    "The gateway holds too many large requests.",
                    reason="overloaded",
                    retry_after_s=5,
                )
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _route(self, flight: Flight, key: KeyRecord, name: object) -> Route:
        """The route of a model name, as far as the key may know."""
        if name is None and flight.endpoint is not None and not flight.endpoint.needs_model:
            usable = self._usable(key)
            name = usable[0].public_name if len(usable) == 1 else None
        if not isinstance(name, str) or not name:
            raise Refusal(
                400, "You must provide a model parameter.", reason="missing_model", param="model"
            )
        flight.model = name
        route = self.snapshot.routes.get(name)
        if route is None and key.trials:
            route = self.snapshot.trials.get(name)
        if route is None or (key.deployments and route.deployment not in key.deployments):
            raise no_model(name)
        flight.route = route
        flight.generation = route.generation or 0
        flight.generation_uid = route.generation_uid or ""
        if route.mode == "closed" or not answers(route):
            raise not_served(name)
        return route

    # models

    def _usable(self, key: KeyRecord, *, trials: bool = False) -> list[Route]:
        on_trial = self.snapshot.trials.values() if trials and key.trials else ()
        return [
            route
            for route in (*self.snapshot.routes.values(), *on_trial)
            if (not key.deployments or route.deployment in key.deployments)
            and route.mode != "closed"
            and answers(route)
        ]

    async def _answer_about_models(
        self, flight: Flight, scope: Message, path: bytes, send: Send
    ) -> None:
        """`/v1/models`, one model, or the refusal of everything else."""
        about_models = path == MODELS or (path.startswith(MODEL) and len(path) > len(MODEL))
        if not about_models or scope["method"] not in ("GET", "HEAD"):
            allowed = b"POST" if path in POSTS else b"GET, HEAD" if about_models else b""
            if allowed:
                refusal = Refusal(405, f"Use {allowed.decode()} here.", reason="method_not_allowed")
                refusal.headers.append((b"allow", allowed))
                raise refusal
            raise Refusal(404, "There is nothing at this address.", reason="unknown_url")
        key = self._keys.check(Head(scope["headers"]).key_text)
        flight.key = key
        usable = {r.public_name: model_card(r) for r in self._usable(key, trials=True)}
        if path == MODELS:
            body = orjson.dumps({"object": "list", "data": list(usable.values())})
        else:
            name = unquote(path[len(MODEL) :].decode("latin-1"))
            flight.model = name
            if name not in usable:
                raise no_model(name)
            body = orjson.dumps(usable[name])
        self.settle(flight, 200, "ok")
        await self._send_whole(send, 200, body, [_JSON, *self.marks(flight)])

    # endings

    def marks(self, flight: Flight) -> list[tuple[bytes, bytes]]:
        """The headers that every answer carries."""
        marks = [(b"x-request-id", flight.request_id.encode())]
        if flight.generation_uid:
            marks.append((b"x-mm-generation", flight.generation_uid.encode()))
        return marks

    def settle(self, flight: Flight, status: int, outcome: Outcome) -> None:
        """End a request: write its line, free its place. Does nothing the second time.

        What only people look at (figures, log) is done just after the answer has left.
        """
        if flight.settled:
            return
        flight.settled = True
        now = time.monotonic()
        tokens, exact = tokens_of(flight)
        usage = usage_of(flight, status, outcome, tokens, exact=exact, now=now)
        if flight.key is not None and flight.endpoint is not None:
            self.directory.record((usage,))
        if flight.reservation is not None:
            self.limiter.settle(flight.reservation, tokens.prompt + tokens.completion)
        self._relay.leave(flight)
        self._loop.call_soon(self._tell, flight, usage, now)

    def _tell(self, flight: Flight, usage: Usage, now: float) -> None:
        """Put an ended request into figures, rates and log."""
        if usage.key_id and usage.endpoint:
            note_rate(self.rates, usage)
        count(self.metrics, usage, flight, now)
        if self.access_log.enabled:
            self.access_log.add(flight, usage, now)

    async def _refuse(
        self,
        flight: Flight,
        refusal: Refusal,
        dialect: Dialect,
        send: Send,
        outcome: Outcome | None = None,
    ) -> None:
        """Say no, as a response or inside the stream that has begun."""
        if outcome is None:
            outcome = "failed" if refusal.status >= 500 else "refused"  # noqa: PLR2004
        reason = refusal.reason or str(refusal.status)
        self.metrics.refusals[reason] = self.metrics.refusals.get(reason, 0) + 1
        if reason == "template_refused" and flight.route is not None:
            name = flight.route.deployment
            refused = self.metrics.template_refusals
            refused[name] = refused.get(name, 0) + 1
        self.settle(flight, refusal.status, outcome)
        if flight.head_sent:
            event = refusal.event(dialect, flight.request_id)
            await send({"type": "http.response.body", "body": event, "more_body": False})
            return
        headers = [_JSON, *self.marks(flight), *refusal.headers]
        if refusal.retry_after_s is not None:
            headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
        if refusal.status == 401:  # noqa: PLR2004
            headers.append((b"www-authenticate", b"Bearer"))
        body = refusal.body(dialect, flight.request_id)
        await self._send_whole(send, refusal.status, body, headers)

    async def _stopped(self, flight: Flight, dialect: Dialect, send: Send) -> None:
        """The task was cancelled: by `Flight.stop`, or because the server ends."""
        flight.forget_connection()
        why = flight.stopped
        if why is None:  # the event loop ends: nothing can be said any more
            self.settle(flight, CLIENT_LEFT, "failed")
            raise asyncio.CancelledError
        if flight.task is not None:
            flight.task.uncancel()
        if why is Stop.GONE:
            self.settle(flight, CLIENT_LEFT, "cancelled")
            return
        if why is Stop.STOPPING:
            ending = Refusal(503, "The gateway is stopping.", reason="stopping", retry_after_s=5)
        elif why is Stop.REVOKED:
            ending = wrong_key()
        elif why is Stop.CLOSED:
            ending = not_served(flight.model)
        elif flight.waiting:
            ending = Refusal(
                503,
                "The request waited too long for its turn.",
                reason="queue_timeout",
                retry_after_s=10,
            )
        else:
            ending = Refusal(504, "The engine took too long.", reason="deadline_exceeded")
        outcome: Outcome | None = "cancelled" if why is Stop.REVOKED else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._refuse(flight, ending, dialect, send, outcome)

    def wait_estimate_s(self, route: Route) -> int:
        """When to come again after a full line: what the line takes at the recent pace."""
        turnstile = self.turnstiles[route.line]
        pace = max(self.rates.per_second(route.deployment), 0.1)
        return max(1, min(60, round(turnstile.waiting / pace)))

    async def _send_whole(
        self, send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _lines(self) -> dict[str, tuple[int, int]]:
        return {name: (stile.running, stile.waiting) for name, stile in self.turnstiles.items()}
