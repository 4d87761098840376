"""The rules of a key's limits, twice: as a script at the broker and as a counter in a worker.

Both answer the same question in the same way (the tests run against both): may this request, which
may cost this many tokens, go now? Looking and taking is one step. Both return what they counted,
from which `Counts` tells when the next request fits.
"""

from __future__ import annotations

import calendar
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from mmadmin.core.snapshot import KeyRecord

MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Windows:
    """A moment, the periods that it lies in, and when they end."""

    now: float
    second: int
    day: str
    month: str
    day_ends_s: int
    month_ends_s: int

    @classmethod
    def at(cls, now: float) -> Windows:
        """The windows of a moment, in UTC."""
        today = datetime.fromtimestamp(now, UTC)
        seconds = today.hour * 3600 + today.minute * 60 + today.second
        days_left = calendar.monthrange(today.year, today.month)[1] - today.day
        return cls(
            now=now,
            second=int(now),
            day=f"{today:%Y%m%d}",
            month=f"{today:%Y%m}",
            day_ends_s=86_400 - seconds,
            month_ends_s=days_left * 86_400 + 86_400 - seconds,
        )


@dataclass(frozen=True, slots=True)
class Recent:
    """A count over the last sixty seconds, kept by whole seconds."""

    by_second: dict[int, int]

    @property
    def total(self) -> int:
        """The count now."""
        return sum(self.by_second.values())

    def wait_s(self, most: int, now: float) -> int:
        """Seconds until it is at most `most`, if nothing is added."""
        left, wait_s = self.total, 0.0
        for second, count in sorted(self.by_second.items()):
            if left <= most:
                break
            left -= count
            wait_s = second + MINUTE_S - now
        return math.ceil(wait_s)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a key has used and holds."""

    requests: Recent
    tokens: Recent
    day: int
    month: int
    held: int
    """Tokens that running requests have reserved."""
    at_once: int
    """Running requests."""

    def waits(
        self, key: KeyRecord, want: int, windows: Windows
    ) -> Iterator[tuple[str, int | None]]:
        """Each limit of the key, and the seconds until a request for `want` tokens fits it.

        0 = it fits now; None = when enough of the running requests have ended, whenever that is.
        Nothing that is counted here grows by itself, so that the longest of them is the answer.
        """
        if key.concurrency:
            yield "concurrency", None if self.at_once >= key.concurrency else 0
        if key.rpm:
            yield "requests_per_minute", self.requests.wait_s(key.rpm - 1, windows.now)
        if key.tpm:
            most = self._most(key.tpm, want)
            yield (
                "tokens_per_minute",
                self.tokens.wait_s(most, windows.now) if most >= 0 else None,
            )
        for name, limit, used, ends_s in (
            ("tokens_per_day", key.tokens_per_day, self.day, windows.day_ends_s),
            ("tokens_per_month", key.tokens_per_month, self.month, windows.month_ends_s),
        ):
            if limit:
                most = self._most(limit, want)
                yield name, 0 if used <= most else ends_s if most >= 0 else None

    def _most(self, limit: int, want: int) -> int:
        """The most that may have been used; a request that is alone needs only one token left."""
        return limit - self.held - (want if self.at_once else 1)

    def with_one(self, want: int, second: int) -> Counts:
        """The counts after a request for `want` tokens was let in."""
        asked = self.requests.by_second
        return replace(
            self,
            requests=Recent(asked | {second: asked.get(second, 0) + 1}),
            held=self.held + want,
            at_once=self.at_once + 1,
        )


# One script, so that looking and taking cannot be parted. Keys share a hash tag: one cluster slot.
# KEYS: base. ARGV: id, tokens, now_ms, expires_ms, second, day, month, then the limits
# rpm, tpm, concurrency, per day, per month. The hash `:w` counts by second: requests in `r<second>`
# and tokens in `t<second>`. The same rules are in `Counts.waits`.
RESERVE = """
local b, a = KEYS[1], ARGV
local id, want, now, expires = a[1], tonumber(a[2]), tonumber(a[3]), tonumber(a[4])
local rpm, tpm, many = tonumber(a[8]), tonumber(a[9]), tonumber(a[10])
local perday, permonth = tonumber(a[11]), tonumber(a[12])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', b .. ':held', '-inf', now)) do
  redis.call('ZREM', b .. ':held', old)
  local t = tonumber(redis.call('HGET', b .. ':want', old) or 0)
  redis.call('HDEL', b .. ':want', old)
  redis.call('DECRBY', b .. ':sum', t)
end
local function get(name) return tonumber(redis.call('GET', b .. name) or 0) end
local recent, oldest = redis.call('HGETALL', b .. ':w'), tonumber(a[5]) - 60
local asked, spent = 0, 0
for i = 1, #recent, 2 do
  local name, count = recent[i], tonumber(recent[i + 1])
  if tonumber(string.sub(name, 2)) <= oldest then redis.call('HDEL', b .. ':w', name)
  elseif string.sub(name, 1, 1) == 'r' then asked = asked + count
  else spent = spent + count end
end
local held, at_once = get(':sum'), redis.call('ZCARD', b .. ':held')
local day, month = get(':d:' .. a[6]), get(':m:' .. a[7])
local function full(used, limit)
  if at_once == 0 then return limit > 0 and used > limit - held - 1 end
  return limit > 0 and used > limit - held - want
end
local fits = not (many > 0 and at_once >= many
  or rpm > 0 and asked >= rpm
  or full(spent, tpm) or full(day, perday) or full(month, permonth))
if fits then
  redis.call('ZADD', b .. ':held', expires, id)
  redis.call('HSET', b .. ':want', id, want)
  redis.call('INCRBY', b .. ':sum', want)
  redis.call('HINCRBY', b .. ':w', 'r' .. a[5], 1)
  redis.call('EXPIRE', b .. ':w', 90)
end
return {fits and 1 or 0, day, month, held, at_once, recent}
"""
# KEYS: base. ARGV: id, used tokens, second, day, month.
SETTLE = """
local b, a = KEYS[1], ARGV
if not redis.call('SET', b .. ':s:' .. a[1], '1', 'NX', 'EX', 300) then
  return redis.status_reply('OK')  -- sent twice, because the first answer was lost
end
if redis.call('ZREM', b .. ':held', a[1]) == 1 then
  redis.call('DECRBY', b .. ':sum', tonumber(redis.call('HGET', b .. ':want', a[1]) or 0))
  redis.call('HDEL', b .. ':want', a[1])
end
local function add(name, seconds)
  redis.call('INCRBY', b .. name, a[2])
  redis.call('EXPIRE', b .. name, seconds)
end
redis.call('HINCRBY', b .. ':w', 't' .. a[3], a[2])
redis.call('EXPIRE', b .. ':w', 90)
add(':d:' .. a[4], 172800)
add(':m:' .. a[5], 2764800)
return redis.status_reply('OK')
"""


def base(key_id: str) -> str:
    """The head of a key's names at the broker."""
    return f"mm:limit:{{{key_id}}}"


def recent_of(counted: list[bytes], windows: Windows) -> tuple[Recent, Recent]:
    """Requests and tokens of the last sixty seconds, from the script's names and counts."""
    found: tuple[dict[int, int], dict[int, int]] = {}, {}
    for name, count in zip(counted[::2], counted[1::2], strict=True):
        second = int(name[1:])
        if second > windows.second - MINUTE_S:
            found[name.startswith(b"t")][second] = int(count)
    return Recent(found[0]), Recent(found[1])


class Counter:
    """One key's counts in this worker: the same rules as the script, for when nobody is asked."""

    __slots__ = ("held", "long", "requests", "tokens")

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.requests: dict[int, int] = {}
        """By second."""
        self.tokens: dict[int, int] = {}
        """By second."""
        self.long: dict[str, int] = {}
        """Tokens by day and by month."""

    def reserve(self, key: KeyRecord, id_: str, want: int, windows: Windows) -> tuple[bool, Counts]:
        """Take what is wished if it fits; the counts are those before."""
        self._forget(windows)
        counts = Counts(
            requests=Recent(dict(self.requests)),
            tokens=Recent(dict(self.tokens)),
            day=self.long.get(windows.day, 0),
            month=self.long.get(windows.month, 0),
            held=sum(self.held.values()),
            at_once=len(self.held),
        )
        fits = all(wait_s == 0 for _, wait_s in counts.waits(key, want, windows))
        if fits:
            self.held[id_] = want
            self.requests[windows.second] = self.requests.get(windows.second, 0) + 1
        return fits, counts

    def settle(self, id_: str, used: int, windows: Windows) -> None:
        """Give the reservation back and count what was used."""
        self._forget(windows)
        self.held.pop(id_, None)
        self.tokens[windows.second] = self.tokens.get(windows.second, 0) + used
        self.long = {
            period: self.long.get(period, 0) + used for period in (windows.day, windows.month)
        }

    def _forget(self, windows: Windows) -> None:
        """Drop what is older than a minute."""
        oldest = windows.second - MINUTE_S
        for counts in (self.requests, self.tokens):
            for second in [second for second in counts if second <= oldest]:
                del counts[second]
