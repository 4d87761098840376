"""The gate: an ASGI application that knows keys and routes.

What happens to a request: allowed path → key → body → model → limits → queue → engine → usage.
Everything that can be known is in memory; nothing here waits for a broker, a disk or a database
(keys with limits ask the broker, and do without it while it is down).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import orjson

from mmadmin.core.snapshot import KeyRecord, Route
from mmadmin.gate.directory import Directory
from mmadmin.gate.endpoints import HEALTH, MODEL, MODELS, POSTS, Endpoint
from mmadmin.gate.intake import (
    Head,
    model_card,
    model_list,
    model_of_form,
    payload_of,
    refusal_of_address,
    too_large,
)
from mmadmin.gate.limits import Limiter
from mmadmin.gate.refusal import Dialect, Refusal, ended_key, no_model, not_served
from mmadmin.gate.relay import Exchange, Relay
from mmadmin.gate.request import Request, Stop
from mmadmin.gate.rewriting import answers_asked, with_usage, worst_case
from mmadmin.gate.settings import GateSettings
from mmadmin.gate.traffic import Traffic
from mmadmin.gate.usage import Outcome

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CLIENT_LEFT = 499
BODIES_AT_ONCE = 16
"""A worker holds at most this many bodies of the largest size."""
HEADER_LIMIT_BYTES = 64 * 1024
"""Names and values of a request's headers together."""
_JSON = (b"content-type", b"application/json")
log = logging.getLogger("mmadmin.gate")


class Gone(Exception):
    """The client left before its request was complete."""


class Gate:
    """The ASGI application."""

    def __init__(
        self,
        settings: GateSettings,
        directory: Directory,
        *,
        limiter: Limiter,
        worker: str = "0",
    ) -> None:
        self.settings = settings
        self.traffic = Traffic(settings, directory, limiter, worker)
        self._relay = Relay(self.traffic)
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Take the first snapshot and every later one."""
        directory = self.traffic.directory
        directory.watch(self.traffic.use)
        self.traffic.use(await directory.snapshot())

    # ASGI

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        request = Request(self.traffic.new_id(), path.decode("latin-1"), scope.get("client"))
        dialect: Dialect = "openai"
        try:
            endpoint = POSTS.get(path)
            if endpoint is not None and scope["method"] == "POST":
                request.endpoint = endpoint
                dialect = endpoint.dialect
                exchange = await self._admit(request, endpoint, scope["headers"], receive, send)
                await self._relay.serve(exchange)
            else:
                head = Head(scope["headers"])
                dialect = "anthropic" if head.is_anthropic else "openai"
                await self._answer_otherwise(request, scope, path, head, send)
        except Refusal as refusal:
            await self._refuse(request, refusal, dialect, send)
        except Gone:
            self.traffic.settle(request, CLIENT_LEFT, "cancelled")
        except asyncio.CancelledError:
            await self._stopped(request, dialect, send)
        except Exception:
            log.exception("request %s ended by a bug of the gate", request.request_id)
            broken = Refusal(
                500,
                "The gateway failed because of an internal error. Retry the request; if it fails "
                f"again, report the request id {request.request_id}.",
                reason="internal_error",
            )
            await self._refuse(request, broken, dialect, send, outcome="failed")
        finally:
            request.engine.disconnect()
            self.traffic.drop_body(request)
            self.traffic.requests.pop(request.request_id, None)
            if not request.settled:
                self.traffic.settle(request, CLIENT_LEFT, "cancelled")

    async def _admit(
        self,
        request: Request,
        endpoint: Endpoint,
        headers: list[tuple[bytes, bytes]],
        receive: Receive,
        send: Send,
    ) -> Exchange:
        """Read a request and decide where it goes. Its body is kept once, by the request."""
        head = Head(headers)
        key = self._authenticate(request, head)
        body = await self._read_request(request, head, receive)
        payload: dict[str, Any] = {}
        if endpoint.body == "json":
            payload = payload_of(body)
            name = payload.get("model")
            request.response.streamed = endpoint.streams and payload.get("stream") is True
        else:
            name = model_of_form(body)
        route = self._route(request, endpoint, key, name)
        if key.endpoints and endpoint.name not in key.endpoints:
            raise Refusal(
                403,
                f"This API key may not use the endpoint `{endpoint.name}`. "
                "Use a key that may, or ask for access.",
                reason="endpoint_not_allowed",
            )
        request.body.parts, hide_usage = (b"", body), False
        if request.response.streamed and endpoint.asks_usage:
            request.body.parts, hide_usage = with_usage(body, payload)
        answers = request.answers = answers_asked(endpoint, route, payload)
        return Exchange(
            request=request,
            endpoint=endpoint,
            key=key,
            route=route,
            hide_usage=hide_usage,
            reports=answers if route.answers.usage_of_one else 1,
            tokens=worst_case(endpoint, route, request.body.size_bytes, payload, answers),
            passed_on=head.passed_on,
            send=send,
        )

    def _authenticate(self, request: Request, head: Head) -> KeyRecord:
        request.wait_for_body()
        if head.size > HEADER_LIMIT_BYTES:
            raise Refusal(
                431,
                f"The request headers are larger than {HEADER_LIMIT_BYTES // 1024} KiB. "
                "Send fewer or shorter headers.",
                reason="headers_too_large",
            )
        key = self.traffic.keys.check(head.key_text)
        request.key = key
        request.task = asyncio.current_task(self._loop)
        self.traffic.requests[request.request_id] = request
        return key

    async def _read_request(
        self, request: Request, head: Head, receive: Receive
    ) -> bytes | bytearray:
        """The body, whole."""
        limit = self.settings.body_limit_bytes
        request.client_request_id = head.client_id
        if head.body_bytes > limit:
            raise too_large(limit)
        if head.packed:
            raise Refusal(
                415,
                "Content-Encoding is not supported in requests. Send the body uncompressed.",
                reason="content_encoding",
            )
        body = await self._read_body(request, receive, limit)
        request.receive = receive
        request.deadline = request.started + self.settings.request_timeout_s
        return body

    async def _read_body(self, request: Request, receive: Receive, limit: int) -> bytes | bytearray:
        """The whole body; `Gone` when the client leaves, `Refusal` when it is too large."""
        whole: bytes | bytearray = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part: bytes = message.get("body", b"")
            self.traffic.hold_body(request, len(part))
            if request.body.size_bytes > limit:
                raise too_large(limit)
            if self.traffic.body_bytes > limit * BODIES_AT_ONCE:
                raise Refusal(
                    503,
                    "The gateway holds too many large requests. Retry in 5 seconds.",
                    reason="overloaded",
                    retry_after_s=5,
                )
            if not whole:
                whole = part
            elif isinstance(whole, bytes):
                whole = bytearray(whole) + part
            else:
                whole += part
            if not message.get("more_body"):
                return whole
            request.wait_for_body()

    def _route(self, request: Request, endpoint: Endpoint, key: KeyRecord, name: object) -> Route:
        """The route of a model name, as far as the key may know."""
        if name is None and not endpoint.needs_model:
            usable = self.traffic.usable(key)
            name = usable[0].public_name if len(usable) == 1 else None
        if not isinstance(name, str) or not name:
            raise Refusal(
                400, "You must provide a model parameter.", reason="missing_model", param="model"
            )
        request.model = name
        route = self.traffic.snapshot.routes.get(name)
        if route is None and key.trials:
            route = self.traffic.snapshot.trials.get(name)
        if route is None or (key.deployments and route.deployment not in key.deployments):
            raise no_model(name)
        request.lead_to(route)
        if not route.is_served:
            raise not_served(name)
        return route

    # everything else

    async def _answer_otherwise(
        self, request: Request, scope: Message, path: bytes, head: Head, send: Send
    ) -> None:
        """The models, the gate's health, or the refusal of everything else."""
        method: str = scope["method"]
        if path == HEALTH and method in ("GET", "HEAD"):
            ready = self.traffic.ready
            body = b'{"status":"ok"}' if ready else b'{"status":"unavailable"}'
            self.traffic.settle(request, 200 if ready else 503, "ok")
            await self._send_whole(send, 200 if ready else 503, body, [_JSON])
            return
        about_models = path == MODELS or (path.startswith(MODEL) and len(path) > len(MODEL))
        if not about_models or method not in ("GET", "HEAD"):
            offered = next((v for n, v in scope["headers"] if n == b"upgrade"), b"")
            raise refusal_of_address(request.path, path, method, offered, about_models=about_models)
        key = self.traffic.keys.check(head.key_text)
        request.key = key
        usable = {r.public_name: r for r in self.traffic.usable(key, trials=True)}
        if path == MODELS:
            body = orjson.dumps(model_list(usable.values(), anthropic=head.is_anthropic))
        else:
            name = unquote(path[len(MODEL) :].decode("latin-1"))
            request.model = name
            if name not in usable:
                raise no_model(name)
            body = orjson.dumps(model_card(usable[name], anthropic=head.is_anthropic))
        self.traffic.settle(request, 200, "ok")
        await self._send_whole(send, 200, body, [_JSON, *self.traffic.generation_headers(request)])

    # ends of requests

    async def _refuse(
        self,
        request: Request,
        refusal: Refusal,
        dialect: Dialect,
        send: Send,
        outcome: Outcome | None = None,
    ) -> None:
        """Send an error, as a response or inside the stream that has begun."""
        if outcome is None:
            outcome = "failed" if refusal.status >= 500 else "refused"  # noqa: PLR2004
        name = request.route.deployment if request.route else ""
        reason = refusal.reason or f"engine_{refusal.status}"
        refused = self.traffic.metrics.refusals
        refused[name, reason] = refused.get((name, reason), 0) + 1
        self.traffic.settle(request, refusal.status, outcome)
        if request.response.head_sent:
            event = refusal.event(dialect, request.request_id)
            await send({"type": "http.response.body", "body": event, "more_body": False})
            return
        headers = [_JSON, *self.traffic.generation_headers(request), *refusal.headers]
        if refusal.retry_after_s is not None:
            headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
        if refusal.status == 401:  # noqa: PLR2004
            headers.append((b"www-authenticate", b"Bearer"))
        body = refusal.body(dialect, request.request_id)
        await self._send_whole(send, refusal.status, body, headers)

    async def _stopped(self, request: Request, dialect: Dialect, send: Send) -> None:
        """The task was cancelled: by `Request.stop`, or because the server stops."""
        request.engine.disconnect()
        why = request.stopped
        if why is None:  # the event loop ends: nothing can be sent any more
            self.traffic.settle(request, CLIENT_LEFT, "failed")
            raise asyncio.CancelledError
        if request.task is not None:
            request.task.uncancel()
        if why is Stop.GONE:
            self.traffic.settle(request, CLIENT_LEFT, "cancelled")
            return
        if why is Stop.STOPPING:
            ending = Refusal(
                503,
                "The gateway is stopping. Retry in 5 seconds.",
                reason="stopping",
                retry_after_s=5,
            )
        elif why is Stop.REVOKED:
            record = self.traffic.snapshot.keys.get(request.key.key_id) if request.key else None
            ending = ended_key(record.state if record else "revoked")
        elif why is Stop.CLOSED:
            ending = not_served(request.model)
        elif request.receive is None:
            ending = Refusal(
                408,
                "The request body stopped arriving. Send the request again.",
                reason="body_timeout",
            )
            ending.headers.append((b"connection", b"close"))
        elif request.entry.waiting:
            ending = Refusal(
                503,
                "The request waited too long in the queue. Retry in 10 seconds.",
                reason="queue_timeout",
                retry_after_s=10,
            )
        else:
            ending = Refusal(
                504,
                "The engine took too long. Ask for a shorter answer.",
                reason="deadline_exceeded",
            )
        outcome: Outcome | None = "cancelled" if why is Stop.REVOKED else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._refuse(request, ending, dialect, send, outcome)

    async def _send_whole(
        self, send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
