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
from django.db.models import F
from django.db.models.functions import Coalesce
from django.utils import timezone

from deployments.broker import feed
from deployments.jobs import states
from deployments.models import Job
from mmadmin.core.errors import LeaseLost, StepFailed
from mmadmin.core.generations.lifecycle import GenerationState, JobState
from mmadmin.core.process_identity import ProcessIdentity

log = logging.getLogger(__name__)

LEASE_S = 20
"""A lease that is not extended ends after this."""
HEARTBEAT_S = 5

J = TypeVar("J", bound=Job)

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


def is_free(job: Job) -> bool:
    """True when nobody holds the job's lease."""
    if job.state == JobState.QUEUED:
        return True
    expired = job.lease_expires_at is None or job.lease_expires_at <= timezone.now()
    return job.state == JobState.RUNNING and (expired or is_dead(job.holder))


def claim(model: type[J], job_id: int) -> J | None:
    """Take the job, or None: it has ended, someone else holds it, or its attempts are used up."""
    job = model.objects.select_related("host").filter(pk=job_id).first()
    if job is None or not is_free(job):
        return None
    if job.attempts >= job.max_attempts:
        end(job, JobState.FAILED, KILLED.as_json())
        return None
    if job.waits:
        return None
    now = timezone.now()
    seen = model.objects.filter(
        pk=job.pk, state=job.state, fence=job.fence, lease_expires_at=job.lease_expires_at
    )
    taken = seen.move(
        JobState.RUNNING,
        fence=job.fence + 1,
        holder=me(),
        attempts=F("attempts") + 1,
        lease_expires_at=now + timedelta(seconds=LEASE_S),
        started_at=Coalesce(F("started_at"), now),
    )
    if not taken:
        return None
    job.refresh_from_db()
    feed.announce_job(job)
    return cast("J", job)


def extend(job: Job) -> None:
    """Extend the lease from now. Raises `LeaseLost`."""
    kept = _mine(job).update(lease_expires_at=timezone.now() + timedelta(seconds=LEASE_S))
    if not kept:
        raise lost(job)


def release(job: Job) -> None:
    """Give the job back unfinished: whoever comes next may take it at once."""
    _mine(job).update(lease_expires_at=timezone.now())


def sleep(job: Job) -> bool:
    """Let go of a job that rests: the sweeper hands it out again once it no longer waits.

    Its attempts start from zero. False when the lease went to someone else.
    """
    rests = _mine(job).move(
        JobState.QUEUED, lease_expires_at=None, holder="", attempts=0, enqueued_at=None
    )
    job.fell_asleep()
    feed.announce_job(job)
    return bool(rests)


def _mine(job: Job) -> Any:
    return type(job).objects.filter(pk=job.pk, fence=job.fence, state=JobState.RUNNING)


def lost(job: Job) -> LeaseLost:
    """The error of a worker whose lease went to another one."""
    return LeaseLost(f"{job.noun} {job.pk} went to another worker")


@contextmanager
def fenced(job: Job) -> Iterator[None]:
    """A transaction that only the lease's holder can commit. Raises `LeaseLost`.

    The job's row is written first, so its lock orders this transaction before or after a claim.
    A connection that idled through a long step is looked at before it is used.
    """
    connection.close_if_unusable_or_obsolete()
    with transaction.atomic():
        extend(job)
        yield


def write(job: Job, **values: Any) -> None:
    """Set fields of the job. Raises `LeaseLost`."""
    if not _mine(job).update(**values):
        raise lost(job)
    for name, value in values.items():
        setattr(job, name, value)


def end(job: Job, state: JobState, error: dict[str, Any] | None = None) -> bool:
    """End the job, and with it what depends on it; False when someone else moved it meanwhile."""
    now = timezone.now()
    with transaction.atomic():
        held = type(job).objects.filter(pk=job.pk, fence=job.fence)
        if not held.move(state, error=error, ended_at=now, lease_expires_at=None, holder=""):
            return False
        job.state, job.error, job.ended_at = state, error, now
        for move in job.broke_off(error) if state != JobState.SUCCEEDED else ():
            states.advance(
                move.generation_id,
                move.after,
                actor_id=move.actor_id,
                reason=states.message(error) if move.after == GenerationState.FAILED else "",
                only_from=move.only_from,
            )
    feed.announce_job(job)
    return True
