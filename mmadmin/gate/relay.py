"""From the queue to the engine and back, byte for byte.

Promises: when a client leaves, the engine's connection closes within a second; once a response has
gone wrong, the client gets nothing but an error in its own dialect; an engine's silence shows as
comments; the engine is never read faster than the client reads; a request is tried again only
while no byte of it can have reached an engine, or when the engine closed a kept connection without
a byte of response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from mmadmin.core.snapshot import KeyRecord, Route
from mmadmin.gate.endpoints import Endpoint
from mmadmin.gate.engine_errors import refusal_of_response
from mmadmin.gate.queue import Place, QueueFull
from mmadmin.gate.refusal import Refusal, not_served, upstream_lost
from mmadmin.gate.request import Request, Stop
from mmadmin.gate.rewriting import passed_headers, queue_headers
from mmadmin.gate.sse import SseTap
from mmadmin.gate.tokens import tokens_of_answer, tokens_of_answers
from mmadmin.gate.traffic import Traffic
from mmadmin.gate.upstream import AnswerLost, ConnectFailed, Connection, Upstream

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OK = 200
REFUSED = 400
CONNECT_TRIES = 3
CONNECT_AGAIN_S = 0.25
EVENT_STREAM = b"text/event-stream"
COMMENT = b": waiting\n\n"
_STREAM_HEAD = [(b"content-type", b"text/event-stream; charset=utf-8")]
_UNBUFFERED = [(b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no")]
"""For the proxies in front: nginx and Cloudflare pass events on as they come."""
_SET_FOR_STREAMS = frozenset(name for name, _ in _UNBUFFERED)
_UNMARKED_ENDS = frozenset({"audio", "images"})
"""Endpoints whose streams end without a marker."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request whose key, endpoint and route are known: what goes to the engine, and for whom."""

    request: Request
    endpoint: Endpoint
    key: KeyRecord
    route: Route
    """As it was when the request came; `Request.route` follows later snapshots."""
    hide_usage: bool
    """The client did not ask for the usage event that the engine sends."""
    reports: int
    """How many answers report a usage of their own."""
    tokens: int
    """What it may cost at most."""
    passed_on: bytes
    """Header lines of the client that go on to the engine."""
    send: Send
    """The client's side."""


class Relay:
    """Serves exchanges."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    async def serve(self, exchange: Exchange) -> None:
        """One request, whole."""
        request, endpoint, traffic = exchange.request, exchange.endpoint, self._traffic
        response = request.response
        if traffic.limiter.limits(exchange.key):
            request.reservation, response.limit_headers = await traffic.limiter.reserve(
                exchange.key, exchange.tokens
            )
        if endpoint.takes_slot or exchange.route.mode == "hold":
            await self._enter_queue(exchange)
        connection, upstream = await self._ask(exchange)
        traffic.drop_body(request)
        kind, headers = passed_headers(connection)
        is_stream = kind.startswith(EVENT_STREAM)
        if connection.status >= REFUSED or (response.head_sent and not is_stream):
            answer = await connection.read_whole()
            _give_back(request, connection, upstream)
            errors = (request.route or exchange.route).errors
            raise refusal_of_response(connection.status, connection.headers, answer, errors)
        response.streamed = is_stream
        headers += traffic.generation_headers(request)
        headers += queue_headers(request.entry)
        headers += response.limit_headers
        if is_stream:
            tap = response.tap = SseTap(
                hide_usage=exchange.hide_usage, dialect=endpoint.dialect, reports=exchange.reports
            )
            await self._stream(exchange, connection, upstream, tap, headers)
        elif b"json" in kind:
            await self._whole(exchange, connection, upstream, headers)
        else:
            await self._bytes(exchange, connection, upstream, headers)

    # the queue

    async def _enter_queue(self, exchange: Exchange) -> None:
        """Wait to be admitted; a stream's client gets comments meanwhile."""
        request, route, traffic = exchange.request, exchange.route, self._traffic
        entry = request.entry
        queue = traffic.queues.get(route.queue_name)
        if queue is None:  # the route went while the limits were looked up
            raise not_served(request.model)
        entry.slots = max(1, min(request.answers, queue.capacity))
        if queue.try_enter(entry.slots):
            entry.queue = queue
            return
        place = Place(exchange.key.key_id, entry.wake, entry.slots)
        try:
            queue.wait(place)
        except QueueFull:
            retry_after_s = traffic.wait_estimate_s(route)
            full = Refusal(
                429,
                f"The queue of the model `{request.model}` is full. "
                f"Retry in {retry_after_s} seconds.",
                reason="queue_full",
                retry_after_s=retry_after_s,
            )
            raise full from None
        entry.queue, entry.place = queue, place
        arrived = time.monotonic()
        limit = arrived + traffic.settings.queue_timeout_s
        if route.mode == "hold":
            limit = max(limit, arrived + route.hold_until - time.time())
        whole_limit, request.deadline = request.deadline, limit
        while not place.admitted:
            entry.waiter = asyncio.get_running_loop().create_future()
            await entry.waiter
            entry.waiter = None
            if not place.admitted:
                await self._comment(exchange)
        entry.waited_s = time.monotonic() - arrived
        request.deadline = max(whole_limit, time.monotonic() + traffic.settings.request_timeout_s)

    # the engine

    def _choose(self, exchange: Exchange, tried: set[str]) -> Upstream | None:
        """The least loaded replica of the generation that is live now; None = none, or on hold."""
        request, traffic = exchange.request, self._traffic
        route = traffic.snapshot.now(request.route or exchange.route)
        if route is None or route.mode == "closed":
            raise not_served(request.model)
        request.lead_to(route)
        if route.mode == "hold":
            return None
        candidates = [traffic.upstreams[r.uid] for r in route.replicas if r.uid not in tried]
        return min(candidates, key=lambda u: u.running / u.slots, default=None)

    async def _ask(self, exchange: Exchange) -> tuple[Connection, Upstream]:
        """Send the request and wait for the head of the response."""
        request = exchange.request
        connection, upstream = await self._connect(exchange)
        first, body = request.body.parts
        head = b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\nX-Request-Id: %b\r\n%b\r\n%b" % (
            exchange.endpoint.upstream.encode(),
            upstream.head,
            len(first) + len(body),
            request.request_id.encode(),
            exchange.passed_on,
            first,
        )
        connection.send(head, body)
        while True:
            try:
                while not await connection.answer_head():
                    await self._comment(exchange)
            except AnswerLost:
                if connection.exchanges == 1 or connection.touched:
                    raise upstream_lost() from None
            else:
                return connection, upstream
            # a kept connection that the engine closed just now: the request was not read
            request.engine.connection = None
            try:
                connection = await upstream.fresh_connection()
            except ConnectFailed:
                raise upstream_lost() from None
            request.engine.connection = connection
            connection.send(head, body)

    async def _connect(self, exchange: Exchange) -> tuple[Connection, Upstream]:
        """Choose a replica and connect to it."""
        request, traffic = exchange.request, self._traffic
        tried: set[str] = set()
        tries = 0
        while tries < CONNECT_TRIES:
            upstream = self._choose(exchange, tried)
            if upstream is None:
                # all refused (a generation may be starting), or a hold began just now
                tried.clear()
                tries += not _is_held(request)
                await asyncio.sleep(CONNECT_AGAIN_S)
                continue
            tries += 1
            traffic.take(request, upstream)
            try:
                connection = request.engine.connection = await upstream.connection()
            except ConnectFailed:
                tried.add(upstream.uid)
                traffic.release(request)
                continue
            return connection, upstream
        raise not_served(request.model, retry_after_s=5)

    # the response

    async def _whole(
        self, exchange: Exchange, connection: Connection, upstream: Upstream, headers: Headers
    ) -> None:
        """A JSON response: read, recorded, sent."""
        request, status = exchange.request, connection.status
        response = request.response
        try:
            answer = await connection.read_whole()
        except AnswerLost:
            raise upstream_lost() from None
        response.first_at = time.monotonic()
        _give_back(request, connection, upstream)
        encoding = next((v for n, v in headers if n == b"content-encoding"), b"")
        response.tokens = tokens_of_answer(answer, encoding)
        if response.tokens and exchange.endpoint.streams and exchange.reports > 1:
            response.tokens = tokens_of_answers(
                response.tokens, answer, request.body.size_bytes, exchange.tokens
            )
        self._traffic.settle(request, status, "ok")
        headers.append((b"content-length", str(len(answer)).encode()))
        await exchange.send({"type": "http.response.start", "status": status, "headers": headers})
        response.head_sent = True
        await exchange.send({"type": "http.response.body", "body": answer})

    async def _bytes(
        self, exchange: Exchange, connection: Connection, upstream: Upstream, headers: Headers
    ) -> None:
        """Anything else (audio): passed on as it comes."""
        request, send, status = exchange.request, exchange.send, connection.status
        response = request.response
        await send({"type": "http.response.start", "status": status, "headers": headers})
        response.head_sent = True
        try:
            while data := await connection.read():
                response.first_at = response.first_at or time.monotonic()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except AnswerLost:
            self._traffic.settle(request, status, "failed")
            return  # the response is left unfinished: the client sees that it is not whole
        _give_back(request, connection, upstream)
        self._traffic.settle(request, status, "ok")
        await send({"type": "http.response.body", "body": b""})

    async def _stream(  # noqa: C901 (one loop that runs once per event)
        self,
        exchange: Exchange,
        connection: Connection,
        upstream: Upstream,
        tap: SseTap,
        headers: Headers,
    ) -> None:
        """Events, byte for byte."""
        request, send, status = exchange.request, exchange.send, connection.status
        response = request.response
        if not response.head_sent:
            headers = [pair for pair in headers if pair[0] not in _SET_FOR_STREAMS] + _UNBUFFERED
            await send({"type": "http.response.start", "status": status, "headers": headers})
            response.head_sent = True
        now = time.monotonic
        try:
            while True:
                data = await connection.read()
                if data is None:
                    if tap.between:
                        await self._comment(exchange)
                    continue
                if not data:
                    break
                out = tap.feed(data)
                if not response.first_at and tap.events:
                    response.first_at = now()
                if tap.ended and not request.settled:
                    self._traffic.settle(request, status, "failed" if tap.failed else "ok")
                if out:
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                    response.last_sent = now()
        except AnswerLost:
            raise upstream_lost() from None
        tail = tap.finish()
        if tap.ended or exchange.endpoint.name in _UNMARKED_ENDS:
            self._traffic.settle(request, status, "failed" if tap.failed else "ok")
        elif tap.failed:
            self._traffic.settle(request, status, "failed")
        else:
            raise upstream_lost()
        _give_back(request, connection, upstream)
        await send({"type": "http.response.body", "body": tail})

    async def _comment(self, exchange: Exchange) -> None:
        """Break the silence of a stream, so that proxies and clients see it is alive."""
        request, send = exchange.request, exchange.send
        response = request.response
        if not response.streamed:
            return
        if not response.head_sent:
            if request.engine.upstream is None:  # which generation will answer is not known yet
                request.generation_uid = ""
            headers = [*_STREAM_HEAD, *_UNBUFFERED, *self._traffic.generation_headers(request)]
            headers += queue_headers(request.entry)
            headers += response.limit_headers
            await send({"type": "http.response.start", "status": OK, "headers": headers})
            response.head_sent = True
        await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        response.last_sent = time.monotonic()


def _give_back(request: Request, connection: Connection, upstream: Upstream) -> None:
    """The exchange ended well: the connection may serve another."""
    if request.engine.connection is connection:
        request.engine.connection = None
        upstream.give_back(connection)


def _is_held(request: Request) -> bool:
    """Whether the deployment is on hold and may still be released."""
    route = request.route
    return route is not None and route.mode == "hold" and time.time() < route.hold_until


async def watch(request: Request, receive: Receive) -> None:
    """End the request when its client leaves."""
    while not request.settled:
        message = await receive()
        if message["type"] == "http.disconnect":
            request.stop(Stop.GONE)
            return
