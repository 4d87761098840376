"""What a key may still use: requests and tokens a minute, requests at once, tokens a day and month.

A request reserves what it may cost before it goes anywhere and settles what it did cost at its
end, so that requests that come together cannot pass a limit that has room for one. Reservations
expire: a worker that dies gives its share back. A request larger than what is left still passes
when it is alone and something is left, so that a client that does not say `max_tokens` is not shut
out; the limit is then overrun by that one request at most.

The counts are shared by all workers through the broker, in one script a request and only for keys
that have limits. Without the broker each worker counts for itself, and reports what was used when
the broker is back. A minute is the last sixty seconds, counted by whole seconds; days and months
are those of UTC. The moment that a refusal names is one at which the request fits, if the key does
nothing else until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from mmadmin.core.snapshot import KeyRecord
from mmadmin.gate.budget import RESERVE, SETTLE, Counter, Counts, Windows, base, recent_of
from mmadmin.gate.refusal import Refusal

DEFAULT_ANSWER_TOKENS = 1024
"""Reserved for an answer whose client did not say how long it may be."""
RESERVED_S = 90
"""A reservation that is not renewed for this long is void."""
RENEW_EVERY_S = 20.0
ASK_TIMEOUT_S = 0.5
ASK_AGAIN_S = 1
"""`Retry-After` when a request fits as soon as another has ended."""
AWAY_S = 1.0
"""How long the broker is not asked after it failed."""
log = logging.getLogger("mmadmin.gate.limits")


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one running request holds."""

    id: str
    key_id: str
    tokens: int
    shared: bool
    """Held at the broker; False = counted by this worker alone."""


class Limiter:
    """Asks the broker, and does without it when it is away."""

    def __init__(
        self, redis: Redis | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._redis = redis
        self._clock = clock
        self._reserve: Any = redis.register_script(RESERVE) if redis else None
        self._settle: Any = redis.register_script(SETTLE) if redis else None
        self._counters: dict[str, Counter] = {}
        self._held: dict[str, Reservation] = {}
        self._unsettled: deque[tuple[Reservation, int, Windows]] = deque()
        self._news = asyncio.Event()
        self._away_until = 0.0
        self._id_head = secrets.token_hex(6)
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to settle and to renew in the background."""
        if self._redis is not None:
            self._tasks = [
                asyncio.create_task(self._keep_settling()),
                asyncio.create_task(self._keep_renewing()),
            ]

    async def stop(self) -> None:
        """Settle what can be settled now."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                await self._settle_all()

    @staticmethod
    def limits(key: KeyRecord) -> bool:
        """Whether the key has any limit."""
        return bool(
            key.rpm or key.tpm or key.concurrency or key.tokens_per_day or key.tokens_per_month
        )

    async def reserve(self, key: KeyRecord, tokens: int) -> tuple[Reservation, list[Header]]:
        """Take what the request may use; `Refusal` (429) names the limit and when to come again.

        Returns the reservation and the `x-ratelimit-*` headers.
        """
        windows = Windows.at(self._clock())
        id_ = f"{self._id_head}{next(self._ids):x}"
        answer = await self._ask(key, id_, tokens, windows)
        shared = answer is not None
        if answer is None:
            counter = self._counters.setdefault(key.key_id, Counter())
            answer = counter.reserve(key, id_, tokens, windows)
        fits, counts = answer
        if not fits:
            refusal = _refusal(key, counts, tokens, windows)
            refusal.headers.extend(_headers(key, counts, windows))
            raise refusal
        headers = _headers(key, counts.with_one(tokens, windows.second), windows)
        reservation = Reservation(id=id_, key_id=key.key_id, tokens=tokens, shared=shared)
        self._held[id_] = reservation
        return reservation, headers

    def settle(self, reservation: Reservation, used: int) -> None:
        """Give back, count what was used. Does not wait; the broker hears of it soon."""
        self._held.pop(reservation.id, None)
        windows = Windows.at(self._clock())
        counter = self._counters.setdefault(reservation.key_id, Counter())
        counter.settle(reservation.id, used, windows)
        if self._redis is not None:
            self._unsettled.append((reservation, used, windows))
            self._news.set()

    async def _ask(
        self, key: KeyRecord, id_: str, tokens: int, windows: Windows
    ) -> tuple[bool, Counts] | None:
        """The broker's answer; None when it is away."""
        if self._redis is None or time.monotonic() < self._away_until:
            return None
        now_ms = int(self._clock() * 1000)
        arguments = [
            id_, tokens, now_ms, now_ms + RESERVED_S * 1000, windows.second, windows.day,
            windows.month, key.rpm, key.tpm, key.concurrency, key.tokens_per_day,
            key.tokens_per_month,
        ]  # fmt: skip
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                fits, *others, recent = await self._reserve(keys=[base(key.key_id)], args=arguments)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("limits are counted by each worker alone: %s", error)
            self._away_until = time.monotonic() + AWAY_S
            return None
        return bool(fits), Counts(*recent_of(recent, windows), *others)

    async def _keep_settling(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._settle_all()
            except (RedisError, OSError):
                await asyncio.sleep(AWAY_S)
                self._news.set()

    async def _settle_all(self) -> None:
        while self._unsettled:
            reservation, used, windows = self._unsettled[0]
            await self._settle(
                keys=[base(reservation.key_id)],
                args=[reservation.id, used, windows.second, windows.day, windows.month],
            )
            self._unsettled.popleft()

    async def _keep_renewing(self) -> None:
        """Running requests keep their reservations, however long they run."""
        assert self._redis is not None  # noqa: S101 (started only with a broker)
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            expires = int(self._clock() * 1000) + RESERVED_S * 1000
            pipe = self._redis.pipeline(transaction=False)
            for reservation in self._held.values():
                if reservation.shared:
                    pipe.zadd(
                        base(reservation.key_id) + ":held", {reservation.id: expires}, xx=True
                    )
            with contextlib.suppress(RedisError, OSError):
                await pipe.execute()


Header = tuple[bytes, bytes]


def _headers(key: KeyRecord, counts: Counts, windows: Windows) -> list[Header]:
    """OpenAI's `x-ratelimit-*` headers: the limit, what is left of it, when a request fits again.

    No time is named when that depends on running requests.
    """
    waits = dict(counts.waits(key, 1, windows))
    headers: list[Header] = []
    for name, suffix, limit, used in (
        ("requests_per_minute", b"requests", key.rpm, counts.requests.total),
        ("tokens_per_minute", b"tokens", key.tpm, counts.tokens.total + counts.held),
        ("tokens_per_day", b"tokens-day", key.tokens_per_day, counts.day + counts.held),
        ("tokens_per_month", b"tokens-month", key.tokens_per_month, counts.month + counts.held),
    ):
        if limit:
            left = max(limit - used, 0)
            headers += [
                (b"x-ratelimit-limit-" + suffix, str(limit).encode()),
                (b"x-ratelimit-remaining-" + suffix, str(left).encode()),
            ]
            if (wait_s := waits[name]) is not None:
                headers.append((b"x-ratelimit-reset-" + suffix, f"{wait_s}s".encode()))
    return headers


def _refusal(key: KeyRecord, counts: Counts, tokens: int, windows: Windows) -> Refusal:
    """The refusal by the limit that lasts longest; one that has no time comes first."""
    waits = {
        name: math.inf if wait_s is None else wait_s
        for name, wait_s in counts.waits(key, tokens, windows)
    }
    name = max(waits, key=lambda name: waits[name])
    limit, reason = {
        "concurrency": (
            f"{key.concurrency} concurrent request{'s' * (key.concurrency > 1)}",
            "rate_limit_exceeded",
        ),
        "requests_per_minute": (
            f"{key.rpm} request{'s' * (key.rpm > 1)} per minute",
            "rate_limit_exceeded",
        ),
        "tokens_per_minute": (f"{key.tpm} tokens per minute", "rate_limit_exceeded"),
        "tokens_per_day": (f"{key.tokens_per_day} tokens per day (UTC)", "insufficient_quota"),
        "tokens_per_month": (
            f"{key.tokens_per_month} tokens per month (UTC)",
            "insufficient_quota",
        ),
    }[name]
    if waits[name] is math.inf:
        retry_after_s = ASK_AGAIN_S
        when = "when one of its running requests has ended"
    else:
        retry_after_s = int(waits[name])
        when = f"in {retry_after_s} second{'s' * (retry_after_s > 1)}"
    return Refusal(
        429,
        f"This API key has reached its limit of {limit}. Retry {when}.",
        reason=reason,
        param=name,
        retry_after_s=retry_after_s,
    )
