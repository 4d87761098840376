"""The stream that an open page listens to: what changed, and the log lines of what it watches.

However many pages show the same to people with the same rights, it is asked of the database, drawn
and encoded once; each is sent what it has not been sent yet. What is sent belongs to nobody: a
form's safety token is put in by the page itself.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

from asgiref.sync import sync_to_async
from django.db import close_old_connections
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    QueryDict,
    StreamingHttpResponse,
)
from django.urls import Resolver404, ResolverMatch, resolve
from django.utils import timezone
from django.utils.html import format_html

from deployments import models, queries
from deployments.broker.feed import SESSION
from deployments.models import BuildStep, LogChunk, User
from deployments.panel import live
from deployments.panel.admission import let_go
from deployments.panel.fragments import TOKEN, Once
from deployments.templatetags.mm import ansi
from deployments.views.page import number_of

P = ParamSpec("P")
T = TypeVar("T")

HEARTBEAT_S = 15.0
LOOK_AGAIN_S = 5.0
"""What nobody announces (speed, queue, memory) is looked at again this often."""
STILL_HERE_S = 30.0
CHUNKS_AT_ONCE = 500
MOST_PARTS = 8
CLOCK = re.compile(r"(<time[^>]*>)[^<]*")
"""How long ago something was is counted on by the browser: it is not sent."""
ASK_AGAIN = frozenset({SESSION, "tick"})
"""Kinds after which a stream looks whether its login is still there."""
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


class Part(NamedTuple):
    """A fragment as every page with the same rights is sent it."""

    name: str
    mark: int
    """The same while it looks the same."""
    message: bytes


class Lines(NamedTuple):
    """Log lines as every page that has the log as far is sent them."""

    last: int
    whole: bool
    """False when there are more."""
    message: bytes


@dataclass
class Shown:
    """The fragments of a page that are kept up to date, and what was sent of each."""

    request: HttpRequest
    match: ResolverMatch
    parts: list[str]
    sent: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, request: HttpRequest) -> Shown | None:
        """From the stream's address: `page` and `parts`; None when it names none of our pages."""
        page = urlsplit(request.GET.get("page", ""))
        parts = [part for part in request.GET.get("parts", "").split(",") if part]
        try:
            match = resolve(page.path)
        except Resolver404:
            return None
        if not parts or not getattr(match.func, "has_parts", False):
            return None
        asked = copy(request)
        asked.method, asked.path, asked.path_info = "GET", page.path, page.path
        asked.GET = QueryDict(page.query)
        return cls(asked, match, parts[:MOST_PARTS])

    async def news(self, user: User) -> list[bytes]:
        """Messages of the fragments that are not as they were sent."""
        self.request.user = user
        where = (self.request.path, self.request.GET.urlencode(), *self.parts)
        drawn = await _once.get((*_rights(user), *where), lambda: _off_loop(self.draw))
        fresh = [part for part in drawn if self.sent.get(part.name) != part.mark]
        self.sent |= {part.name: part.mark for part in fresh}
        return [part.message for part in fresh]

    def draw(self) -> list[Part]:
        """The fragments as they are now, without those that cannot be shown."""
        drawn = []
        for name in self.parts:
            asked = copy(self.request)
            query = self.request.GET.copy()
            query["part"] = name
            asked.GET = query  # type: ignore[assignment]
            asked.META = {**self.request.META, "QUERY_STRING": query.urlencode()}
            answer: HttpResponse = self.match.func(asked, *self.match.args, **self.match.kwargs)
            if answer.status_code != 200:  # noqa: PLR2004
                continue
            html = TOKEN.sub(r"\1\2", answer.content.decode())
            message = live.message("fragment", html)
            drawn.append(Part(name, hash(CLOCK.sub(r"\1", html)), message))
        return drawn


_once = Once()


def _rights(user: User) -> tuple[object, ...]:
    """People who may see the same are sent the same."""
    return (user.role, user.is_superuser)


async def stream(request: HttpRequest) -> HttpResponseBase:
    """Server-sent events for one page.

    `fragment` (HTML of a part that is not as it was), `change` (kinds, for pages that name no
    parts), `log` (lines), `bye` (logged out).
    """
    user = await request.auser()
    if not isinstance(user, User) or not user.is_active:
        return HttpResponse(status=204)  # tells the browser not to try again
    request.user = user
    topics = [topic for topic in request.GET.get("on", "*").split(",") if topic][:20]
    watch = Watch(
        number_of(request.GET.get("build"), default=0),
        number_of(request.GET.get("activation"), default=0),
        number_of(request.GET.get("after"), default=0),
    )
    key = request.session.session_key or ""
    await let_go(request)  # the page may stay open for hours
    events = _events(Session(user, key), topics, watch, Shown.of(request))
    answer = StreamingHttpResponse(events, content_type="text/event-stream")
    answer["Cache-Control"] = "no-store"
    answer["X-Accel-Buffering"] = "no"
    return answer


class Session(NamedTuple):
    """Whose page it is, and by which login."""

    user: User
    key: str

    def still(self) -> User | None:
        """The person as they are now; None when the login has ended or they are deactivated."""
        alive = models.Session.objects.filter(
            session_key=self.key, user_id=self.user.pk, expire_date__gt=timezone.now()
        )
        return User.objects.filter(pk=self.user.pk, is_active=True).first() if alive else None


async def _events(
    session: Session, topics: list[str], watch: Watch, shown: Shown | None
) -> AsyncIterator[bytes]:
    user = session.user
    hub = live.hub()
    looked = time.monotonic()
    async with hub.listening([*topics, live.sessions_of(user.pk)]) as listener:
        yield b"retry: 2000\n\n"
        async for lines in _lines(user, watch):
            yield lines
        while True:
            kinds = await listener.next(HEARTBEAT_S if shown is None else LOOK_AGAIN_S)
            if kinds & ASK_AGAIN or time.monotonic() - looked > STILL_HERE_S:
                looked = time.monotonic()
                again = await _off_loop(session.still)
                if again is None:
                    yield live.message("bye", None)
                    return
                user = again
            if news := [text async for text in _news(user, watch, shown, kinds - {SESSION})]:
                yield b"".join(news)  # one write a page: there may be hundreds
            await asyncio.sleep(hub.window_s)


async def _news(
    user: User, watch: Watch, shown: Shown | None, kinds: frozenset[str]
) -> AsyncIterator[bytes]:
    """What the page is told after these kinds of events; after silence, that we are here."""
    if not kinds:
        yield b": still here\n\n"
    if kinds & LOG_KINDS:
        async for lines in _lines(user, watch):
            yield lines
    if shown is not None and kinds != {"log"}:
        for message in await shown.news(user):
            yield message
    elif changed := sorted(kinds - {"log"}):
        yield live.message("change", changed)


async def _lines(user: User, watch: Watch) -> AsyncIterator[bytes]:
    """The log lines that the page does not have yet."""
    while watch.on:
        which = (watch.build_id, watch.activation_id, watch.last)
        lines = await _once.get((*_rights(user), *which), lambda: _off_loop(_after, user, watch))
        if lines.message:
            watch.last = lines.last
            yield lines.message
        if lines.whole:
            return


def _after(user: User, watch: Watch) -> Lines:
    chunks = queries.build_log(
        user,
        build_id=watch.build_id,
        activation_id=0 if watch.build_id else watch.activation_id,
        after_id=watch.last,
        limit=CHUNKS_AT_ONCE,
    )
    if not chunks:
        return Lines(watch.last, whole=True, message=b"")
    last = chunks[-1].pk
    # one message, however many there are: a page is laid out again for each
    html = "".join(_headed(chunks, watch.last))
    message = live.message("log", {"id": last, "html": html})
    return Lines(last, whole=len(chunks) < CHUNKS_AT_ONCE, message=message)


def _headed(chunks: list[LogChunk], after: int) -> Iterator[str]:
    """The lines as HTML, with a step's name where its lines begin, as the page itself has it."""
    before = LogChunk.objects.filter(pk=after).values_list("step_id", flat=True).first()
    whose = {chunk.step_id for chunk in chunks if chunk.step_id is not None}
    steps = BuildStep.objects.filter(pk__in=whose)
    names = dict(steps.values_list("pk", "name")) if whose - {before} else {}
    for chunk in chunks:
        if chunk.step_id != before and (name := names.get(chunk.step_id or 0)):
            yield format_html('<div class="from">{}</div>', name)
        before = chunk.step_id
        yield ansi(chunk.text)


async def _off_loop(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Ask the database in a thread of the pool, whose connections are shared by all streams."""

    def asked() -> T:
        close_old_connections()
        return act(*args, **kwargs)

    return await sync_to_async(asked, thread_sensitive=False)()
