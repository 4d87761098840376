"""The Celery tasks: each takes ids only, may run twice at once, and may be killed anywhere."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from celery import shared_task
from celery.signals import worker_init, worker_process_init, worker_ready, worker_shutdown
from django.conf import settings
from django.db import close_old_connections, connection
from django.utils.module_loading import import_string

from deployments.broker import feed
from deployments.broker.queue import send
from deployments.jobs import (
    activations,
    builds,
    host_tasks,
    hosts,
    prune,
    retention,
    sweeper,
    trials,
    usage,
    watch,
)
from deployments.jobs.recorder import Parent, recording
from deployments.models import Activation, Build, HostTask, Trial
from mmadmin.core import catalog
from mmadmin.core.errors import Conflict
from mmadmin.host.facts import compiler

log = logging.getLogger(__name__)


def machine() -> Any:
    """What jobs touch the machine with (`settings.MACHINE`)."""
    return import_string(settings.MACHINE)()


@shared_task
def run_build(build_id: int) -> None:
    """Build a generation, or only plan it, and record how it ended."""
    with recording(Build, build_id) as recorder:
        if recorder is None:  # it has ended, another worker holds it, or no slot is free
            return
        host_id = recorder.job.host_id
        builds.run(recorder, machine())
    if (waiting := builds.next_build(host_id)) is not None:
        send(waiting)


@shared_task
def run_activation(activation_id: int) -> None:
    """Make a generation live (or take it down), and record how it ended."""
    with recording(Activation, activation_id) as recorder:
        if recorder is None:
            return
        activations.run(recorder, machine())


@shared_task
def run_trial(trial_id: int) -> None:
    """Start a generation beside the live one, or end it when its time is over."""
    with recording(Trial, trial_id) as recorder:
        if recorder is None:  # it sleeps, it has ended, or another worker holds it
            return
        trials.run(recorder, machine())


@shared_task
def run_task(task_id: int) -> None:
    """Do a small piece of work on this host, and record what came of it."""
    with recording(HostTask, task_id) as recorder:
        if recorder is None:
            return
        host_tasks.run(recorder, machine())


@shared_task
def sweep() -> None:
    """Hand out jobs that nobody works on."""
    sweeper.sweep()


@shared_task
def publish() -> None:
    """Repeat the gate's snapshot where it is missing or old."""
    feed.publish_snapshot(force=False)


@shared_task
def collect_usage() -> None:
    """Take the gates' usage records."""
    usage.collect()


@shared_task
def register_host() -> None:
    """Write this machine's facts; a worker whose name another one took in its absence ends."""
    try:
        hosts.register(machine().facts())
    except Conflict as error:
        log.error("%s: this worker ends", error.message)  # noqa: TRY400 (no bug)
        os.kill(Parent.pid or os.getpid(), signal.SIGTERM)


@shared_task
def watch_engines() -> None:
    """Look whether what should run does run."""
    watch.watch(machine())


@shared_task
def tidy_store() -> None:
    """Let go what the keep rule no longer keeps, and free what nothing needs."""
    retention.tidy(machine().store())


@shared_task
def prune_rows() -> None:
    """Let go rows that were of use for days only."""
    prune.prune()


@worker_init.connect
def _before_the_fork(**_: Any) -> None:
    """What the first job of every pool process would import and ask for, once for all of them.

    A worker without the right to its host's name ends here, before it takes any job.
    """
    try:
        hosts.take(settings.HOME)
    except Conflict as error:
        raise SystemExit(f"{error.message}\n{error.remedy}") from None
    connection.close()
    machine()
    catalog.engines()
    catalog.recipes()
    compiler()


@worker_shutdown.connect
def _give_name_back(**_: Any) -> None:
    """Another machine may have the host's name now."""
    hosts.give_back(settings.HOME)


@worker_process_init.connect
def _know_parent(**_: Any) -> None:
    """Jobs of a pool process end with their worker."""
    Parent.pid = os.getppid()


@worker_ready.connect
def _worker_is_ready(**_: Any) -> None:
    """Report the machine, tell the gate, and take up what an earlier worker left."""
    close_old_connections()
    hosts.register(machine().facts())
    watch.seat_the_unserved(machine())
    feed.publish_snapshot()
    sweeper.sweep()
