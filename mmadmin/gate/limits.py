"""What a key may still use: requests and tokens a minute, requests at once, tokens a day and month.

A request reserves what it may cost before it goes anywhere and settles what it did cost at its
end, so that requests that come together cannot pass a limit that has room for one. Reservations
expire: a worker that dies gives its share back. A request larger than what is left still passes
when it is alone and something is left, so that a client that does not say `max_tokens` is not shut
out; the limit is then overrun by that one request at most.

The counts are shared by all workers through the broker, in one script a request and only for keys
that have limits. Without the broker each worker counts for itself, and reports what was used when
the broker is back. A minute is the last sixty seconds (this minute's count and the last one's,
weighted); days and months are those of UTC.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from mmadmin.core.snapshot import KeyRecord
from mmadmin.gate.budget import RESERVE, SETTLE, Counter, Remaining, Windows, base
from mmadmin.gate.refusal import Refusal

DEFAULT_ANSWER_TOKENS = 1024
"""Reserved for an answer whose client did not say how long it may be."""
RESERVED_S = 90
"""A reservation that is not renewed for this long is void."""
RENEW_EVERY_S = 20.0
ASK_TIMEOUT_S = 0.5
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
        remaining = await self._ask(key, id_, tokens, windows)
        shared = remaining is not None
        if remaining is None:
            counter = self._counters.setdefault(key.key_id, Counter())
            remaining = counter.reserve(key, id_, tokens, windows)
        headers = _headers(key, remaining, windows)
        if remaining.refused_by:
            raise _refusal(key, remaining, windows, headers)
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
    ) -> Remaining | None:
        """The broker's answer; None when it is away."""
        if self._redis is None or time.monotonic() < self._away_until:
            return None
        now_ms = int(self._clock() * 1000)
        arguments = [
            id_, tokens, now_ms, now_ms + RESERVED_S * 1000, windows.minute, windows.share_ms,
            windows.day, windows.month, key.rpm, key.tpm, key.concurrency, key.tokens_per_day,
            key.tokens_per_month,
        ]  # fmt: skip
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                by, requests_left, tokens_left = await self._reserve(
                    keys=[base(key.key_id)], args=arguments
                )
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("limits are counted by each worker alone: %s", error)
            self._away_until = time.monotonic() + AWAY_S
            return None
        return Remaining(by.decode(), requests_left, tokens_left)

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
                args=[reservation.id, used, windows.minute, windows.day, windows.month],
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


def _headers(key: KeyRecord, remaining: Remaining, windows: Windows) -> list[Header]:
    """OpenAI's `x-ratelimit-*` headers."""
    headers: list[Header] = []
    reset = f"{windows.minute_ends_s}s".encode()
    for limit, left, name in (
        (key.rpm, remaining.requests_left, b"requests"),
        (key.tpm, remaining.tokens_left, b"tokens"),
    ):
        if limit:
            headers += [
                (b"x-ratelimit-limit-" + name, str(limit).encode()),
                (b"x-ratelimit-remaining-" + name, str(left).encode()),
                (b"x-ratelimit-reset-" + name, reset),
            ]
    return headers


def _refusal(
    key: KeyRecord, remaining: Remaining, windows: Windows, headers: list[Header]
) -> Refusal:
    limit, retry_after_s, reason = {
        "concurrency": (
            f"{key.concurrency} requests at once",
            1,
            "rate_limit_exceeded",
        ),
        "requests_per_minute": (
            f"{key.rpm} requests per minute",
            windows.minute_ends_s,
            "rate_limit_exceeded",
        ),
        "tokens_per_minute": (
            f"{key.tpm} tokens per minute",
            windows.minute_ends_s,
            "rate_limit_exceeded",
        ),
        "tokens_per_day": (
            f"{key.tokens_per_day} tokens per day (UTC)",
            windows.day_ends_s,
            "insufficient_quota",
        ),
        "tokens_per_month": (
            f"{key.tokens_per_month} tokens per month (UTC)",
            windows.month_ends_s,
            "insufficient_quota",
        ),
    }[remaining.refused_by]
    refusal = Refusal(
        429,
        f"This API key has reached its limit of {limit}. Retry in {retry_after_s} seconds.",
        reason=reason,
        param=remaining.refused_by,
        retry_after_s=retry_after_s,
    )
    refusal.headers.extend(headers)
    return refusal
