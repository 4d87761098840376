"""Who may look, and lists in pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from django.db.models import Model, QuerySet
from django.utils import timezone

from deployments.models import (
    GenerationReport,
    ReportKind,
    Role,
    User,
)
from mmadmin.core.errors import InvalidInput, Refused

PER_PAGE = 50


RECORDED = ("spec_toml", "lock", "graph", "host_facts")
"""What a generation's own page shows and lists do not: up to hundreds of kilobytes a row."""


T = TypeVar("T")


M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    rows: list[T]
    page: int
    """From 1."""
    pages: int
    total: int
    per_page: int


def require(actor: User, role: Role = Role.VIEWER) -> None:
    """Raise `Refused` unless the person is active and has at least this role."""
    if not actor.is_active or not actor.at_least(role):
        raise Refused(
            f"{actor.get_username()} may not see this: it requires the {role.value} role",
            remedy="ask an admin",
            role=role.value,
        )


def aware(moment: datetime) -> datetime:
    """The moment in UTC; one without a zone is. Raises `InvalidInput` beyond the calendar."""
    if not timezone.is_aware(moment):
        return moment.replace(tzinfo=UTC)
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise InvalidInput(f"{moment.isoformat()} is not in the calendar of UTC") from error


def paged(rows: QuerySet[M], page: int, per_page: int = PER_PAGE) -> Page[M]:
    """One page of a query; a page beyond the last is the last."""
    total = rows.count()
    pages = max(1, -(-total // per_page))
    page = min(max(1, page), pages)
    start = (page - 1) * per_page
    return Page(list(rows[start : start + per_page]), page, pages, total, per_page)


def recorded(*paths: str) -> list[str]:
    """Names of `RECORDED` behind each path (`live`, `target`; empty = the row's own), to defer."""
    return [f"{path}__{name}" if path else name for path in paths for name in RECORDED]


def reports_of(generations: Iterable[int], *kinds: ReportKind) -> Mapping[int, dict[str, Any]]:
    """Reports of these kinds: kind → data by the generation's id; empty where there is none."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in GenerationReport.objects.filter(generation__in=set(generations), kind__in=kinds):
        found[row.generation_id][row.kind] = row.content
    return found


def grouped(rows: Iterable[M], by: Any) -> dict[int, list[M]]:
    """Rows by what `by` says of each."""
    groups: dict[int, list[M]] = defaultdict(list)
    for row in rows:
        groups[by(row)].append(row)
    return groups
