"""Usage: sums, budgets, single requests."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from io import StringIO
from typing import Any, Literal

from django.db.models import F, Q, Sum
from django.utils import timezone

from deployments.models import (
    SUMS,
    Role,
    UsageBucket,
    UsageDay,
    UsageEvent,
    User,
)
from deployments.queries.keys import key_owners
from deployments.queries.paging import Page, aware, paged, require
from mmadmin.core.errors import InvalidInput, NotFound

By = Literal["hour", "day", "key", "owner", "deployment", "generation", "endpoint"]
GROUPS: dict[By, tuple[str, ...]] = {
    "hour": ("hour",),
    "day": ("hour",),
    "key": ("key_id",),
    "owner": ("key_id",),
    "deployment": ("deployment",),
    "generation": ("deployment", "generation"),
    "endpoint": ("endpoint",),
}


def usage(
    actor: User,
    *,
    since: datetime,
    until: datetime,
    deployment: str = "",
    key_id: str = "",
    generation: int | None = None,
    by: By = "hour",
) -> list[dict[str, Any]]:
    """Sums of usage from `since` to `until`, grouped by time, key, owner, deployment, generation.

    Every row holds the group's name(s) and the sums `requests`, `failed`, `cancelled`, `refused`,
    `prompt_tokens`, `completion_tokens`, `cached_tokens`, `reasoning_tokens`, `ttft_ms`,
    `duration_ms`; one of a key also its `owner`. Refused requests are not among `requests`.
    Keys and owners are for operators.
    """
    require(actor, Role.OPERATOR if by in {"key", "owner"} or key_id else Role.VIEWER)
    since, until = aware(since), aware(until)
    wanted: dict[str, Any] = {}
    if deployment:
        wanted["deployment"] = deployment
    if key_id:
        wanted["key_id"] = key_id
    if generation is not None:
        wanted["generation"] = generation
    group = GROUPS.get(by)
    if group is None:
        raise InvalidInput(f"usage cannot be grouped by {by!r}")
    sums = {name: Sum(name) for name in SUMS}
    of = _whole_days(since, until, "key" if by == "owner" else by, set(wanted))
    if of is not None:
        if by == "day":
            group = ("day",)
        days = UsageDay.objects.filter(of=of, day__gte=since, day__lt=until, **wanted)
        found = list(days.order_by(*group).values(*group).annotate(**sums))
    else:
        rows = UsageBucket.objects.filter(hour__gte=since, hour__lt=until, **wanted)
        found = list(rows.order_by(*group).values(*group).annotate(**sums))
        if by == "day":
            return _by_day(found)
    if by == "owner":
        return _by_owner(actor, found)
    if by == "key":
        owners = key_owners(actor, [row["key_id"] for row in found])
        return [row | {"owner": owners.get(row["key_id"], "")} for row in found]
    return found


def usage_csv(rows: Sequence[Mapping[str, Any]], by: By) -> str:
    """The sums as CSV, for spreadsheets: times are sums, to be divided by the requests."""
    names: Sequence[str] = {"day": ("day",), "owner": ("owner",), "key": ("key_id", "owner")}.get(
        by, GROUPS[by]
    )
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow([*names, *(f"{n}_sum" if n.endswith("_ms") else n for n in SUMS)])
    for row in rows:
        writer.writerow([_harmless(row[n]) for n in names] + [row[n] for n in SUMS])
    return text.getvalue()


def _harmless(value: object) -> str:
    """Text that no spreadsheet takes for a formula."""
    text = value.isoformat() if isinstance(value, datetime) else str(value)
    return f"'{text}" if text[:1] in {"=", "+", "-", "@"} else text


def _by_owner(actor: User, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sums of keys added up to those of their owners."""
    owners = key_owners(actor, [row["key_id"] for row in rows])
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        owner = owners.get(row["key_id"], "")
        into = found.setdefault(owner, {"owner": owner, **dict.fromkeys(SUMS, 0)})
        for name in SUMS:
            into[name] += row[name]
    return sorted(found.values(), key=lambda row: row["owner"])


def _whole_days(since: datetime, until: datetime, by: str, wanted: set[str]) -> str | None:
    """Which rows of the days hold the answer; None = only the hours do."""
    if since != _midnight(since) or (until != _midnight(until) and until <= timezone.now()):
        return None
    things = wanted | {
        "key": {"key_id"},
        "deployment": {"deployment"},
        "generation": {"deployment", "generation"},
        "day": set[str](),
    }.get(by, {by})
    return next((of for of, named in ROWS_OF_A_DAY.items() if named == things), None)


ROWS_OF_A_DAY: dict[str, set[str]] = {
    "all": set(),
    "deployment": {"deployment"},
    "generation": {"deployment", "generation"},
    "key": {"key_id"},
}
"""What `UsageDay.of` says → the fields that its rows tell apart."""


def _midnight(moment: datetime) -> datetime:
    """The beginning of its day in UTC."""
    return moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _by_day(hours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hours added up to days, where the rows of the days do not tell (a key's in a deployment)."""
    days: dict[datetime, dict[str, Any]] = {}
    for row in hours:
        day = row["hour"].replace(hour=0)
        into = days.setdefault(day, {"day": day, **dict.fromkeys(SUMS, 0)})
        for name in SUMS:
            into[name] += row[name]
    return list(days.values())


def budgets(actor: User, key_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Tokens that each key used today and this month (UTC), as (day, month).

    Requests that ended in the last seconds may not be recorded yet; the gate's own count is
    what refuses a request.
    """
    require(actor)
    today = timezone.now().replace(hour=0, minute=0, second=0, microsecond=0)
    tokens = Sum(F("prompt_tokens") + F("completion_tokens"))
    rows = (
        UsageBucket.objects.filter(key_id__in=key_ids, hour__gte=today.replace(day=1))
        .order_by()
        .values_list("key_id")
        .annotate(
            month=tokens,
            day=Sum(F("prompt_tokens") + F("completion_tokens"), filter=Q(hour__gte=today)),
        )
    )
    spent = {key_id: (day or 0, month or 0) for key_id, month, day in rows}
    return {key_id: spent.get(key_id, (0, 0)) for key_id in key_ids}


def request(actor: User, request_id: str) -> UsageEvent:
    """One finished request by its id (`x-request-id`): which generation answered it, and how.

    Its key is for operators.
    """
    require(actor)
    found = UsageEvent.objects.filter(pk=request_id).first()
    if found is None:
        raise NotFound(
            f"there is no request {request_id} in the usage records",
            remedy="one that has not ended, or ended just now, is not there yet",
        )
    if not actor.at_least(Role.OPERATOR):
        found.key_id = ""
    return found


def usage_events(
    actor: User, *, key_id: str = "", deployment: str = "", page: int = 1
) -> Page[UsageEvent]:
    """Single requests, newest first: of a key, of a deployment, or all."""
    require(actor, Role.OPERATOR)
    rows = UsageEvent.objects.order_by("-at")
    if key_id:
        rows = rows.filter(key_id=key_id)
    if deployment:
        rows = rows.filter(deployment=deployment)
    return paged(rows, page)
