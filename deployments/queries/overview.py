"""Deployments as they are now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Max, OuterRef, Q, QuerySet, Subquery, Sum
from django.utils import timezone

from deployments.models import (
    Activation,
    Alarm,
    AlarmKind,
    Build,
    Deployment,
    Generation,
    Replica,
    ReplicaState,
    ReportKind,
    Transition,
    Trial,
    UsageEvent,
    User,
)
from deployments.queries.lookups import no_deployment
from deployments.queries.paging import grouped, recorded, reports_of, require
from mmadmin.core.generations.lifecycle import ACTIVE_JOB, GenerationState

LIVE_WINDOW = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class DeploymentRow:
    """A deployment with what is live, what is under way, and how it did in the last hour."""

    deployment: Deployment
    live: Generation | None
    live_since: datetime | None
    newest: Generation | None
    generations: int
    """How many there are: none is ever removed, and no number left out."""
    activation: Activation | None
    """Queued or running."""
    builds: list[Build]
    """Queued or running ones, newest first."""
    replicas: list[Replica]
    """Those that are not stopped or failed, on trial or not."""
    trial: Trial | None
    """Waiting, open or ending."""
    last_activation: Activation | None
    """The newest that ended."""
    alarms: list[Alarm]
    """Open ones."""
    requests_1h: int
    failed_1h: int
    tokens_per_s: float | None
    """Mean generation speed of the requests of the last hour."""
    ttft_ms: int | None

    @property
    def build(self) -> Build | None:
        """The newest build that is queued or running."""
        return self.builds[0] if self.builds else None

    @property
    def serving(self) -> list[Replica]:
        """The replicas that clients are for."""
        return [replica for replica in self.replicas if replica.trial_id is None]

    @property
    def state(self) -> str:
        """live, activating, building, failed, stopped or new; of a live one what keeps it away."""
        if self.activation is not None:
            return "activating"
        if self.live is not None:
            if any(alarm.kind == AlarmKind.BYTES for alarm in self.alarms) and not self.serving:
                return "bytes missing"
            return "host away" if self.deployment.host.is_away else "live"
        if self.build is not None:
            return "building"
        if self.newest is None:
            return "new"
        return "failed" if self.newest.state == GenerationState.FAILED else "stopped"


def deployments_overview(actor: User, *, archived: bool = False) -> list[DeploymentRow]:
    """Every deployment, by name."""
    require(actor)
    return _rows(Deployment.objects.filter(archived_at__isnull=not archived))


def measured_memory(actor: User, rows: Iterable[DeploymentRow]) -> dict[int, list[dict[str, Any]]]:
    """What the engines of these rows were predicted and measured to hold, by generation id."""
    require(actor)
    running = {replica.generation_id for row in rows for replica in row.replicas}
    found = reports_of(running, ReportKind.PROBES)
    return {pk: (found[pk].get(ReportKind.PROBES) or {}).get("memory", []) for pk in running}


def deployment_names(actor: User) -> list[str]:
    """The names of all that are not archived, sorted."""
    require(actor)
    return list(
        Deployment.objects.filter(archived_at=None).order_by("name").values_list("name", flat=True)
    )


def deployment(actor: User, name: str) -> DeploymentRow:
    """One deployment, archived or not. Raises `NotFound`."""
    require(actor)
    rows = _rows(Deployment.objects.filter(name=name))
    if not rows:
        raise no_deployment(name)
    return rows[0]


def _rows(which: QuerySet[Deployment]) -> list[DeploymentRow]:
    ended = Activation.objects.filter(deployment=OuterRef("pk")).exclude(state__in=ACTIVE_JOB)
    found = list(
        which.select_related("host", "live__author", "live__deployment")
        .defer(*recorded("live"))
        .annotate(
            newest_id=Subquery(
                Generation.objects.filter(deployment=OuterRef("pk"))
                .order_by("-number")
                .values("pk")[:1]
            ),
            ended_id=Subquery(ended.order_by("-pk").values("pk")[:1]),
        )
        .order_by("name")
    )
    ids = [row.pk for row in found]
    live_ids = [row.live_id for row in found if row.live_id]
    newest = {
        g.deployment_id: g
        for g in Generation.objects.filter(pk__in=[row.newest_id for row in found])
        .select_related("author", "deployment")
        .defer(*recorded(""))
    }
    live_since = dict(
        Transition.objects.filter(generation__in=live_ids, after=GenerationState.LIVE)
        .values_list("generation")
        .annotate(since=Max("at"))
        .order_by()
    )
    activations = Activation.objects.select_related(
        "actor", "target__deployment", "previous__deployment", "deployment"
    ).defer(*recorded("target", "previous"))
    active = {
        it.deployment_id: it for it in activations.filter(deployment__in=ids, state__in=ACTIVE_JOB)
    }
    last = {
        it.deployment_id: it for it in activations.filter(pk__in=[row.ended_id for row in found])
    }
    builds = grouped(
        Build.objects.active()
        .filter(deployment__in=ids, dry_run=False)
        .select_related("generation__deployment", "actor", "deployment")
        .defer(*recorded("generation"), "spec_toml", "plan")
        .order_by("-pk"),
        lambda build: build.deployment_id,
    )
    replicas = grouped(
        Replica.objects.filter(generation__deployment__in=ids)
        .exclude(state__in=[ReplicaState.STOPPED, ReplicaState.FAILED])
        .select_related("generation__deployment", "host")
        .defer(*recorded("generation")),
        lambda replica: replica.generation.deployment_id,
    )
    alarms = grouped(
        Alarm.objects.filter(deployment__in=ids, cleared_at=None)
        .select_related("generation")
        .defer(*recorded("generation")),
        lambda alarm: alarm.deployment_id,
    )
    trials = {
        trial.deployment_id: trial
        for trial in Trial.objects.active()
        .filter(deployment__in=ids)
        .select_related("generation__deployment", "actor", "deployment")
    }
    speed = _last_hour([row.name for row in found])
    return [
        DeploymentRow(
            deployment=row,
            live=row.live,
            live_since=live_since.get(row.live_id) if row.live_id else None,
            newest=newest.get(row.pk),
            generations=newest[row.pk].number if row.pk in newest else 0,
            activation=active.get(row.pk),
            builds=builds[row.pk],
            replicas=replicas[row.pk],
            trial=trials.get(row.pk),
            last_activation=last.get(row.pk),
            alarms=alarms[row.pk],
            **speed[row.name],
        )
        for row in found
    ]


def _last_hour(names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    since = timezone.now() - LIVE_WINDOW
    empty: dict[str, Any] = {
        "requests_1h": 0,
        "failed_1h": 0,
        "tokens_per_s": None,
        "ttft_ms": None,
    }
    found: dict[str, dict[str, Any]] = defaultdict(lambda: dict(empty))
    events = (
        UsageEvent.objects.filter(deployment__in=names, at__gte=since)
        .values("deployment")
        .annotate(
            n=Count("id"),
            failed=Count("id", filter=Q(outcome="failed")),
            speed=Sum("tokens_per_s_milli", filter=Q(tokens_per_s_milli__gt=0)),
            fast=Count("id", filter=Q(tokens_per_s_milli__gt=0)),
            ttft=Sum("ttft_ms", filter=Q(ttft_ms__gt=0)),
            first=Count("id", filter=Q(ttft_ms__gt=0)),
        )
        .order_by()
    )
    for row in events:
        found[row["deployment"]] = {
            "requests_1h": row["n"],
            "failed_1h": row["failed"],
            "tokens_per_s": row["speed"] / row["fast"] / 1000 if row["fast"] else None,
            "ttft_ms": row["ttft"] // row["first"] if row["first"] else None,
        }
    return found
