"""Limits how many requests the panel processes at once; the others wait.

When a panel comes back, every page that was open asks again in the same moment. Each request in
work has a thread and a database connection of its own, and a PostgreSQL server has a hundred for
everybody: without a limit, a burst of open pages is answered with errors.

A turn begins when the request has been read whole, so that slow senders hold none, and ends when
its answer begins, so that streams hold none. A view that waits for something else than the
database lets go of it before (`let_go`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpRequest

AT_ONCE = 16
"""More would share one processor, and wait there."""
TURN = "mmadmin.turn"

Scope = dict[str, Any]
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Turn:
    """One request's."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._holds = False

    async def begin(self) -> None:
        """Wait for it."""
        await self._free.acquire()
        self._holds = True

    def end(self) -> None:
        """Let the next one begin; nothing to do when it has ended, or never began."""
        if self._holds:
            self._holds = False
            self._free.release()


class InTurn:
    """An ASGI application with a limit on concurrent requests."""

    def __init__(self, app: App, at_once: int = AT_ONCE) -> None:
        self._app = app
        self._free = asyncio.Semaphore(at_once)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application once it is the request's turn."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        turn = scope[TURN] = Turn(self._free)

        async def read() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                await turn.begin()
            return message

        async def answer(message: Message) -> None:
            turn.end()
            await send(message)

        try:
            await self._app(scope, read, answer)
        finally:
            turn.end()


async def let_go(request: HttpRequest) -> None:
    """From here on the request needs neither its turn nor its database connection."""
    await sync_to_async(connections.close_all)()
    turn = getattr(request, "scope", {}).get(TURN)
    if turn is not None:
        turn.end()
