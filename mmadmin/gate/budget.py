"""The rules of a key's limits, twice: as a script at the broker and as a counter in a worker.

Both answer the same question in the same way (the tests run against both): may this request, which
may cost so many tokens, go now? Looking and taking is one step.
"""

from __future__ import annotations

import calendar
from dataclasses import dataclass
from datetime import UTC, datetime

from mmadmin.core.snapshot import KeyRecord

MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Windows:
    """Names of the periods that a moment lies in, and when each ends."""

    minute: int
    share_ms: int
    """How much of the last minute still counts, in thousandths."""
    day: str
    month: str
    minute_ends_s: int
    day_ends_s: int
    month_ends_s: int

    @classmethod
    def at(cls, now: float) -> Windows:
        """The windows of a moment, in UTC."""
        today = datetime.fromtimestamp(now, UTC)
        seconds = today.hour * 3600 + today.minute * 60 + today.second
        days_left = calendar.monthrange(today.year, today.month)[1] - today.day
        return cls(
            minute=int(now // MINUTE_S),
            share_ms=int(1000 - (now % MINUTE_S) * 1000 / MINUTE_S),
            day=f"{today:%Y%m%d}",
            month=f"{today:%Y%m}",
            minute_ends_s=int(MINUTE_S - now % MINUTE_S) + 1,
            day_ends_s=86_400 - seconds,
            month_ends_s=days_left * 86_400 + 86_400 - seconds,
        )


@dataclass(frozen=True, slots=True)
class Remaining:
    """The answer to a wish: granted, or which limit stands in the way; what is left."""

    refused_by: str
    requests_left: int
    tokens_left: int


# One script, so that looking and taking cannot be parted. Keys share a hash tag: one cluster slot.
# KEYS: base. ARGV: id, tokens, now_ms, expires_ms, minute, share, day, month, then the limits
# rpm, tpm, concurrency, per day, per month. The same rules are in `Counter.reserve` below.
RESERVE = """
local b, a = KEYS[1], ARGV
local id, want, now, expires = a[1], tonumber(a[2]), tonumber(a[3]), tonumber(a[4])
local rpm, tpm, many = tonumber(a[9]), tonumber(a[10]), tonumber(a[11])
local perday, permonth = tonumber(a[12]), tonumber(a[13])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', b .. ':held', '-inf', now)) do
  redis.call('ZREM', b .. ':held', old)
  local t = tonumber(redis.call('HGET', b .. ':want', old) or 0)
  redis.call('HDEL', b .. ':want', old)
  redis.call('DECRBY', b .. ':sum', t)
end
local function get(name) return tonumber(redis.call('GET', b .. name) or 0) end
local last, this = ':' .. (tonumber(a[5]) - 1), ':' .. a[5]
local share = tonumber(a[6]) / 1000
local asked = get(':r' .. this) + get(':r' .. last) * share
local spent = get(':t' .. this) + get(':t' .. last) * share
local held, at_once = get(':sum'), redis.call('ZCARD', b .. ':held')
local function full(used, limit)
  if limit == 0 then return false end
  if used + held >= limit then return true end
  return at_once > 0 and used + held + want > limit
end
local day, month = get(':d:' .. a[7]), get(':m:' .. a[8])
local by = ''
if many > 0 and at_once >= many then by = 'concurrency'
elseif rpm > 0 and asked + 1 > rpm then by = 'requests_per_minute'
elseif full(spent, tpm) then by = 'tokens_per_minute'
elseif full(day, perday) then by = 'tokens_per_day'
elseif full(month, permonth) then by = 'tokens_per_month' end
if by == '' then
  redis.call('ZADD', b .. ':held', expires, id)
  redis.call('HSET', b .. ':want', id, want)
  redis.call('INCRBY', b .. ':sum', want)
  redis.call('INCR', b .. ':r' .. this)
  redis.call('EXPIRE', b .. ':r' .. this, 130)
  asked, held = asked + 1, held + want
end
return {by, math.floor(math.max(rpm - asked, 0)), math.floor(math.max(tpm - spent - held, 0))}
"""
# KEYS: base. ARGV: id, used tokens, minute, day, month.
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
add(':t:' .. a[3], 130)
add(':d:' .. a[4], 172800)
add(':m:' .. a[5], 2764800)
return redis.status_reply('OK')
"""


def base(key_id: str) -> str:
    """The head of a key's names at the broker."""
    return f"mm:limit:{{{key_id}}}"


class Counter:
    """One key's counts in this worker: the same rules as the script, for when nobody is asked."""

    __slots__ = ("held", "requests", "tokens")

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.requests: dict[int, int] = {}
        self.tokens: dict[str, int] = {}
        """By window name: `t<minute>`, `d<day>`, `m<month>`."""

    def reserve(self, key: KeyRecord, id_: str, want: int, windows: Windows) -> Remaining:
        """Take what is wished, or say what stands in the way."""
        share = windows.share_ms / 1000
        minute = windows.minute
        asked = self.requests.get(minute, 0) + self.requests.get(minute - 1, 0) * share
        spent = self.tokens.get(f"t{minute}", 0) + self.tokens.get(f"t{minute - 1}", 0) * share
        held = sum(self.held.values())

        def full(used: float, limit: int) -> bool:
            return limit > 0 and (
                used + held >= limit or (bool(self.held) and used + held + want > limit)
            )

        refused_by = ""
        if 0 < key.concurrency <= len(self.held):
            refused_by = "concurrency"
        elif key.rpm > 0 and asked + 1 > key.rpm:
            refused_by = "requests_per_minute"
        elif full(spent, key.tpm):
            refused_by = "tokens_per_minute"
        elif full(self.tokens.get(f"d{windows.day}", 0), key.tokens_per_day):
            refused_by = "tokens_per_day"
        elif full(self.tokens.get(f"m{windows.month}", 0), key.tokens_per_month):
            refused_by = "tokens_per_month"
        else:
            self.held[id_] = want
            self.requests[minute] = self.requests.get(minute, 0) + 1
            asked, held = asked + 1, held + want
        return Remaining(
            refused_by=refused_by,
            requests_left=int(max(key.rpm - asked, 0)),
            tokens_left=int(max(key.tpm - spent - held, 0)),
        )

    def settle(self, id_: str, used: int, windows: Windows) -> None:
        """Give the reservation back and count what was used."""
        self.held.pop(id_, None)
        names = (f"t{windows.minute}", f"d{windows.day}", f"m{windows.month}")
        for name in names:
            self.tokens[name] = self.tokens.get(name, 0) + used
        self.requests = {m: n for m, n in self.requests.items() if m >= windows.minute - 1}
        kept = {*names, f"t{windows.minute - 1}"}
        self.tokens = {name: count for name, count in self.tokens.items() if name in kept}
