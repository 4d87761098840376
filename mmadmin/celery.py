"""The Celery application: one queue a host, JSON only, at-least-once delivery.

A message carries ids only; whether work is still to be done, and who does it, is decided in the
database (lease and fencing token), so a message may come twice, late or never.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from celery import Celery
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mmadmin.settings")

for _chatty in ("celery.app.trace", "celery.worker.strategy", "celery.beat"):
    # Every beat would write its lines; failures are errors and are still logged.
    logging.getLogger(_chatty).setLevel(logging.WARNING)

VISIBILITY_TIMEOUT_S = 3600
"""After this Redis delivers an unacknowledged message again; the lease makes that harmless."""

SWEEP_S = 5

HOST_QUEUE = f"host.{settings.HOST_NAME}"
DEFAULT_QUEUE = "default"


def broker_url(redis_url: str) -> str:
    """A Redis address as kombu wants it: `unix://` is `redis+socket://` there."""
    if redis_url.startswith("unix://"):
        return "redis+socket://" + redis_url.removeprefix("unix://")
    return redis_url


def every(task: str, seconds: float, queue: str) -> dict[str, Any]:
    """A line of the schedule; a run that waited longer than its interval is dropped."""
    return {
        "task": f"deployments.tasks.{task}",
        "schedule": seconds,
        "options": {"queue": queue, "expires": seconds},
    }


app = Celery("mmadmin")
app.conf.update(
    broker_url=broker_url(settings.REDIS_URL),
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options={
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        "socket_connect_timeout": 2,
        "socket_timeout": 30,
        # a sender never waits for a broker that is down: the sweeper sends later
        "max_retries": 1,
        "interval_start": 0,
        "interval_step": 0.05,
        "interval_max": 0.1,
    },
    result_backend=None,
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    task_acks_late=True,
    task_default_queue=DEFAULT_QUEUE,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    task_track_started=False,
    timezone="UTC",
    beat_schedule={
        "sweep": every("sweep", SWEEP_S, DEFAULT_QUEUE),
        "collect-usage": every("collect_usage", 5, DEFAULT_QUEUE),
        "publish": every("publish", 10, DEFAULT_QUEUE),
        "watch-engines": every("watch_engines", 10, HOST_QUEUE),
        "host-facts": every("register_host", 60, HOST_QUEUE),
        "prune-rows": every("prune_rows", 3600, DEFAULT_QUEUE),
        "tidy-store": every("tidy_store", 86400, HOST_QUEUE),
    },
    beat_max_loop_interval=5,
    beat_scheduler="mmadmin.beat:Scheduler",
)
app.autodiscover_tasks(["deployments"])
