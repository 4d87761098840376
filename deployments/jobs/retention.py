"""What stays in this host's store: generations become roots, and stop being roots, by the rule.

The records say which generations matter; the store's roots follow them. Collecting then frees what
nothing needs any more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from django.conf import settings
from django.db.models import Exists, Max, OuterRef, Q, QuerySet

from deployments.models import Generation, Trial
from mmadmin.core.errors import DiskFull
from mmadmin.core.generations.lifecycle import GenerationState
from mmadmin.core.generations.retention import Candidate, keep
from mmadmin.core.store import Store
from mmadmin.core.store.gc import Collected, collect

ROOT_KIND = "generation"


@dataclass(frozen=True, slots=True)
class Renewed:
    """How the roots changed."""

    kept: dict[str, str]
    """Why each kept generation is kept, by uid."""
    let_go: tuple[str, ...]


def renew_roots(store: Store, *, last: int | None = None, dry_run: bool = False) -> Renewed:
    """Make the store's generation roots those that the rule keeps; idempotent.

    `last` overrides how many of each deployment are kept. A generation whose object is not here
    (yet) gets no root; a root whose generation the records do not know is let go.
    """
    kept = keep(_candidates(last), now=time.time())
    before = {root.key: root for root in store.roots() if root.kind == ROOT_KIND}
    systems = dict(_systems())
    if not dry_run:
        for uid, reason in kept.items():
            system = systems[uid]
            root = before.get(uid)
            if store.has_object(system) and (root is None or root.reason != reason):
                try:
                    store.add_root(ROOT_KIND, uid, system, reason)
                except DiskFull:  # to free a full disk, an earlier reason is good enough
                    if root is None or root.object != system:
                        raise
    building = {
        f"{name}/{number}"
        for name, number in _here()
        .filter(state__in=[GenerationState.PLANNED, GenerationState.BUILDING])
        .values_list("deployment__name", "number")
    }
    let_go = tuple(sorted(before.keys() - kept.keys() - building))
    if not dry_run:
        for uid in let_go:
            store.remove_root(ROOT_KIND, uid)
    return Renewed(kept, let_go)


def kept_generations() -> list[Generation]:
    """What the rule keeps on this host, by deployment and number."""
    kept = keep(_candidates(None), now=time.time())
    rows = _here().exclude(system="").select_related("deployment")
    return [row for row in rows.order_by("deployment__name", "number") if row.uid in kept]


def tidy(store: Store) -> Collected:
    """Let go what the rule no longer keeps, and free what nothing needs."""
    renew_roots(store)
    return collect(store)


def _here() -> QuerySet[Generation]:
    return Generation.objects.filter(deployment__host__name=settings.HOST_NAME)


def _systems() -> list[tuple[str, str]]:
    rows = _here().exclude(system="").values_list("deployment__name", "number", "system")
    return [(f"{name}/{number}", system) for name, number, system in rows]


def _candidates(last: int | None) -> list[Candidate]:
    rows = (
        _here()
        .exclude(system="")
        .annotate(
            left_live_at=Max("transitions__at", filter=Q(transitions__before=GenerationState.LIVE)),
            on_trial=Exists(Trial.objects.active().filter(generation=OuterRef("pk"))),
        )
        .select_related("deployment")
    )
    return [
        Candidate(
            uid=row.uid,
            deployment=row.deployment.name,
            number=row.number,
            state=GenerationState(row.state),
            pinned=row.pinned,
            last_live_at=row.left_live_at.timestamp() if row.left_live_at else None,
            on_trial=row.on_trial,
            last=row.deployment.keep_generations if last is None else last,
            days=row.deployment.keep_days,
        )
        for row in rows
    ]
