"""A host and its worker: who works under its name, what the machine is, whether it is away.

A host's name belongs to one machine and `MM_HOME` at a time: that of the worker which holds it. The
hold is a lease that each report renews; a worker that ends gives it back.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from pathlib import Path

from django.conf import settings
from django.db.models import F, Q
from django.utils import timezone

from deployments.broker import feed
from deployments.jobs import lease
from deployments.models import (
    AWAY_AFTER,
    JOBS,
    Alarm,
    AlarmKind,
    Deployment,
    Generation,
    Host,
    Replica,
    ReplicaState,
)
from mmadmin.core.errors import Conflict
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.generations.lifecycle import JobState
from mmadmin.core.home import Home
from mmadmin.core.store import Store
from mmadmin.core.store.verify import absent

LEASE = timedelta(seconds=150)
"""More than two reports late: the holder has died without giving the name back."""
MACHINE_ID = Path("/etc/machine-id")
SUBJECT = "host"


def identity(home: Home) -> str:
    """Which machine and `MM_HOME` this is; the same after the folder was moved on the machine."""
    if not home.identity.exists():
        home.identity.write_text(secrets.token_hex(8), encoding="ascii")
    try:
        machine = MACHINE_ID.read_text(encoding="ascii").strip()
    except OSError:
        machine = ""
    own = home.identity.read_text(encoding="ascii").strip()
    return f"{own}@{machine or socket.gethostname()}"


def take(home: Home) -> Host:
    """Hold this machine's host name. Raises `Conflict` while another machine or home does."""
    me = identity(home)
    place = f"{socket.gethostname()}:{home.root}"[:255]
    host, _ = Host.objects.get_or_create(name=settings.HOST_NAME)
    free = Q(holder="") | Q(holder=me) | Q(seen_at=None) | Q(seen_at__lt=timezone.now() - LEASE)
    if Host.objects.filter(free, pk=host.pk).update(holder=me, holder_place=place):
        return host
    host.refresh_from_db()
    since = int((timezone.now() - host.seen_at).total_seconds()) if host.seen_at else 0
    raise Conflict(
        f"the host name `{host.name}` is held by another worker, on {host.holder_place}, which "
        f"reported {since} s ago",
        remedy="give this machine a name of its own (`mm set MM_HOST_NAME=…`), or end that worker",
    )


def give_back(home: Home) -> None:
    """Let another worker take the name."""
    Host.objects.filter(name=settings.HOST_NAME, holder=identity(home)).update(holder="")


def register(facts: HostFacts) -> Host:
    """Write the host's facts and renew the hold on its name. Raises `Conflict` as `take`."""
    host = take(settings.HOME)
    Host.objects.filter(pk=host.pk).update(facts=facts.as_json(), seen_at=timezone.now())
    feed.announce("host", host.pk)
    return host


def live_generations() -> list[Generation]:
    """What is live on this host."""
    live = Generation.objects.filter(
        deployment__live=F("pk"), deployment__host__name=settings.HOST_NAME
    )
    return list(live.select_related("deployment").order_by("deployment__name"))


def lacking(store: Store) -> dict[Generation, str]:
    """Live generations that need objects which are not in this host's store; one of those each."""
    found = {generation: absent(store, generation.system) for generation in live_generations()}
    return {generation: lost for generation, lost in found.items() if lost is not None}


def note_away() -> None:
    """An alarm for each live deployment whose host's worker is away, until it is back."""
    away = Deployment.objects.filter(
        live__isnull=False, host__seen_at__lt=timezone.now() - AWAY_AFTER
    ).select_related("host", "live")
    told = Alarm.objects.filter(kind=AlarmKind.HOST, cleared_at=None)
    for deployment in away:
        _, new = Alarm.objects.get_or_create(
            deployment=deployment,
            kind=AlarmKind.HOST,
            subject=SUBJECT,
            cleared_at=None,
            defaults={
                "generation": deployment.live,
                "message": f"the worker of the host {deployment.host} does not report",
            },
        )
        if new:
            feed.announce("deployment", deployment.pk, deployment=deployment.name)
    for alarm in told.exclude(deployment__in=away).select_related("deployment"):
        Alarm.objects.filter(pk=alarm.pk).update(cleared_at=timezone.now())
        feed.announce("deployment", alarm.deployment_id, deployment=alarm.deployment.name)


def forget_engines() -> int:
    """Take the engines of this host for ended: they ran in another place. Returns how many.

    The watch gives each live generation a new one, with another name and secret, so that no request
    goes to an engine of the old place.
    """
    return (
        Replica.objects.filter(host__name=settings.HOST_NAME)
        .exclude(state__in=(ReplicaState.STOPPED, ReplicaState.FAILED))
        .update(state=ReplicaState.STOPPED, stopped_at=timezone.now(), pid=None)
    )


def forget_place() -> None:
    """Take over records from another place: its engines, its jobs and its hold have ended."""
    forget_engines()
    error = Conflict("it was under way when the backup was made", remedy="start it again")
    for kind in JOBS:
        for job in kind.objects.active():
            lease.end(job, JobState.FAILED, error.as_json())
    Deployment.objects.update(hold_until=None)
    Host.objects.update(holder="", holder_place="")
