"""Host tasks: the newest of each kind, and one with its result."""

from __future__ import annotations

from django.conf import settings
from django.db.models import Max, QuerySet

from deployments.models import HostTask, Role, TaskKind, User
from deployments.queries.paging import require
from mmadmin.core.errors import NotFound


def host_tasks(actor: User, *, host: str = "") -> dict[str, HostTask]:
    """The newest task of each kind on a host, by default this one; hub searches left out."""
    require(actor)
    of_host = HostTask.objects.filter(host__name=host or settings.HOST_NAME)
    newest = of_host.exclude(kind=TaskKind.HUB_SEARCH).order_by().values("kind")
    rows = _tasks().filter(pk__in=newest.annotate(newest=Max("pk")).values("newest"))
    return {row.kind: row for row in rows}


def host_task(actor: User, task_id: int) -> HostTask:
    """One task, with its result once it has ended. Raises `NotFound`."""
    require(actor)
    found = _tasks().filter(pk=task_id).first()
    if found is None:
        raise NotFound(f"there is no task {task_id}")
    if found.kind == TaskKind.HUB_SEARCH:  # the host's token may see more than everybody may
        require(actor, Role.OPERATOR)
    return found


def examinations(actor: User) -> dict[int, HostTask]:
    """The doctor's newest examination of each host, by the host's id."""
    require(actor)
    newest = HostTask.objects.filter(kind=TaskKind.DOCTOR).order_by().values("host")
    rows = _tasks().filter(pk__in=newest.annotate(newest=Max("pk")).values("newest"))
    return {row.host_id: row for row in rows}


def _tasks() -> QuerySet[HostTask]:
    return HostTask.objects.select_related("actor", "host", "generation__deployment")
