"""Who may work on a job, and for how long.

A worker claims a job by compare-and-set: it takes the next fencing token and a lease of `LEASE_S`
seconds, which its heartbeat extends. Every later write of the worker is guarded by the token, so
that a worker that was thought dead and comes back writes nothing (`LeaseLost`). A lease ends
early when its holder is seen to be dead on this machine. Attempts are counted at the claim: a job
that kills its worker each time ends as failed, not in a loop.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar, cast

from django.db import connection, transaction
from django.db.models import F, Q
from django.db.models.functions import Coalesce
from django.utils import timezone

from deployments.broker import feed
from deployments.broker.queue import AnyJob
from deployments.jobs import states
from deployments.models import (
    Activation,
    Browse,
    Build,
    BuildStep,
    Care,
    Deployment,
    StepState,
    Trial,
)
from mmadmin.core.errors import LeaseLost, StepFailed
from mmadmin.core.generations.lifecycle import GenerationState, JobState
from mmadmin.core.process_identity import ProcessIdentity

log = logging.getLogger(__name__)

LEASE_S = 20
"""A lease that is not extended ends after this."""
HEARTBEAT_S = 5

J = TypeVar("J", Build, Activation, Trial, Browse, Care)

KILLED = StepFailed(
    "worker killed (likely out of memory)",
    remedy="look at the host's kernel log and free memory, then try again",
)


@lru_cache(maxsize=2)
def _me(pid: int) -> str:
    it = ProcessIdentity.me()
    return f"{socket.gethostname()}:{pid}:{it.started}:{it.boot}"


def me() -> str:
    """The present process as the holder of a lease.

    Its start is counted from the machine's boot: a time of day would move with the clock, and
    every holder would look dead after a correction.
    """
    return _me(os.getpid())


def is_dead(holder: str) -> bool:
    """True when the holder was a process of this machine that certainly does not run any more."""
    machine, *rest = holder.split(":")
    if machine != socket.gethostname() or len(rest) != 3:  # noqa: PLR2004 (pid, start, boot)
        return False
    pid, started, boot = rest
    if not (pid.isdigit() and started.isdigit()):
        return False
    return not ProcessIdentity(int(pid), int(started), boot).alive


def is_free(job: AnyJob) -> bool:
    """True when nobody holds the job's lease."""
    if job.state == JobState.QUEUED:
        return True
    expired = job.lease_expires_at is None or job.lease_expires_at <= timezone.now()
    return job.state == JobState.RUNNING and (expired or is_dead(job.holder))


def claim(model: type[J], job_id: int) -> J | None:
    """Take the job, or None: it has ended, someone else holds it, or its attempts are used up."""
    job = model._default_manager.select_related("host").filter(pk=job_id).first()  # noqa: SLF001
    if job is None or not is_free(job):
        return None
    if job.attempts >= job.max_attempts:
        end(job, JobState.FAILED, KILLED.as_json())
        return None
    if isinstance(job, Build) and job.crowded_out_by():
        return None
    if isinstance(job, Trial) and job.asleep:
        return None
    now = timezone.now()
    taken = model._default_manager.filter(  # noqa: SLF001
        pk=job.pk, state=job.state, fence=job.fence, lease_expires_at=job.lease_expires_at
    ).update(
        state=JobState.RUNNING,
        fence=job.fence + 1,
        holder=me(),
        attempts=F("attempts") + 1,
        lease_expires_at=now + timedelta(seconds=LEASE_S),
        started_at=Coalesce(F("started_at"), now),
    )
    if not taken:
        return None
    job.refresh_from_db()
    announce(job)
    return job


def extend(job: AnyJob) -> None:
    """Extend the lease from now. Raises `LeaseLost`."""
    kept = _mine(job).update(lease_expires_at=timezone.now() + timedelta(seconds=LEASE_S))
    if not kept:
        raise lost(job)


def release(job: AnyJob) -> None:
    """Give the job back unfinished: whoever comes next may take it at once."""
    _mine(job).update(lease_expires_at=timezone.now())


def sleep(trial: Trial) -> bool:
    """Let go of an open trial until its time is over: then the sweeper hands it out again.

    Its attempts begin anew. One that a person ended in this moment wakes at once. False when the
    lease went to someone else.
    """
    rests = _mine(trial).update(
        state=JobState.QUEUED, lease_expires_at=None, holder="", attempts=0, enqueued_at=None
    )
    ended = Trial.objects.filter(
        pk=trial.pk, state=JobState.QUEUED, cancel_requested_at__isnull=False
    )
    ended.update(ends_at=timezone.now())
    announce(trial)
    return bool(rests)


def _mine(job: AnyJob) -> Any:
    manager = cast("Any", type(job))._default_manager  # noqa: SLF001
    return manager.filter(pk=job.pk, fence=job.fence, state=JobState.RUNNING)


def lost(job: AnyJob) -> LeaseLost:
    """The error of a worker whose lease went to another one."""
    return LeaseLost(f"{type(job).__name__.lower()} {job.pk} went to another worker")


@contextmanager
def fenced(job: AnyJob) -> Iterator[None]:
    """A transaction that only the lease's holder can commit. Raises `LeaseLost`.

    The job's row is written first, so its lock orders this transaction before or after a claim.
    A connection that idled through a long step is looked at before it is used.
    """
    connection.close_if_unusable_or_obsolete()
    with transaction.atomic():
        extend(job)
        yield


def write(job: AnyJob, **values: Any) -> None:
    """Set fields of the job. Raises `LeaseLost`."""
    if not _mine(job).update(**values):
        raise lost(job)
    for name, value in values.items():
        setattr(job, name, value)


def end(job: AnyJob, state: JobState, error: dict[str, Any] | None = None) -> bool:
    """End the job, and with it what depends on it; False when someone else moved it meanwhile."""
    now = timezone.now()
    manager = cast("Any", type(job))._default_manager  # noqa: SLF001
    with transaction.atomic():
        ended = manager.filter(
            pk=job.pk, fence=job.fence, state__in=[JobState.QUEUED, JobState.RUNNING]
        ).update(state=state, error=error, ended_at=now, lease_expires_at=None, holder="")
        if not ended:
            return False
        job.state, job.error, job.ended_at = state, error, now
        if state != JobState.SUCCEEDED and isinstance(job, Build):
            _end_build(job, error)
        if state != JobState.SUCCEEDED and isinstance(job, Activation):
            _end_activation(job, error)
    announce(job)
    return True


def _end_build(build: Build, error: dict[str, Any] | None) -> None:
    """A build that did not succeed: its open steps end, its generation fails in words."""
    cancelled = build.state == JobState.CANCELLED
    begun = Q(state=StepState.RUNNING) | ~Q(waits_for="")
    BuildStep.objects.filter(begun, build=build).update(
        state=StepState.CANCELLED if cancelled else StepState.FAILED,
        waits_for="",
        error=error,
        ended_at=timezone.now(),
    )
    if build.generation_id is not None:
        states.advance(
            build.generation_id,
            GenerationState.FAILED,
            actor_id=build.actor_id if cancelled else None,
            reason=states.words(error),
            only_from=(GenerationState.PLANNED, GenerationState.BUILDING),
        )


def _end_activation(activation: Activation, error: dict[str, Any] | None) -> None:
    """One that broke off leaves no generation half-way; the watch ends engines nobody wants."""
    if activation.target_id is not None:
        states.advance(
            activation.target_id,
            GenerationState.FAILED,
            reason=states.words(error),
            only_from=(GenerationState.STARTING, GenerationState.PROBING),
        )
    live = Deployment.objects.values_list("live", flat=True).get(pk=activation.deployment_id)
    if activation.previous_id is not None and activation.previous_id != live:
        states.advance(
            activation.previous_id,
            GenerationState.RETIRED,
            only_from=(GenerationState.DRAINING,),
        )


def announce(job: AnyJob) -> None:
    """Tell open pages that the job changed, once that is committed."""
    kind = type(job).__name__.lower()
    deployment = None if isinstance(job, Browse | Care) else job.deployment
    name = deployment.name if deployment else ""
    transaction.on_commit(
        lambda: feed.announce(
            kind,
            job.pk,
            deployment=name,
            build=job.pk if isinstance(job, Build) else None,
            activation=job.pk if isinstance(job, Activation) else None,
        )
    )
