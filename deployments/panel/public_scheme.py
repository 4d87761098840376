"""Requests to the public origin have its scheme: TLS may end at a proxy in front.

By configuration, not by a header that anybody can send.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from deployments.panel.admission import App, Receive, Scope, Send


class PublicScheme:
    """An ASGI application behind a proxy that speaks TLS."""

    def __init__(self, app: App, origin: str) -> None:
        self._app = app
        parts = urlsplit(origin)
        self._scheme, self._host = parts.scheme, parts.netloc.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] == "http" and self._host:
            hosts = [value.lower() for name, value in scope["headers"] if name == b"host"]
            if hosts == [self._host]:
                scope = {**scope, "scheme": self._scheme}
        await self._app(scope, receive, send)
