"""Pages of other origins may call the gate: only those that `MM_GATE_CORS_ORIGINS` lists.

A browser asks first (a preflight) and shows a page an answer only when the answer allows it
(https://fetch.spec.whatwg.org/#http-cors-protocol). A page has no key unless its user gave it one,
so no credentials of the browser are allowed, and origins are compared whole.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

MAX_AGE_S = 600
"""How long a browser may remember a preflight."""
_SHOWN = (
    b"retry-after, x-request-id, x-mm-generation, x-mm-queue-position, x-mm-queue-ms, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, "
    b"x-ratelimit-remaining-tokens-day, x-ratelimit-remaining-tokens-month"
)
"""Response headers that a page may read."""


class Cors:
    """An ASGI application around the gate."""

    def __init__(self, app: Any, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        headers = dict(scope.get("headers", ()))
        origin = headers.get(b"origin")
        if (origin not in self._origins and b"*" not in self._origins) or origin is None:
            await self._app(scope, receive, send)
            return
        allowed = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            allowed += [
                (b"access-control-allow-methods", b"GET, HEAD, POST"),
                (
                    b"access-control-allow-headers",
                    headers.get(b"access-control-request-headers", b"*"),
                ),
                (b"access-control-max-age", str(MAX_AGE_S).encode()),
                (b"content-length", b"0"),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": allowed})
            await send({"type": "http.response.body", "body": b""})
            return
        allowed.append((b"access-control-expose-headers", _SHOWN))

        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *allowed]
            await send(message)

        await self._app(scope, receive, marked)
