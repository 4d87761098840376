"""The stream that an open page listens to: what changed, and the log lines of what it watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.template.loader import render_to_string

from deployments import live, queries
from deployments.models import LogChunk, User
from deployments.views.page import number_of

P = ParamSpec("P")
T = TypeVar("T")

HEARTBEAT_S = 15.0
STILL_HERE_S = 30.0
CHUNKS_AT_ONCE = 500
LOG_KINDS = frozenset({"log", "tick", "step", "build", "activation"})


@dataclass
class Watch:
    """Whose log a page shows, and how far it has it."""

    build_id: int
    activation_id: int
    last: int

    @property
    def on(self) -> bool:
        """True when the page shows a log."""
        return bool(self.build_id or self.activation_id)


async def stream(request: HttpRequest) -> HttpResponseBase:
    """Server-sent events for one page: `change` (kinds), `log` (lines), `bye` (logged out)."""
    user = await request.auser()
    if not isinstance(user, User) or not user.is_active:
        return HttpResponse(status=204)  # tells the browser not to try again
    topics = [topic for topic in request.GET.get("on", "*").split(",") if topic][:20]
    watch = Watch(
        number_of(request.GET.get("build"), default=0),
        number_of(request.GET.get("activation"), default=0),
        number_of(request.GET.get("after"), default=0),
    )
    # This page may stay open for hours: it must not keep a database connection for itself.
    await sync_to_async(connections.close_all)()
    answer = StreamingHttpResponse(_events(user, topics, watch), content_type="text/event-stream")
    answer["Cache-Control"] = "no-store"
    answer["X-Accel-Buffering"] = "no"
    return answer


async def _events(user: User, topics: list[str], watch: Watch) -> AsyncIterator[bytes]:
    hub = live.hub()
    looked = time.monotonic()
    async with hub.listening(topics) as listener:
        yield b"retry: 2000\n\n"
        async for lines in _lines(user, watch):
            yield lines
        while True:
            kinds = await listener.next(HEARTBEAT_S)
            if time.monotonic() - looked > STILL_HERE_S:
                looked = time.monotonic()
                if not await _off_loop(_still_here, user.pk):
                    yield live.message("bye", None)
                    return
            if not kinds:
                yield b": still here\n\n"
                continue
            if kinds & LOG_KINDS:
                async for lines in _lines(user, watch):
                    yield lines
            if changed := sorted(kinds - {"log"}):
                yield live.message("change", changed)
            await asyncio.sleep(hub.window_s)


async def _lines(user: User, watch: Watch) -> AsyncIterator[bytes]:
    """The log lines that the page does not have yet."""
    while watch.on:
        chunks = await _off_loop(_chunks, user, watch)
        for chunk in chunks:
            watch.last = chunk.pk
            html = render_to_string("_log_lines.html", {"text": chunk.text})
            yield live.message("log", {"id": chunk.pk, "html": html})
        if len(chunks) < CHUNKS_AT_ONCE:
            return


def _chunks(user: User, watch: Watch) -> list[LogChunk]:
    return queries.build_log(
        user,
        build_id=watch.build_id,
        activation_id=0 if watch.build_id else watch.activation_id,
        after_id=watch.last,
        limit=CHUNKS_AT_ONCE,
    )


def _still_here(user_id: int) -> bool:
    return User.objects.filter(pk=user_id, is_active=True).exists()


async def _off_loop(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Ask the database in a thread of the pool, whose connections are shared by all streams."""

    def asked() -> T:
        close_old_connections()
        return act(*args, **kwargs)

    return await sync_to_async(asked, thread_sensitive=False)()
