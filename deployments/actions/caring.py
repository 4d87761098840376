"""Care for hosts: collecting and verifying a store, and the doctor."""

from __future__ import annotations

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from deployments.actions.acting import audit, require
from deployments.broker import feed
from deployments.broker.queue import enqueue_on_commit
from deployments.models import Care, CareKind, Host, Role, User
from mmadmin.core.errors import Conflict, InvalidInput, NotFound
from mmadmin.core.generations.lifecycle import JobState


def care(actor: User, kind: CareKind | str, *, host: str = "") -> Care:
    """Ask a host's worker (by default this host's) to collect, verify or examine."""
    require(actor, Role.OPERATOR)
    try:
        kind = CareKind(kind)
    except ValueError as error:
        raise InvalidInput(
            f"{kind!r} is no care for a host", remedy=f"use {', '.join(CareKind.values)}"
        ) from error
    name = host or settings.HOST_NAME
    on = Host.objects.filter(name=name).first()
    if on is None:
        raise NotFound(f"there is no host {name}", remedy="it appears when its worker starts")
    try:
        with transaction.atomic():
            job = Care.objects.create(kind=kind, host=on, actor=actor)
            enqueue_on_commit(job)
            audit(actor, f"host.{kind.value}", f"host:{name}", f"{kind.value} on {name}")
            _announce(job)
    except IntegrityError as error:
        raise Conflict(
            f"{kind.value} is under way on {name} already", remedy="wait for it, or cancel it"
        ) from error
    return job


def cancel_care(actor: User, care_id: int) -> Care:
    """Cancel it: at once when it waits, else at its worker's next step."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        job = Care.objects.select_related("host").filter(pk=care_id).first()
        if job is None:
            raise NotFound(f"there is no care {care_id}")
        now = timezone.now()
        waiting = Care.objects.filter(pk=job.pk, state=JobState.QUEUED).update(
            state=JobState.CANCELLED, cancel_requested_at=now, ended_at=now
        )
        running = Care.objects.filter(pk=job.pk, state=JobState.RUNNING)
        if not waiting and not running.update(cancel_requested_at=now):
            raise Conflict(f"{job.kind} has ended already ({job.state})")
        audit(actor, "host.cancel", f"host:{job.host.name}", f"cancel of {job.kind}")
        _announce(job)
    job.refresh_from_db()
    return job


def _announce(job: Care) -> None:
    transaction.on_commit(lambda: feed.announce("care", job.pk))
