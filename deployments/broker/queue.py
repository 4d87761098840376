"""Handing a job to its host's worker: after the commit, by id only, and never a reason to fail.

The row is the truth. A broker that is down loses nothing: `enqueued_at` stays empty, and the
sweeper hands the job over later.
"""

from __future__ import annotations

import logging

from django.db import transaction
from django.utils import timezone

from deployments.models import Job

log = logging.getLogger(__name__)


def enqueue_on_commit(job: Job) -> None:
    """Send the job's id to its host's queue once the transaction has committed."""
    transaction.on_commit(lambda: send(job))


def send(job: Job) -> bool:
    """Send the job's id now; False (and logged) when the broker does not take it."""
    from kombu.exceptions import OperationalError

    from mmadmin.celery import app

    task = f"deployments.tasks.run_{job.noun}"
    try:
        app.send_task(task, args=[job.pk], queue=job.host.queue, retry=False)
    except (OperationalError, OSError) as error:
        log.warning("%s %s waits for the broker: %s", job.noun, job.pk, error)
        return False
    type(job).objects.filter(pk=job.pk).update(enqueued_at=timezone.now())
    return True
