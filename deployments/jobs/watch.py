"""Whether what should run does run: engines that nobody wants any more, and replicas that died."""

from __future__ import annotations

import logging
from typing import Protocol

from django.conf import settings
from django.utils import timezone

from deployments.models import Activation, Replica, ReplicaState
from mmadmin.core.errors import MmError
from mmadmin.core.lifecycle import JobState

log = logging.getLogger(__name__)

ACTIVE_JOB = (JobState.QUEUED, JobState.RUNNING)
ACTIVE_REPLICA = (
    ReplicaState.STARTING,
    ReplicaState.PROBING,
    ReplicaState.READY,
    ReplicaState.DRAINING,
)


class Hands(Protocol):
    """What the watch does to engines."""

    def process(self, replica: Replica) -> tuple[int, float] | None:
        """Pid and start time of the running engine."""
        ...

    def stop(self, replica: Replica) -> None:
        """End the engine."""
        ...


def watch(hands: Hands) -> None:
    """Look at every replica of this host."""
    for replica in _idle_deployments():
        if replica.generation.deployment.live_id != replica.generation_id:
            _end_leftover(replica, hands)
        else:
            _note_process(replica, hands)


def _idle_deployments() -> list[Replica]:
    """Replicas of deployments that no activation is working on: those are its own business."""
    busy = Activation.objects.filter(state__in=ACTIVE_JOB).values("deployment")
    return list(
        Replica.objects.filter(host__name=settings.HOST_NAME, state__in=ACTIVE_REPLICA)
        .exclude(generation__deployment__in=busy)
        .select_related("generation__deployment", "host")
    )


def _end_leftover(replica: Replica, hands: Hands) -> None:
    """An engine of a generation that is not live, and that no activation wants."""
    log.warning("%s serves nothing: ending it", replica.uid)
    try:
        hands.stop(replica)
    except MmError as error:
        log.warning("%s: %s", replica.uid, error)
        return
    Replica.objects.filter(pk=replica.pk, state=replica.state).update(
        state=ReplicaState.STOPPED, stopped_at=timezone.now()
    )


def _note_process(replica: Replica, hands: Hands) -> None:
    """The supervisor may have started it anew: its record follows."""
    try:
        process = hands.process(replica)
    except MmError as error:
        log.warning("%s: %s", replica.uid, error)
        return
    if process is not None and process != (replica.pid, replica.pid_started):
        Replica.objects.filter(pk=replica.pk).update(pid=process[0], pid_started=process[1])
