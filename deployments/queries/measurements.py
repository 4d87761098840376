"""What was measured of a deployment's generations, side by side: by their probes, and in use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.utils import timezone

from deployments.models import Generation, ReportKind, User
from deployments.queries.lookups import deployment_named
from deployments.queries.paging import Page, paged, recorded, reports_of, require
from deployments.queries.usage_records import usage

ROWS = 20
IN_USE = timedelta(days=90)
WHOLE = re.compile(r"GPU \d+|main memory")
"""Parts of a memory report that are all of a device, not a piece of it."""


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One generation's figures; None = it was not measured, or not used."""

    generation: Generation
    is_live: bool
    answer_tokens_per_s_milli: int | None
    """Of one request on an idle engine, as its probes measured it; so are the next four."""
    prompt_tokens_per_s_milli: int | None
    ttft_ms: int | None
    load_ms: int | None
    memory_bytes: int | None
    requests: int
    """Of clients, in the last 90 days; so are the next two."""
    failed: int
    used_ttft_ms: int | None
    """Mean time to the first token."""


def measured(actor: User, name: str, *, page: int = 1) -> Page[MeasuredRow]:
    """The generations that were probed, newest first. Raises `NotFound`."""
    require(actor)
    of = deployment_named(name)
    probed = (
        of.generations.filter(reports__kind=ReportKind.PROBES)
        .select_related("author", "deployment")
        .defer(*recorded(""))
    )
    found = paged(probed, page, ROWS)
    until = timezone.now().replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    since = (until - IN_USE).replace(hour=0)
    sums = usage(actor, since=since, until=until, deployment=name, by="generation")
    used = {row["generation"]: row for row in sums}
    reports = reports_of((g.pk for g in found.rows), ReportKind.PROBES)
    rows = [
        _row(
            g,
            reports[g.pk].get(ReportKind.PROBES) or {},
            used.get(g.number),
            is_live=g.pk == of.live_id,
        )
        for g in found.rows
    ]
    return Page(rows, found.page, found.pages, found.total, found.per_page)


def _row(
    generation: Generation,
    report: Mapping[str, Any],
    used: Mapping[str, Any] | None,
    *,
    is_live: bool,
) -> MeasuredRow:
    figures = report.get("measured") or {}
    whole = [
        int(row["measured"]) for row in report.get("memory") or [] if WHOLE.fullmatch(row["part"])
    ]
    return MeasuredRow(
        generation=generation,
        is_live=is_live,
        answer_tokens_per_s_milli=figures.get("generation_tokens_per_s_milli"),
        prompt_tokens_per_s_milli=figures.get("prompt_tokens_per_s_milli"),
        ttft_ms=figures.get("ttft_ms"),
        load_ms=figures.get("load_ms"),
        memory_bytes=sum(whole) if whole else None,
        requests=used["requests"] if used else 0,
        failed=used["failed"] if used else 0,
        used_ttft_ms=used["ttft_ms"] // used["requests"] if used and used["requests"] else None,
    )
