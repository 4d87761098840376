"""Fragments are shared between open pages, and never a stale or a foreign one."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable

import pytest
from django.contrib.auth.models import AnonymousUser
from django.http import HttpResponse, HttpResponseBase
from django.test import RequestFactory

from deployments.models import User
from deployments.panel import fragments as shared
from deployments.panel import live

FORM = '<input type="hidden" name="csrfmiddlewaretoken" value="somebody-else-s">'


PATIENCE_S = 60


@pytest.fixture(autouse=True)
def nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with nothing made; a moment is long, however busy the machine is."""
    shared._made.clear()
    monkeypatch.setattr(shared, "FRESH_S", 3600.0)


class Counted:
    """A view that counts how often it is asked."""

    def __init__(self, text: str = "text") -> None:
        self.text = text
        self.times = 0

    def __call__(self) -> HttpResponse:
        """Answer."""
        self.times += 1
        return HttpResponse(self.text)


def ask(
    view: Callable[[], HttpResponseBase], *, role: str = "viewer", path: str = "/?part=a"
) -> str:
    """What a person with this role is answered."""
    request = RequestFactory().get(path)
    request.user = User(username="x", role=role)
    answer = shared.fragment(request, view)
    assert isinstance(answer, HttpResponse)
    return answer.content.decode()


def test_one_answer_serves_many() -> None:
    """Ten pages ask, one answer is made."""
    view = Counted()
    assert [ask(view) for _ in range(10)] == ["text"] * 10
    assert view.times == 1


def test_after_an_event_it_is_made_anew() -> None:
    """Nothing that was made before an event is served after it."""
    view = Counted("before")
    ask(view)
    live.Hub().tell({"kind": "build", "id": 1})
    view.text = "after"
    assert ask(view) == "after"


def test_roles_and_addresses_are_kept_apart() -> None:
    """What an operator sees is not served to a viewer."""
    view = Counted("with buttons")
    ask(view, role="operator")
    view.text = "without"
    assert ask(view, role="viewer") == "without"
    view.text = "another page"
    assert ask(view, path="/?part=b") == "another page"


def test_the_safety_token_is_one_s_own() -> None:
    """A shared form carries the token of who asks."""
    view = Counted(FORM)
    ask(view)
    own = re.search(r'value="([^"]+)"', ask(view))
    assert own is not None
    assert own[1] != "somebody-else-s"
    assert len(own[1]) == 64


def test_those_who_wait_get_the_first_one_s_answer() -> None:
    """While one is being made the others wait for it instead of making theirs."""
    begun, go_on = threading.Event(), threading.Event()
    view = Counted()

    def slow() -> HttpResponse:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return view()

    threads = [threading.Thread(target=ask, args=(slow,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert begun.wait(PATIENCE_S)
    go_on.set()
    for thread in threads:
        thread.join()
    assert view.times == 1


def test_whole_pages_and_strangers_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only fragments, only for people who are known; and only for a moment."""
    view = Counted()
    ask(view, path="/")
    ask(view, path="/")
    assert view.times == 2
    request = RequestFactory().get("/?part=a")
    request.user = AnonymousUser()
    shared.fragment(request, view)
    shared.fragment(request, view)
    assert view.times == 4
    ask(view)
    later = time.monotonic() + shared.FRESH_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    ask(view)
    assert view.times == 6


async def test_what_is_asked_for_at_once_is_made_once() -> None:
    """Ten tasks ask, one is made; after an event, and for another key, it is made anew."""
    once, times = shared.Once(), list[str]()

    async def make(word: str) -> str:
        times.append(word)
        await asyncio.sleep(0)
        return word

    asked = [once.get("a", lambda: make("one")) for _ in range(10)]
    assert await asyncio.gather(*asked) == ["one"] * 10
    assert times == ["one"]
    assert await once.get("b", lambda: make("two")) == "two"
    live.Hub().tell({"kind": "build", "id": 1})
    assert await once.get("a", lambda: make("three")) == "three"


async def test_who_goes_away_takes_nothing_from_the_others() -> None:
    """The first page to ask is closed while it is made: those who wait get it all the same."""
    once, go_on, begun = shared.Once(), asyncio.Event(), asyncio.Event()

    async def make() -> str:
        begun.set()
        await go_on.wait()
        return "made"

    first = asyncio.create_task(once.get("a", make))
    await begun.wait()
    second = asyncio.create_task(once.get("a", make))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go_on.set()
    assert await second == "made"
