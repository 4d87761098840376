"""What many open pages want at the same moment is made once.

When something changes, every page that shows it is told the same. The first answer serves the
others, until the next event (`live.epoch`) or for a moment. What differs from person to person is
only what their role lets them see, and the forms' safety token.

Streams of one event loop share by `Once`; pages that ask for a fragment themselves by `fragment`.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.middleware.csrf import get_token

from deployments.models import User
from deployments.panel import live

T = TypeVar("T")

FRESH_S = 0.4
MOST = 256
TOKEN = re.compile(r'(name="csrfmiddlewaretoken" value=")[^"]*(")')


@dataclass(frozen=True, slots=True)
class Making:
    """Something that is being made, or was just now."""

    epoch: int
    at: float
    task: asyncio.Task[Any]

    @property
    def serves(self) -> bool:
        """True while nothing can have changed since it was begun, as far as anybody said."""
        young = not self.task.done() or time.monotonic() - self.at < FRESH_S
        return self.epoch == live.epoch() and young


class Once:
    """What many tasks of an event loop ask for at the same moment is made for the first of them."""

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, OrderedDict[Hashable, Making]] = (
            WeakKeyDictionary()
        )

    async def get(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `make` returned to whoever asked first; raises what it raised.

        It is made to its end even when the first to ask goes away.
        """
        known = self._loops.setdefault(asyncio.get_running_loop(), OrderedDict())
        found = known.get(key)
        if found is None or not found.serves:
            task = asyncio.create_task(make())
            found = known[key] = Making(live.epoch(), time.monotonic(), task)
        known.move_to_end(key)
        while len(known) > MOST:
            known.popitem(last=False)
        made: T = await asyncio.shield(found.task)
        return made


@dataclass
class Made:
    """One fragment: whoever finds it empty makes it while the others wait."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = 0.0
    text: str | None = None


_made: OrderedDict[tuple[object, ...], Made] = OrderedDict()
_guard = threading.Lock()


def fragment(request: HttpRequest, view: Callable[[], HttpResponseBase]) -> HttpResponseBase:
    """The view's answer, or one that another page was given just now."""
    me = request.user
    if request.method != "GET" or not request.GET.get("part") or not isinstance(me, User):
        return view()
    key = (live.epoch(), request.get_full_path(), me.role, me.is_superuser)
    with _guard:
        made = _made.setdefault(key, Made())
        _made.move_to_end(key)
        while len(_made) > MOST:
            _made.popitem(last=False)
    with made.lock:
        if made.text is None or time.monotonic() - made.at > FRESH_S:
            begun = time.monotonic()
            answer = view()
            if answer.status_code != 200 or not isinstance(answer, HttpResponse):  # noqa: PLR2004
                return answer
            made.at, made.text = begun, answer.content.decode()
            return answer
        text = made.text
    if "csrfmiddlewaretoken" in text:
        text = TOKEN.sub(rf"\g<1>{get_token(request)}\g<2>", text)
    shared = HttpResponse(text)
    shared["Cache-Control"] = "no-store"
    return shared
