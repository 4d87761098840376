"""Rows that are of use for days only are let go by their age.

Never history: generations, builds of generations, activations, their logs, the audit log, keys and
usage stay for good.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import Max
from django.utils import timezone

from deployments.models import Build, HostTask, Session, TaskKind

SEARCHES_KEPT = timedelta(days=7)
"""What a repository offered, and whether it fitted then."""
TASKS_KEPT = timedelta(days=30)
"""Other host tasks; the newest of each kind on each host stays."""
PLANS_KEPT = timedelta(days=30)
"""Plans that were only shown (dry runs), with their steps and lines."""


def prune(now: datetime | None = None) -> dict[str, int]:
    """Let go what is older than it is useful; how many rows of each. Any number of times."""
    now = now or timezone.now()
    searches = HostTask.objects.filter(kind=TaskKind.HUB_SEARCH)
    others = HostTask.objects.exclude(kind=TaskKind.HUB_SEARCH)
    by_kind = others.order_by().values("host", "kind").annotate(newest=Max("id"))
    newest = list(by_kind.values_list("newest", flat=True))
    old = {
        "sessions": Session.objects.filter(expire_date__lt=now),
        "hub searches": searches.filter(ended_at__lt=now - SEARCHES_KEPT),
        "host tasks": others.filter(ended_at__lt=now - TASKS_KEPT).exclude(pk__in=newest),
        "plans": Build.objects.filter(dry_run=True, ended_at__lt=now - PLANS_KEPT),
    }
    gone = {}
    for what, rows in old.items():
        _, each = rows.delete()
        gone[what] = each.get(rows.model._meta.label, 0)  # noqa: SLF001
    return gone
