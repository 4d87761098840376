"""Jobs that nobody works on: handed to the workers (again), or ended when they had their chances.

Runs on a timer, anywhere, any number of times: all it does is decided by the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db.models import Q
from django.utils import timezone

from deployments.broker import feed
from deployments.broker.queue import send
from deployments.jobs import hosts, lease
from deployments.models import JOBS, Job
from mmadmin.core.generations.lifecycle import JobState

UNSENT_AFTER_S = 3
"""An enqueue on commit takes milliseconds: a row still without it by then was never sent."""
RESEND_AFTER_S = 30
"""A message that was sent and led to nothing for so long may be lost; a second one is harmless."""
RETAKE_AFTER_S = 10
"""A job whose worker died is sent again this often until someone takes it."""


def sweep() -> int:
    """Look at every job that has not ended; returns how many were handed over or ended.

    Notes that it ran, for the doctor, and which hosts are away.
    """
    feed.note_sweep()
    hosts.note_away()
    return sum(_attend(job) for job in _due(timezone.now()))


def _due(now: datetime) -> Iterator[Job]:
    unsent = Q(enqueued_at=None, created_at__lt=now - timedelta(seconds=UNSENT_AFTER_S))
    stale = Q(enqueued_at__lt=now - timedelta(seconds=RESEND_AFTER_S))
    orphaned = Q(enqueued_at=None) | Q(enqueued_at__lt=now - timedelta(seconds=RETAKE_AFTER_S))
    waiting = Q(state=JobState.QUEUED) & (unsent | stale)
    running = Q(state=JobState.RUNNING) & orphaned
    due = waiting | running
    for kind in JOBS:
        yield from kind.objects.filter(due).select_related("host")


def _attend(job: Job) -> bool:
    if not lease.is_free(job) or job.waits:
        return False
    if job.attempts >= job.max_attempts:
        return lease.end(job, JobState.FAILED, lease.KILLED.as_json())
    return send(job)
