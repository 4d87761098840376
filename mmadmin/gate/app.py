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
from mmadmin.gate.endpoints import MODEL, MODELS, POSTS, Endpoint
from mmadmin.gate.intake import Head, model_card, model_of_form, payload_of, too_large
from mmadmin.gate.limits import Limiter
from mmadmin.gate.refusal import Dialect, Refusal, no_model, not_served, wrong_key
from mmadmin.gate.relay import Exchange, Relay
from mmadmin.gate.request import Request, Stop
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
                await self._serve(request, endpoint, scope["headers"], receive, send)
            else:
                await self._answer_about_models(request, scope, path, send)
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
            request.forget_connection()
            self.traffic.body_bytes -= request.body_bytes
            self.traffic.requests.pop(request.request_id, None)
            if not request.settled:
                self.traffic.settle(request, CLIENT_LEFT, "cancelled")

    async def _serve(
        self,
        request: Request,
        endpoint: Endpoint,
        headers: list[tuple[bytes, bytes]],
        receive: Receive,
        send: Send,
    ) -> None:
        head = Head(headers)
        key = self._authenticate(request, head)
        body = await self._read_request(request, head, receive)
        payload: dict[str, Any] = {}
        if endpoint.body == "json":
            payload = payload_of(body)
            name = payload.get("model")
            request.streamed = endpoint.streams and payload.get("stream") is True
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
        await self._relay.serve(
            Exchange(
                request=request,
                endpoint=endpoint,
                key=key,
                route=route,
                body=body,
                payload=payload,
                passed_on=head.passed_on,
                send=send,
            )
        )

    def _authenticate(self, request: Request, head: Head) -> KeyRecord:
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
        request.deadline = request.started + self.settings.request_timeout_s
        return key

    async def _read_request(self, request: Request, head: Head, receive: Receive) -> bytes:
        """The body, whole."""
        limit = self.settings.body_limit_bytes
        request.client_request_id = head.client_id
        if head.body_bytes > limit:
            raise too_large(limit)
        if head.packed:
            raise Refusal(
                415,
                "Content-Encoding is not supported in requests. Send the body uncompressed.",
            )
        body = await self._read_body(request, receive, limit)
        request.receive = receive
        return body

    async def _read_body(self, request: Request, receive: Receive, limit: int) -> bytes:
        """The whole body; `Gone` when the client leaves, `Refusal` when it is too large."""
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            parts.append(part)
            request.body_bytes += len(part)
            self.traffic.body_bytes += len(part)
            if request.body_bytes > limit:
                raise too_large(limit)
            if self.traffic.body_bytes > limit * BODIES_AT_ONCE:
                raise Refusal(
                    503,
                    "The gateway holds too many large requests. Retry in 5 seconds.",
                    reason="overloaded",
                    retry_after_s=5,
                )
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

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

    # models

    async def _answer_about_models(
        self, request: Request, scope: Message, path: bytes, send: Send
    ) -> None:
        """`/v1/models`, one model, or the refusal of everything else."""
        about_models = path == MODELS or (path.startswith(MODEL) and len(path) > len(MODEL))
        if not about_models or scope["method"] not in ("GET", "HEAD"):
            allowed = b"POST" if path in POSTS else b"GET, HEAD" if about_models else b""
            if allowed:
                refusal = Refusal(
                    405,
                    f"This URL does not allow {scope['method'][:16]}. Use {allowed.decode()}.",
                    reason="method_not_allowed",
                )
                refusal.headers.append((b"allow", allowed))
                raise refusal
            raise Refusal(
                404,
                "Unknown URL. The API is under `/v1`, for example `/v1/chat/completions`.",
                reason="unknown_url",
            )
        key = self.traffic.keys.check(Head(scope["headers"]).key_text)
        request.key = key
        usable = {r.public_name: model_card(r) for r in self.traffic.usable(key, trials=True)}
        if path == MODELS:
            body = orjson.dumps({"object": "list", "data": list(usable.values())})
        else:
            name = unquote(path[len(MODEL) :].decode("latin-1"))
            request.model = name
            if name not in usable:
                raise no_model(name)
            body = orjson.dumps(usable[name])
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
        reason = refusal.reason or str(refusal.status)
        self.traffic.metrics.refusals[reason] = self.traffic.metrics.refusals.get(reason, 0) + 1
        if reason == "template_refused" and request.route is not None:
            name = request.route.deployment
            refused = self.traffic.metrics.template_refusals
            refused[name] = refused.get(name, 0) + 1
        self.traffic.settle(request, refusal.status, outcome)
        if request.head_sent:
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
        request.forget_connection()
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
            ending = wrong_key()
        elif why is Stop.CLOSED:
            ending = not_served(request.model)
        elif request.waiting:
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
