"""Usage: requests, tokens, latency and failures over time; as charts, a table and CSV."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, cast

from django.http import HttpRequest, HttpResponse
from django.utils import timezone

from deployments import queries
from deployments.drawing.chart import Chart, Series, draw
from deployments.models import Role, User
from deployments.templatetags.mm import brief, milliseconds
from deployments.views.page import page, person, show

SPANS: dict[str, tuple[str, timedelta, Literal["hour", "day"]]] = {
    "24h": ("24 hours", timedelta(hours=24), "hour"),
    "7d": ("7 days", timedelta(days=7), "hour"),
    "30d": ("30 days", timedelta(days=30), "day"),
    "90d": ("90 days", timedelta(days=90), "day"),
}
FRESH_S = 60.0
SHOWN = 50
"""Rows of the table; the CSV has them all."""
_answers: dict[Wanted, tuple[float, list[dict[str, Any]], list[Chart]]] = {}
GROUPS = (
    ("deployment", "deployment"),
    ("generation", "generation"),
    ("owner", "owner"),
    ("key", "key"),
    ("day", "day"),
)
COLUMNS = (
    "requests",
    "failed",
    "refused",
    "cancelled",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "reasoning_tokens",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is looked at."""

    span: str
    deployment: str
    key_id: str
    by: queries.By
    since: datetime
    until: datetime

    @property
    def of_keys(self) -> bool:
        """True when the answer tells keys apart."""
        return self.by == "key" or bool(self.key_id)

    @classmethod
    def of(cls, request: HttpRequest) -> Wanted:
        """From the address; nonsense is the default."""
        span = request.GET.get("span", "7d")
        span = span if span in SPANS else "7d"
        by = request.GET.get("by", "deployment")
        _, length, step = SPANS[span]
        until = timezone.now().replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        since = until - length
        if step == "day":
            since = since.replace(hour=0)
        return cls(
            span,
            request.GET.get("deployment", ""),
            request.GET.get("key", "").removeprefix("sk-mm-"),
            cast("queries.By", by if by in dict(GROUPS) else "deployment"),
            since,
            until,
        )


def of_key(key_id: str) -> Wanted:
    """What one key's page shows: its last 30 days."""
    until = timezone.now().replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    since = (until - SPANS["30d"][1]).replace(hour=0)
    return Wanted("30d", "", key_id, "deployment", since, until)


def _sums(me: User, wanted: Wanted, by: queries.By) -> list[dict[str, Any]]:
    return queries.usage(
        me,
        since=wanted.since,
        until=wanted.until,
        deployment=wanted.deployment,
        key_id=wanted.key_id,
        by=by,
    )


def charts(me: User, wanted: Wanted) -> list[Chart]:
    """Requests, tokens and latency over the span."""
    step = SPANS[wanted.span][2]
    rows = _sums(me, wanted, step)
    found = {row[step]: row for row in rows}
    length = timedelta(hours=1) if step == "hour" else timedelta(days=1)
    times = list(_times(wanted.since, wanted.until, length))
    each = [found.get(moment, {}) for moment in times]
    return [
        draw("requests", "Requests", times, _requests(each), format_value=brief),
        draw("tokens", "Tokens", times, _tokens(each), format_value=brief),
        draw(
            "latency", "Mean latency", times, _latency(each), format_value=milliseconds, lines=True
        ),
    ]


def _times(since: datetime, until: datetime, length: timedelta) -> Iterator[datetime]:
    while since < until:
        yield since
        since += length


def _requests(each: Sequence[Mapping[str, Any]]) -> list[Series]:
    def of(name: str) -> list[int]:
        return [row.get(name, 0) for row in each]

    asked, failed, cancelled = of("requests"), of("failed"), of("cancelled")
    good = [a - b - c for a, b, c in zip(asked, failed, cancelled, strict=True)]
    return [
        Series("succeeded", good, "c0"),
        Series("cancelled", cancelled, "c1"),
        Series("refused", of("refused"), "c2"),
        Series("failed", failed, "cbad"),
    ]


def _tokens(each: Sequence[Mapping[str, Any]]) -> list[Series]:
    return [
        Series("prompt", [row.get("prompt_tokens", 0) for row in each], "c0"),
        Series("output", [row.get("completion_tokens", 0) for row in each], "c1"),
    ]


def _latency(each: Sequence[Mapping[str, Any]]) -> list[Series]:
    def mean(name: str) -> list[float]:
        return [row.get(name, 0) / row["requests"] if row.get("requests") else 0 for row in each]

    return [
        Series("time to first token", mean("ttft_ms"), "l0"),
        Series("total latency", mean("duration_ms"), "l1"),
    ]


def table(me: User, wanted: Wanted) -> list[dict[str, Any]]:
    """The sums, largest first; days newest first."""
    rows = _sums(me, wanted, wanted.by)
    for row in rows:
        n = row["requests"] or 1
        row["mean_ttft_ms"], row["mean_ms"] = row["ttft_ms"] / n, row["duration_ms"] / n
        row["tokens"] = row["prompt_tokens"] + row["completion_tokens"]
    if wanted.by == "day":
        return rows[::-1]
    return sorted(rows, key=lambda row: -row["tokens"])


@page
def usage(request: HttpRequest) -> HttpResponse:
    """The page, or the same table as CSV."""
    me = person(request)
    wanted = Wanted.of(request)
    if "csv" in request.GET:
        return _csv(table(me, wanted), wanted)
    rows, drawn = _counted(me, wanted)
    sums = {name: sum(row[name] for row in rows) for name in (*COLUMNS, "tokens", "ttft_ms")}
    context = {
        "nav": "usage",
        "wanted": wanted,
        "charts": drawn,
        "rows": rows[:SHOWN],
        "more": max(0, len(rows) - SHOWN),
        "sums": sums,
        "ttft": sums["ttft_ms"] / sums["requests"] if sums["requests"] else None,
        "spans": [(name, label) for name, (label, _, _) in SPANS.items()],
        "groups": [
            (by, word)
            for by, word in GROUPS
            if by not in {"key", "owner"} or me.at_least(Role.OPERATOR)
        ],
        "names": queries.deployment_names(me),
    }
    return show(request, "usage/page.html", context)


def _counted(me: User, wanted: Wanted) -> tuple[list[dict[str, Any]], list[Chart]]:
    """Table and charts, counted at most once a minute for the same question."""
    queries.require(me, Role.OPERATOR if wanted.of_keys else Role.VIEWER)
    now = time.monotonic()
    known = _answers.get(wanted)
    if known is None or now - known[0] > FRESH_S:
        for old in [w for w, (then, _, _) in _answers.items() if now - then > FRESH_S]:
            _answers.pop(old, None)
        known = _answers[wanted] = (now, table(me, wanted), charts(me, wanted))
    return known[1], known[2]


def _csv(rows: list[dict[str, Any]], wanted: Wanted) -> HttpResponse:
    text = queries.usage_csv(rows, wanted.by)
    answer = HttpResponse(text, content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = f'attachment; filename="usage-{wanted.span}.csv"'
    return answer
