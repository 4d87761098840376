"""Generations on trial."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Exists, F, OuterRef, QuerySet
from django.utils import timezone

from deployments.models import Generation, Role, Trial, User
from deployments.queries.paging import Page, paged, require
from mmadmin.core.errors import NotFound
from mmadmin.core.generations.lifecycle import JobState


def trials(actor: User, *, name: str = "", number: int = 0, page: int = 1) -> Page[Trial]:
    """Trials, newest first; of one deployment, one of its generations, or all."""
    require(actor)
    rows = _trials()
    if name:
        rows = rows.filter(deployment__name=name)
    return paged(rows.filter(generation__number=number) if number else rows, page)


def trial(actor: User, trial_id: int) -> Trial:
    """One trial. Raises `NotFound`."""
    require(actor)
    found = _trials().filter(pk=trial_id).first()
    if found is None:
        raise NotFound(f"there is no trial {trial_id}")
    return found


NEWS = timedelta(minutes=15)


def trials_just_failed(actor: User) -> list[Trial]:
    """Those that failed a moment ago, and that no later one of their deployment has followed."""
    require(actor)
    later = Trial.objects.filter(deployment=OuterRef("deployment"), pk__gt=OuterRef("pk"))
    failed = _trials().filter(
        state__in=[JobState.FAILED, JobState.ERRORED], ended_at__gt=timezone.now() - NEWS
    )
    return list(failed.exclude(Exists(later)))


TRYABLE_SHOWN = 200


def tryable(actor: User) -> dict[str, list[Generation]]:
    """What an operator could put on trial, newest first: by deployments that have a live one.

    One with a trial already is left out.
    """
    require(actor, Role.OPERATOR)
    busy = Trial.objects.active().values("deployment")
    rows = (
        Generation.objects.filter(deployment__archived_at=None, deployment__live__isnull=False)
        .exclude(deployment__in=busy)
        .exclude(pk=F("deployment__live"))
        .exclude(system="")
        .select_related("deployment")
        .only("number", "reason", "deployment__name")
        .order_by("-pk")[:TRYABLE_SHOWN]
    )
    found: dict[str, list[Generation]] = {}
    for row in rows:
        found.setdefault(row.deployment.name, []).append(row)
    return dict(sorted(found.items()))


def _trials() -> QuerySet[Trial]:
    return Trial.objects.select_related(
        "deployment__live", "generation__deployment", "actor", "host"
    )
