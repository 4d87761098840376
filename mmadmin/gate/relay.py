"""The relay: from the turnstile to the engine and back, byte for byte.

Promises: a client that leaves closes the engine's connection within a second; nothing is sent to a
client after its answer went wrong but an error in its own dialect; an engine's silence shows as
comments; the engine is never read faster than the client reads; a request is tried again only
while no byte of it can have reached an engine, or when the engine closed a kept connection without
a byte of answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from mmadmin.core.snapshot import Route
from mmadmin.gate.envelope import headers_of, queue_marks, with_usage, worst_case
from mmadmin.gate.flight import Flight, Stop
from mmadmin.gate.meter import tokens_of_answer
from mmadmin.gate.refusal import Refusal, not_served, upstream_lost
from mmadmin.gate.sse import SseTap
from mmadmin.gate.translate import refusal_of_answer
from mmadmin.gate.turnstile import Full, Ticket
from mmadmin.gate.upstream import AnswerLost, ConnectFailed, Connection, Upstream

if TYPE_CHECKING:
    from mmadmin.gate.app import Gate

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OK = 200
REFUSED = 400
FAILED = 500
CONNECT_TRIES = 3
CONNECT_AGAIN_S = 0.25
EVENT_STREAM = b"text/event-stream"
COMMENT = b": waiting\n\n"
_STREAM_HEAD = [(b"content-type", b"text/event-stream; charset=utf-8")]
_UNBUFFERED = [(b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no")]
"""For the proxies in front: nginx and Cloudflare pass events on as they come."""
_SET_FOR_STREAMS = frozenset(name for name, _ in _UNBUFFERED)


class Relay:
    """Serves flights that know their route."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def serve(
        self,
        flight: Flight,
        route: Route,
        send: Send,
        *,
        body: bytes,
        payload: dict[str, Any],
        passed_on: bytes,
    ) -> None:
        """One request, whole."""
        endpoint = flight.endpoint
        assert endpoint is not None  # noqa: S101 (set before a route is looked for)
        hide_usage = False
        if flight.streamed and endpoint.asks_usage:
            body, hide_usage = with_usage(body, payload)
        gate = self._gate
        assert flight.key is not None  # noqa: S101 (authenticated before)
        if gate.limiter.limits(flight.key):
            flight.reservation, flight.standing = await gate.limiter.reserve(
                flight.key, worst_case(flight, payload)
            )
        if endpoint.takes_slot or route.mode == "hold":
            await self._enter(flight, route, send)
        connection = await self._ask(flight, body, passed_on, send)
        kind, headers = headers_of(connection)
        is_stream = kind.startswith(EVENT_STREAM)
        if connection.status >= REFUSED or (flight.head_sent and not is_stream):
            answer = await connection.read_whole()
            self._give_back(flight)
            raise refusal_of_answer(connection.status, connection.headers, answer)
        flight.streamed = is_stream
        headers += gate.marks(flight)
        headers += queue_marks(flight)
        headers += flight.standing
        if is_stream:
            flight.tap = SseTap(hide_usage=hide_usage, dialect=endpoint.dialect)
            await self._stream(flight, headers, send)
        elif b"json" in kind:
            await self._whole(flight, headers, send)
        else:
            await self._bytes(flight, headers, send)

    def leave(self, flight: Flight) -> None:
        """Free the place in the turnstile and the count of the generation."""
        gate = self._gate
        if flight.upstream is not None:
            flight.upstream.running -= 1
            left = gate.inflight.get(flight.generation_uid, 0) - 1
            if left > 0:
                gate.inflight[flight.generation_uid] = left
            else:
                gate.inflight.pop(flight.generation_uid, None)
                gate.changed.set()
        turnstile, ticket = flight.turnstile, flight.ticket
        flight.turnstile = flight.ticket = None
        if turnstile is not None:
            if ticket is None:
                turnstile.leave()
            else:
                turnstile.give_up(ticket)

    # the turnstile

    async def _enter(self, flight: Flight, route: Route, send: Send) -> None:
        """Wait for a turn; a stream's client hears comments meanwhile."""
        gate = self._gate
        turnstile = gate.turnstiles.get(route.line)
        if turnstile is None:  # the route went while the limits were looked up
            raise not_served(flight.model)
        if turnstile.try_pass():
            flight.turnstile = turnstile
            return
        assert flight.key is not None  # noqa: S101 (authenticated before)
        ticket = Ticket(flight.key.key_id, flight.wake)
        try:
            turnstile.wait(ticket)
        except Full:
            full = Refusal(
                429,
                f"Too many requests are waiting for `{flight.model}`.",
                reason="queue_full",
                retry_after_s=gate.wait_estimate_s(route),
            )
            raise full from None
        flight.turnstile, flight.ticket = turnstile, ticket
        arrived = time.monotonic()
        limit = arrived + gate.settings.queue_timeout_s
        if route.mode == "hold":
            limit = max(limit, arrived + route.hold_until - time.time())
        whole_limit, flight.deadline = flight.deadline, limit
        while not ticket.admitted:
            flight.waiter = asyncio.get_running_loop().create_future()
            await flight.waiter
            flight.waiter = None
            if not ticket.admitted:
                await self._comment(flight, send)
        flight.queued_s = time.monotonic() - arrived
        flight.deadline = max(whole_limit, time.monotonic() + gate.settings.request_timeout_s)

    # the engine

    def _choose(self, flight: Flight, tried: set[str]) -> Upstream | None:
        """The replica with most room, of the generation that is live now."""
        gate = self._gate
        assert flight.route is not None  # noqa: S101 (looked up before)
        route = gate.snapshot.now(flight.route)
        if route is None or route.mode == "closed":
            raise not_served(flight.model)
        flight.route = route
        flight.generation = route.generation or 0
        flight.generation_uid = route.generation_uid or ""
        if route.mode == "hold":
            return None
        candidates = [gate.upstreams[r.uid] for r in route.replicas if r.uid not in tried]
        return min(candidates, key=lambda u: u.running / u.slots, default=None)

    def _held(self, flight: Flight) -> bool:
        """Whether the deployment is on hold and may still be released."""
        route = flight.route
        return route is not None and route.mode == "hold" and time.time() < route.hold_until

    async def _ask(self, flight: Flight, body: bytes, passed_on: bytes, send: Send) -> Connection:
        """Send the request and wait for the head of the answer."""
        head = await self._open(flight, passed_on, len(body))
        connection, upstream = flight.connection, flight.upstream
        assert connection is not None  # noqa: S101 (just opened)
        assert upstream is not None  # noqa: S101 (just chosen)
        connection.send(head, body)
        while True:
            try:
                while not await connection.answer_head():
                    await self._comment(flight, send)
            except AnswerLost:
                if connection.exchanges == 1 or connection.touched:
                    raise upstream_lost() from None
            else:
                return connection
            # a kept connection that the engine closed just now: the request was not read
            flight.connection = None
            try:
                connection = await upstream.fresh_connection()
            except ConnectFailed:
                raise upstream_lost() from None
            flight.connection = connection
            connection.send(head, body)

    async def _open(self, flight: Flight, passed_on: bytes, size: int) -> bytes:
        """Choose a replica and connect; returns the request's head for it."""
        gate = self._gate
        endpoint = flight.endpoint
        assert endpoint is not None  # noqa: S101 (set before)
        tried: set[str] = set()
        tries = 0
        while tries < CONNECT_TRIES:
            upstream = self._choose(flight, tried)
            if upstream is None:
                # all have refused: a generation may be on its way; or a hold began just now
                tried.clear()
                tries += not self._held(flight)
                await asyncio.sleep(CONNECT_AGAIN_S)
                continue
            tries += 1
            flight.upstream = upstream
            upstream.running += 1
            uid = flight.generation_uid
            gate.inflight[uid] = gate.inflight.get(uid, 0) + 1
            try:
                flight.connection = await upstream.connection()
            except ConnectFailed:
                tried.add(upstream.uid)
                self._unchoose(flight)
                continue
            return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\nX-Request-Id: %b\r\n%b\r\n" % (
                endpoint.upstream.encode(),
                upstream.head,
                size,
                flight.request_id.encode(),
                passed_on,
            )
        raise not_served(flight.model, retry_after_s=5)

    def _unchoose(self, flight: Flight) -> None:
        """Nothing was sent to this replica."""
        gate = self._gate
        assert flight.upstream is not None  # noqa: S101 (chosen before)
        flight.upstream.running -= 1
        flight.upstream = None
        gate.inflight[flight.generation_uid] -= 1
        if not gate.inflight[flight.generation_uid]:
            del gate.inflight[flight.generation_uid]
            gate.changed.set()

    def _give_back(self, flight: Flight) -> None:
        """The exchange ended well: the connection may serve another."""
        connection, flight.connection = flight.connection, None
        if connection is not None and flight.upstream is not None:
            flight.upstream.give_back(connection)

    # the answer

    async def _whole(self, flight: Flight, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        """A JSON answer: read, booked, sent."""
        connection = flight.connection
        assert connection is not None  # noqa: S101 (opened before)
        status = connection.status
        try:
            answer = await connection.read_whole()
        except AnswerLost:
            raise upstream_lost() from None
        flight.first_at = time.monotonic()
        self._give_back(flight)
        encoding = next((v for n, v in headers if n == b"content-encoding"), b"")
        flight.tokens = tokens_of_answer(answer, encoding)
        self._gate.settle(flight, status, "ok")
        headers.append((b"content-length", str(len(answer)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        flight.head_sent = True
        await send({"type": "http.response.body", "body": answer})

    async def _bytes(self, flight: Flight, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        """Anything else (audio): passed on as it comes."""
        connection = flight.connection
        assert connection is not None  # noqa: S101 (opened before)
        await send({"type": "http.response.start", "status": connection.status, "headers": headers})
        flight.head_sent = True
        try:
            while data := await connection.read():
                flight.first_at = flight.first_at or time.monotonic()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except AnswerLost:
            self._gate.settle(flight, connection.status, "failed")
            return  # the response is left unfinished: the client sees that it is not whole
        self._give_back(flight)
        self._gate.settle(flight, connection.status, "ok")
        await send({"type": "http.response.body", "body": b""})

    async def _stream(  # noqa: C901 (one loop that runs once an event)
        self, flight: Flight, headers: list[tuple[bytes, bytes]], send: Send
    ) -> None:
        """Events, byte for byte."""
        connection, tap = flight.connection, flight.tap
        assert connection is not None  # noqa: S101 (opened before)
        assert tap is not None  # noqa: S101 (made before)
        status = connection.status
        if not flight.head_sent:
            headers = [pair for pair in headers if pair[0] not in _SET_FOR_STREAMS] + _UNBUFFERED
            await send({"type": "http.response.start", "status": status, "headers": headers})
            flight.head_sent = True
        now = time.monotonic
        try:
            while True:
                data = await connection.read()
                if data is None:
                    if tap.between:
                        await self._comment(flight, send)
                    continue
                if not data:
                    break
                out = tap.feed(data)
                if not flight.first_at and tap.events:
                    flight.first_at = now()
                if tap.ended and not flight.settled:
                    self._gate.settle(flight, status, "failed" if tap.failed else "ok")
                if out:
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                    flight.last_sent = now()
        except AnswerLost:
            raise upstream_lost() from None
        tail = tap.finish()
        if tap.ended or not self._says_its_end(flight):
            self._gate.settle(flight, status, "failed" if tap.failed else "ok")
        elif tap.failed:
            self._gate.settle(flight, status, "failed")
        else:
            raise upstream_lost()
        self._give_back(flight)
        await send({"type": "http.response.body", "body": tail})

    def _says_its_end(self, flight: Flight) -> bool:
        """Whether this endpoint's streams end with a marker."""
        return flight.endpoint is not None and flight.endpoint.name not in ("audio", "images")

    async def _comment(self, flight: Flight, send: Send) -> None:
        """Break the silence of a stream: proxies and clients see that it lives."""
        if not flight.streamed:
            return
        if not flight.head_sent:
            if flight.upstream is None:  # which generation will answer is not known yet
                flight.generation_uid = ""
            headers = [*_STREAM_HEAD, *_UNBUFFERED, *self._gate.marks(flight)]
            headers += queue_marks(flight)
            headers += flight.standing
            await send({"type": "http.response.start", "status": OK, "headers": headers})
            flight.head_sent = True
        await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        flight.last_sent = time.monotonic()


async def watch(flight: Flight, receive: Receive) -> None:
    """End the flight when its client leaves."""
    while not flight.settled:
        message = await receive()
        if message["type"] == "http.disconnect":
            flight.stop(Stop.GONE)
            return
