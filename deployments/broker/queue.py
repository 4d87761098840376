"""Handing a job to its host's worker: after the commit, by id only, and never a reason to fail.

The row is the truth. A broker that is down loses nothing: `enqueued_at` stays empty, and the
sweeper hands the job over later.
"""

from __future__ import annotations

import logging

from django.db import transaction
from django.utils import timezone

from deployments.models import Activation, Browse, Build, Care, Trial

log = logging.getLogger(__name__)

AnyJob = Build | Activation | Trial | Browse | Care
TASKS: dict[type[AnyJob], str] = {
    Build: "deployments.tasks.run_build",
    Activation: "deployments.tasks.run_activation",
    Trial: "deployments.tasks.run_trial",
    Browse: "deployments.tasks.run_browse",
    Care: "deployments.tasks.run_care",
}


def enqueue_on_commit(job: AnyJob) -> None:
    """Send the job's id to its host's queue once the transaction has committed."""
    transaction.on_commit(lambda: send(job))


def send(job: AnyJob) -> bool:
    """Send the job's id now; False (and logged) when the broker does not take it."""
    from kombu.exceptions import OperationalError

    from mmadmin.celery import app

    model = type(job)
    try:
        app.send_task(TASKS[model], args=[job.pk], queue=job.host.queue, retry=False)
    except (OperationalError, OSError) as error:
        log.warning("%s %s waits for the broker: %s", model.__name__, job.pk, error)
        return False
    model._default_manager.filter(pk=job.pk).update(enqueued_at=timezone.now())  # noqa: SLF001
    return True
