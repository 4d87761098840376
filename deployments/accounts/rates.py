"""How often a token may ask the API: a bucket for each, which fills up steadily."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from django.conf import settings

from mmadmin.core.errors import TooMany

BUCKETS = 10_000
"""Those that are full again are forgotten when there are more."""


class Buckets:
    """A minute's requests at once, and as many each minute; kept in this process."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = float(per_minute)
        self._a_second = per_minute / 60
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        self._guard = threading.Lock()

    def take(self, who: str) -> None:
        """Let one request in. Raises `TooMany`, which says when one fits."""
        with self._guard:
            now = self._clock()
            left = self._now(self._left.get(who, (self._most, now)), now)
            fits = left >= 1
            self._left[who] = (left - 1 if fits else left, now)
            if len(self._left) > BUCKETS:
                self._left = {
                    name: bucket
                    for name, bucket in self._left.items()
                    if self._now(bucket, now) < self._most
                }
        if not fits:
            wait_s = math.ceil((1 - left) / self._a_second)
            raise TooMany(
                f"this token makes more than {self._most:.0f} requests per minute",
                remedy=f"try again in {wait_s} s, or raise MM_API_RPM",
                retry_after_s=wait_s,
            )

    def _now(self, bucket: tuple[float, float], now: float) -> float:
        left, at = bucket
        return min(self._most, left + (now - at) * self._a_second)


api_requests = Buckets(settings.API_RPM)
