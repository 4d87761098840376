"""Limits: the same rules at the broker and alone; no race; expiry; the client's view."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from mmadmin.core.snapshot import KeyRecord
from mmadmin.gate.budget import Windows
from mmadmin.gate.limits import RESERVED_S, Limiter
from mmadmin.gate.refusal import Refusal
from tests.gate.cluster import Broker, running_town
from tests.gate.harness import MODEL, PATIENCE_S, Harness
from tests.gate.raw import ask
from tests.gate.stub import ANSWER, Call

CHAT = "/v1/chat/completions"
KEY = KeyRecord(key_id="k", digest="", state="active")
NOON = 1_790_000_080.0
"""A moment, 40 s into its minute."""


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        """Now."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The test's clock."""
    return Clock()


@pytest_asyncio.fixture(params=["shared", "alone"])
async def limiter(request, broker, clock) -> AsyncIterator[Limiter]:
    """Both ways of counting."""
    if request.param == "alone":
        yield Limiter(clock=clock)
        return
    client = broker.client()
    await client.flushall()
    counting = Limiter(client, clock=clock)
    counting.start()
    yield counting
    await counting.stop()
    await client.aclose()


async def settle(limiter: Limiter, reservation, used: int) -> None:
    """Settle and wait until it is counted."""
    limiter.settle(reservation, used)
    async with asyncio.timeout(PATIENCE_S):
        while limiter._unsettled:  # noqa: ASYNC110 (no event for it)
            await asyncio.sleep(0.001)


async def refused(limiter: Limiter, key: KeyRecord, tokens: int = 1) -> str:
    """Which limit stands in the way."""
    with pytest.raises(Refusal) as caught:
        await limiter.reserve(key, tokens)
    assert caught.value.status == 429
    assert caught.value.retry_after_s is not None
    return caught.value.param or ""


def test_windows_end_by_the_calendar() -> None:
    """Days and months are UTC's."""
    windows = Windows.at(NOON)
    assert (windows.day, windows.month) == ("20260921", "202609")
    assert windows.day_ends_s == 86_400 - (14 * 3600 + 14 * 60 + 40)
    last = Windows.at(1_798_761_599.0)  # 2026-12-31T23:59:59
    assert (last.day_ends_s, last.month_ends_s) == (1, 1)


async def test_requests_per_minute(limiter: Limiter, clock: Clock) -> None:
    """The third of two is refused until the first is a minute old."""
    key = replace(KEY, rpm=2)
    for left in (b"1", b"0"):
        reservation, headers = await limiter.reserve(key, 1)
        assert (b"x-ratelimit-remaining-requests", left) in headers
        await settle(limiter, reservation, 1)
        clock.now += 10
    assert await refused(limiter, key) == "requests_per_minute"
    clock.now += 39
    assert await refused(limiter, key) == "requests_per_minute"
    clock.now += 1
    await settle(limiter, (await limiter.reserve(key, 1))[0], 1)
    assert await refused(limiter, key) == "requests_per_minute"


async def test_concurrency(limiter: Limiter) -> None:
    """Places come back when requests end."""
    key = replace(KEY, concurrency=2)
    held = [(await limiter.reserve(key, 1))[0] for _ in range(2)]
    assert await refused(limiter, key) == "concurrency"
    await settle(limiter, held[0], 1)
    await limiter.reserve(key, 1)
    assert await refused(limiter, key) == "concurrency"


@pytest.mark.parametrize(
    ("limit", "name"),
    [
        ("tpm", "tokens_per_minute"),
        ("tokens_per_day", "tokens_per_day"),
        ("tokens_per_month", "tokens_per_month"),
    ],
)
async def test_token_budgets(limiter: Limiter, clock: Clock, limit: str, name: str) -> None:
    """Reserved counts as used; what was not used comes back; the window's end resets it."""
    key = replace(KEY, **{limit: 100})
    first, _ = await limiter.reserve(key, 60)
    assert await refused(limiter, key, 60) == name
    second, _ = await limiter.reserve(key, 30)
    await settle(limiter, first, 5)
    third, _ = await limiter.reserve(key, 60)
    await settle(limiter, second, 30)
    await settle(limiter, third, 64)
    alone, _ = await limiter.reserve(key, 5000)  # alone, and something is left
    await settle(limiter, alone, 1)
    assert await refused(limiter, key) == name
    windows = Windows.at(clock.now)
    clock.now += {"tpm": 121, "tokens_per_day": windows.day_ends_s}.get(limit, windows.month_ends_s)
    await limiter.reserve(key, 60)


async def test_a_reservation_of_a_dead_worker_expires(broker: Broker, clock: Clock) -> None:
    """Its place and its tokens come back by themselves."""
    client = broker.client()
    await client.flushall()
    key = replace(KEY, concurrency=1, tokens_per_day=100)
    dead, living = Limiter(client, clock=clock), Limiter(client, clock=clock)
    await dead.reserve(key, 100)
    assert await refused(living, key) == "concurrency"
    clock.now += RESERVED_S + 1
    _, _ = await living.reserve(key, 100)
    await client.aclose()


async def test_settling_twice_counts_once(broker: Broker, clock: Clock) -> None:
    """A settlement repeated because its answer was lost changes nothing."""
    client = broker.client()
    await client.flushall()
    limiter = Limiter(client, clock=clock)
    key = replace(KEY, tokens_per_day=100)
    reservation, _ = await limiter.reserve(key, 10)
    for _ in range(3):
        limiter.settle(reservation, 60)
    await limiter._settle_all()
    assert await client.get("mm:limit:{k}:d:20260921") == b"60"
    assert await client.get("mm:limit:{k}:sum") == b"0"
    await client.aclose()


async def test_without_the_broker_each_counts_for_itself_and_reports_later(
    tmp_path, clock: Clock
) -> None:
    """The limit holds within the worker; what was used is counted when the broker is back."""
    with tempfile.TemporaryDirectory(prefix="mm-broker-") as folder:
        broker = Broker(Path(folder))
        await broker.start()
        client = broker.client()
        limiter = Limiter(client, clock=clock)
        limiter.start()
        key = replace(KEY, tokens_per_day=100)
        await settle(limiter, (await limiter.reserve(key, 10))[0], 30)
        broker.kill()
        reservation, _ = await limiter.reserve(key, 10)
        limiter.settle(reservation, 70)
        assert await refused(limiter, key) == "tokens_per_day"
        await broker.start()
        async with asyncio.timeout(PATIENCE_S):
            while await client.get("mm:limit:{k}:d:20260921") != b"100":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await limiter.stop()
        await client.aclose()
        broker.kill()


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ({"rpm": 1}, "rate_limit_exceeded"),
        ({"concurrency": 1}, "rate_limit_exceeded"),
        ({"tpm": 20}, "rate_limit_exceeded"),
        ({"tokens_per_day": 20}, "insufficient_quota"),
        ({"tokens_per_month": 20}, "insufficient_quota"),
    ],
)
async def test_eight_at_a_barrier_against_room_for_one(
    tmp_path, engine, limits: dict[str, int], status: str
) -> None:
    """Over three workers: one passes, seven get 429 with Retry-After; the engine hears of one."""
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await go_on.wait()
        await call.answer(ANSWER)

    engine.script = script
    async with running_town(tmp_path, engine, MM_GATE_WORKERS="3") as cluster:
        await cluster.publish(keys=[replace(cluster.record, **limits)])
        await cluster.until_told()
        body = {"model": MODEL, "messages": [], "max_tokens": 9}
        requests = [
            asyncio.create_task(ask(cluster.gate.port, CHAT, body, key=cluster.key.text))
            for _ in range(8)
        ]
        await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        while sum(request.done() for request in requests) < 7:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        go_on.set()
        answers = await asyncio.gather(*requests)
    assert sorted(answer.status for answer in answers) == [200] + [429] * 7
    assert len(engine.calls) == 1
    for answer in answers:
        if answer.status == 429:
            assert answer.json["error"]["code"] == status
            assert int(answer.headers["retry-after"]) >= 1
            (name,) = limits
            assert str(limits[name]) in answer.json["error"]["message"]


async def test_a_refused_request_is_booked_and_costs_nothing(harness: Harness) -> None:
    """The second request of one a minute: in the usage records as refused, no tokens, place not taken."""
    harness.publish(keys=(replace(harness.record, rpm=1),))
    body = {"model": MODEL, "messages": []}
    first = await ask(harness.port, CHAT, body, key=harness.key.text)
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    second = await ask(harness.port, CHAT, body, key=harness.key.text)
    assert (second.status, second.json["error"]["type"]) == (429, "rate_limit_error")
    assert [usage.outcome for usage in harness.recorded] == ["ok", "refused"]
    assert harness.recorded[1].prompt_tokens == 0
    assert harness.gate.traffic.queues["small"].running == 0


limits_of_a_key = st.fixed_dictionaries(
    {
        "rpm": st.sampled_from([0, 1, 2, 3, 10, 60]),
        "tpm": st.sampled_from([0, 1, 50, 150, 1000]),
        "tokens_per_day": st.sampled_from([0, 1, 200, 5000]),
        "tokens_per_month": st.sampled_from([0, 300]),
    }
)
pasts = st.lists(
    st.tuples(
        st.floats(0, 100, allow_nan=False),  # seconds since the one before
        st.integers(1, 120),  # tokens reserved
        st.integers(0, 120),  # tokens used
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None)
@given(limits_of_a_key, pasts, st.integers(1, 200))
def test_the_moment_that_a_refusal_names_has_room(limits, past, tokens: int) -> None:
    """Whatever a key did: after Retry-After the same request fits.

    At the latest of the `x-ratelimit-reset-*` a small request fits.
    """

    async def play() -> None:
        clock = Clock()
        limiter = Limiter(clock=clock)
        key = replace(KEY, **limits)
        for pause_s, reserved, used in past:
            clock.now += pause_s
            with contextlib.suppress(Refusal):
                reservation, _ = await limiter.reserve(key, reserved)
                limiter.settle(reservation, used)
        now = clock.now
        try:
            reservation, headers = await limiter.reserve(key, tokens)
            limiter.settle(reservation, tokens)
        except Refusal as refusal:
            clock.now += refusal.retry_after_s or 0
            limiter.settle((await limiter.reserve(key, tokens))[0], 0)
        else:
            resets = [v for name, v in headers if name.startswith(b"x-ratelimit-reset")]
            if len(resets) == sum(map(bool, limits.values())):
                clock.now = now + max((int(v[:-1]) for v in resets), default=0)
                await limiter.reserve(key, 1)

    asyncio.run(play())


@pytest.mark.parametrize("started_s", [0, 14, 20, 34, 59])
@pytest.mark.parametrize("rpm", [1, 2, 5])
async def test_who_comes_at_the_named_moment_is_let_in(
    limiter: Limiter, clock: Clock, rpm: int, started_s: int
) -> None:
    """Both ways of counting, a full minute behind it: one refusal, never two."""
    key = replace(KEY, rpm=rpm)
    clock.now += started_s
    for _ in range(rpm):
        await settle(limiter, (await limiter.reserve(key, 1))[0], 1)
        clock.now += 3
    for _ in range(4):
        with pytest.raises(Refusal) as caught:
            await limiter.reserve(key, 1)
        wait_s = caught.value.retry_after_s
        assert wait_s is not None
        assert (b"x-ratelimit-reset-requests", f"{wait_s}s".encode()) in caught.value.headers
        assert wait_s <= 60, "longer than official clients wait"
        clock.now += wait_s - 1
        assert await refused(limiter, key) == "requests_per_minute"
        clock.now += 1
        await settle(limiter, (await limiter.reserve(key, 1))[0], 1)


async def test_the_limit_that_lasts_longest_is_named(limiter: Limiter) -> None:
    """A key at the end of its day and its month is told the month; a running one names no time."""
    key = replace(KEY, tokens_per_day=10, tokens_per_month=10, rpm=1)
    await settle(limiter, (await limiter.reserve(key, 1))[0], 10)
    assert await refused(limiter, key) == "tokens_per_month"
    other = replace(KEY, key_id="other", concurrency=1, rpm=1)
    running, _ = await limiter.reserve(other, 1)
    assert await refused(limiter, other) == "concurrency"
    await settle(limiter, running, 1)


async def test_a_client_sees_what_is_left_of_its_budgets(harness: Harness) -> None:
    """Limit and rest of day and month, beside those of the minute."""
    harness.publish(keys=(replace(harness.record, tokens_per_day=5000, tokens_per_month=90_000),))
    body = {"model": MODEL, "messages": [], "max_tokens": 100}
    await ask(harness.port, CHAT, body, key=harness.key.text)
    headers = (await ask(harness.port, CHAT, body, key=harness.key.text)).headers
    assert headers["x-ratelimit-limit-tokens-day"] == "5000"
    assert 4800 < int(headers["x-ratelimit-remaining-tokens-day"]) < 4900
    assert 89_800 < int(headers["x-ratelimit-remaining-tokens-month"]) < 89_900


async def test_the_official_client_waits_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two a minute, three calls at once: with one retry the third is answered."""
    clock = Clock()
    harness.gate.traffic.limiter._clock = clock
    harness.publish(keys=(replace(harness.record, rpm=2),))
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock.now += seconds

    monkeypatch.setattr("anyio.sleep", sleep)
    async with openai.AsyncOpenAI(
        api_key=harness.key.text, base_url=harness.base_url, max_retries=1
    ) as client:
        for _ in range(3):
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}]
            )
    assert [usage.status for usage in harness.recorded] == [200, 200, 429, 200]
    assert len(waited) == 1
