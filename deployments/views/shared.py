"""Fragments that many open pages ask for at the same moment are made once.

When something changes, every page that shows it is told, and all of them ask for the same fragment.
The first answer serves the others, until the next event (`live.epoch`) or for a moment. What
differs from person to person is only what their role lets them see, and the forms' safety token.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.middleware.csrf import get_token

from deployments import live
from deployments.models import User

FRESH_S = 0.4
MOST = 256
TOKEN = re.compile(r'(name="csrfmiddlewaretoken" value=")[^"]*(")')


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
