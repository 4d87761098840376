"""What the stream of an open page sends: its own fragments, to who may see them, when they change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from asgiref.sync import sync_to_async
from django.http import HttpRequest, StreamingHttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.utils import timezone

from deployments import actions, views
from deployments.models import Build, BuildStep, LogChunk, Session, User
from deployments.panel import fragments as shared
from deployments.panel import live
from deployments.views.stream import CHUNKS_AT_ONCE, Part, Shown, Watch, _headed, _lines
from tests.deployments.processes import PATIENCE_S
from tests.panel import seed

NAME = "mistral-medium-3.5"


def asked(user: User, page: str, parts: str) -> HttpRequest:
    """The stream's request of an open page."""
    request = RequestFactory().get("/events/", {"page": page, "parts": parts})
    request.user = user
    return request


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    """Each test begins with nothing shared."""
    shared._made.clear()


def drawn(user: User, page: str, parts: str) -> dict[str, Part]:
    """The page's fragments as this person's stream would send them now."""
    shown = Shown.of(asked(user, page, parts))
    assert shown is not None
    return {part.name: part for part in shown.draw()}


def text_of(message: bytes) -> str:
    """The markup that an event carries, without its template's line breaks."""
    sent: str = json.loads(message.split(b"data: ")[1])
    return " ".join(sent.split())


def test_a_fragment_is_news_when_it_is_not_as_it_was(team: dict[str, User]) -> None:
    """Its mark changes with what it shows; clocks that went on are no news."""
    page = f"/builds/{Build.objects.get(state='running').pk}/"
    before = drawn(team["vera"], page, "steps")["steps"]
    assert b'id=\\"steps\\"' in before.message
    live.Hub().tell({"kind": "tick"})
    assert drawn(team["vera"], page, "steps")["steps"].mark == before.mark
    BuildStep.objects.filter(build__state="running", state="running").update(progress_done=400)
    live.Hub().tell({"kind": "step"})
    after = drawn(team["vera"], page, "steps")["steps"]
    assert after.mark != before.mark
    assert "400 of 412" in text_of(after.message)


def test_nobody_is_sent_what_they_may_not_see(team: dict[str, User]) -> None:
    """The page's own checks hold: a viewer's stream has no keys."""
    assert drawn(team["otto"], "/keys/", "rows")
    assert not drawn(team["vera"], "/keys/", "rows")


def test_what_is_sent_to_many_has_nobody_s_safety_token(team: dict[str, User]) -> None:
    """Forms are sent with an empty one: the page puts its own in."""
    message = drawn(team["otto"], "/store/", "tasks")["tasks"].message
    assert b"csrfmiddlewaretoken" in message
    assert b'csrfmiddlewaretoken\\" value=\\"\\"' in message


@pytest.mark.django_db(transaction=True)
async def test_many_pages_are_told_what_was_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all with the same rights, until something changes; each is sent it once."""
    monkeypatch.setattr(shared, "FRESH_S", 3600.0)
    team = await sync_to_async(seed.everything)()
    build = await Build.objects.aget(state="running")
    times: list[str] = []
    draw = Shown.draw

    def counted(shown: Shown) -> list[Part]:
        times.append(str(shown.request.user))
        return draw(shown)

    monkeypatch.setattr(Shown, "draw", counted)
    pages = [Shown.of(asked(team["vera"], f"/builds/{build.pk}/", "head,steps")) for _ in range(20)]
    told = await asyncio.gather(*(page.news(team["vera"]) for page in pages if page))
    assert [len(messages) for messages in told] == [2] * 20
    assert times == ["vera"]
    told = await asyncio.gather(*(page.news(team["vera"]) for page in pages if page))
    assert [len(messages) for messages in told] == [0] * 20
    assert times == ["vera"]
    await build.steps.filter(state="running").aupdate(progress_done=400)
    live.Hub().tell({"kind": "step"})
    told = await asyncio.gather(*(page.news(team["vera"]) for page in pages if page))
    assert {"400 of 412" in text_of(messages[-1]) for messages in told} == {True}
    assert times == ["vera"] * 2
    of_operator = Shown.of(asked(team["otto"], f"/builds/{build.pk}/", "head,steps"))
    assert of_operator is not None
    assert len(await of_operator.news(team["otto"])) == 2
    assert times == ["vera", "vera", "otto"]


def test_only_parts_of_our_pages_are_sent(team: dict[str, User]) -> None:
    """No other address, no whole page, nothing that a POST would do."""
    ada = team["ada"]
    assert Shown.of(asked(ada, "/nowhere/", "rows")) is None
    assert Shown.of(asked(ada, "/admin/", "rows")) is None
    assert Shown.of(asked(ada, "/", "")) is None
    pages = {f"/deployments/{NAME}/": "nonsense", f"/deployments/{NAME}/generations/2/pin/": "now"}
    for page, part in pages.items():
        assert not drawn(ada, page, part)
    assert not Build.objects.filter(generation__pinned=True, generation__number=4).exists()


def test_an_unknown_part_is_no_page(admin: Client) -> None:
    """Asked for a part that it does not have, a page answers nothing instead of all of itself."""
    answer = admin.get("/?part=nonsense")
    assert answer.status_code == 404
    assert b"<html" not in answer.content


@pytest.mark.django_db(transaction=True)
async def test_many_lines_come_as_one_message() -> None:
    """However long a log is that a page opens, the page is laid out once for each batch of it."""
    team = await sync_to_async(seed.everything)()
    build = await Build.objects.aget(state="running")
    await LogChunk.objects.filter(build=build).adelete()
    chunks = await LogChunk.objects.abulk_create(
        LogChunk(build=build, text=f"line {n}\n") for n in range(CHUNKS_AT_ONCE + 20)
    )
    watch = Watch(build.pk, 0, 0)
    messages = [text.decode() async for text in _lines(team["vera"], watch)]
    assert [text.count("data-line") for text in messages] == [CHUNKS_AT_ONCE, 20]
    assert watch.last == chunks[-1].pk
    assert f'"id":{chunks[-1].pk}' in messages[-1]
    assert [text async for text in _lines(team["vera"], watch)] == []


def test_lines_of_another_step_say_whose_they_are(team: dict[str, User]) -> None:
    """Where a step's lines begin its name stands, escaped; lines of the same step go on without."""
    build = Build.objects.get(state="running")
    first, second = build.steps.order_by("position")[:2]
    BuildStep.objects.filter(pk=second.pk).update(name="<b>merge</b>")
    one = LogChunk.objects.create(build=build, step=first, text="one\n")
    two = LogChunk.objects.create(build=build, step=first, text="two\n")
    three = LogChunk.objects.create(build=build, step=second, text="three\n")
    html = "".join(_headed([two, three], one.pk))
    assert html.index("two") < html.index("&lt;b&gt;merge&lt;/b&gt;") < html.index("three")
    assert html.count('class="from"') == 1


@pytest.mark.django_db(transaction=True)
async def test_a_stranger_is_told_not_to_try_again() -> None:
    """204 ends a browser's event source for good."""
    answer = await AsyncClient().get("/events/")
    assert answer.status_code == 204
    assert not isinstance(answer, StreamingHttpResponse)


async def test_bursts_are_joined_and_topics_kept() -> None:
    """A page is told of its own things, each kind once, however many events there were."""
    hub = live.Hub()
    listener = live.Listener({"build:7"})
    hub._listeners.add(listener)
    for _ in range(50):
        hub.tell({"kind": "step", "build": 7, "deployment": "a"})
    hub.tell({"kind": "build", "build": 7})
    hub.tell({"kind": "build", "build": 8})
    hub.tell({"kind": "key", "id": 1})
    assert await listener.next(60) == {"step", "build"}
    assert await listener.next(0.01) == frozenset()


async def test_noise_is_not_told_to_pages_that_follow_everything() -> None:
    """Log lines and progress go to the pages of that build only."""
    everything = live.Listener({"*"})
    everything.offer("log", live.topics_of({"kind": "log", "build": 7}))
    assert await everything.next(0.01) == frozenset()
    everything.offer("build", live.topics_of({"kind": "build", "build": 7}))
    assert await everything.next(60) == {"build"}


async def test_without_a_broker_pages_are_told_to_look(settings) -> None:
    """A tick instead of events, at once and then every two seconds."""
    settings.REDIS_URL = "unix:///nowhere/broker.sock"

    async def ticks() -> AsyncIterator[frozenset[str]]:
        async with live.Hub().listening({"build:1"}) as listener:
            yield await listener.next(60)

    async for kinds in ticks():
        assert kinds == {"tick"}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("end", ["logout", "others", "deactivated", "expired"])
async def test_a_stream_ends_with_its_login(
    broker: object, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the event, not at the next look: by logout, from another browser, by an admin."""
    monkeypatch.setattr(views.stream, "STILL_HERE_S", 3600.0)
    team = await sync_to_async(seed.everything)()
    here, there, other = AsyncClient(), AsyncClient(), AsyncClient()
    await here.aforce_login(team["vera"])
    await there.aforce_login(team["vera"])
    await other.aforce_login(team["otto"])
    streams = {}
    for name, client in (("here", here), ("there", there), ("other", other)):
        answer = await client.get("/events/")
        assert isinstance(answer, StreamingHttpResponse)
        streams[name] = aiter(answer)
        assert b"retry" in await anext(streams[name])
        if name == "here":
            assert await anext(streams[name])  # the broker is listened to
    if end == "logout":
        await here.post("/logout/")
    elif end == "others":
        await there.post("/account/sessions/")
    elif end == "deactivated":
        await sync_to_async(actions.set_user_active)(team["ada"], "vera", on=False)
    else:
        key = here.cookies["sessionid"].value
        await Session.objects.filter(session_key=key).aupdate(expire_date=timezone.now())
        live.hub().tell({"kind": "tick"})
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert [text async for text in streams["here"]][-1] == live.message("bye", None)
        for name in {"there", "other"} - ({"there"} if end == "deactivated" else set()):
            live.hub().tell({"kind": "tick"})
            assert b"bye" not in await anext(streams[name])
    finally:
        for stream in streams.values():
            await stream.aclose()
