"""Whether what should run does run, looked at on a timer.

- an engine that no live generation and no activation wants is ended
- a live engine that nothing is routed to, because the way back of a failed activation broke off, is
  started until it proves itself
- a live generation without an engine gets one; where objects that it needs are not in the store, an
  alarm says so
- a live engine that differs from its plan (drift) raises an alarm, until it does not; so does one
  that runs without a sandbox
- a live engine that is not alive is restarted with growing pauses; when it fell soon after it went
  live, the deployment rolls back to the generation before, unless `auto_rollback` is off
- one that ends again and again, and works in between, is not alive either

Alive is who works off requests. With some in work, the engine's own counters must move within
`activation.stall_s`, whether or not clients wait; a tiny completion would stand behind them in the
line. With none, and no traffic that went well just now, a tiny completion must come back.

An alarm is never edited: it is raised, and later cleared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from deployments.broker import feed
from deployments.broker.queue import enqueue_on_commit
from deployments.jobs import engines, gates, hosts, states, trials
from deployments.jobs.engines import ACTIVE_REPLICA, launch_of, new_uid, note_process
from deployments.jobs.host import EngineHost
from deployments.models import (
    Activation,
    ActivationKind,
    Alarm,
    AlarmKind,
    AuditEvent,
    Deployment,
    Generation,
    Host,
    Replica,
    ReplicaState,
    UsageEvent,
)
from mmadmin.core.engines.protocol import LaunchSpec
from mmadmin.core.errors import MmError, ProbeFailed, Unreachable
from mmadmin.core.generations.lifecycle import GenerationState, JobState
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.core.spec.spec import parse_spec
from mmadmin.core.store import Store
from mmadmin.core.store.verify import absent

log = logging.getLogger(__name__)

QUIET_S = 30
"""Traffic that ended well within this time shows that the engine lives."""
CHECK_EVERY_S = 30
"""Between two tiny completions of a healthy engine without traffic."""
FAILURES_ALLOWED = 2
"""Checks in a row that must fail before anything is done."""
FALLS_ALLOWED = 3
FALLS_WITHIN_S = 600
"""This many ends of its process, each this soon after the one before, count as a failure."""
PAUSE_S = 30
"""After a restart, doubled with each one."""
PAUSE_MAX_S = 1800
PROOF_S = 60
"""How long an engine that has loaded may take to show that it is the right one and answers."""
LOAD_AT_LEAST_S = 600
"""Of a hold, what an engine that is restarted gets to load."""
LIVENESS = "liveness"
UNFENCED = "none"
"""The level of a sandbox that keeps an engine from nothing."""
SILENT = "silent"
"""Instead of a mark, of an engine that does not say how far it is while its clients wait."""


def watch(machine: EngineHost) -> None:
    """Look at every replica of this host; one that cannot be looked at stops no other."""
    view = gates.look()
    incomplete = _note_missing_bytes(machine.store())
    for replica in _idle_deployments():
        try:
            if replica.generation_id in incomplete and machine.process(replica) is None:
                continue  # nothing to start
            if replica.trial is not None:
                trials.look_at(replica, machine)
            elif replica.generation.deployment.live_id != replica.generation_id:
                _end_leftover(replica, machine)
            elif "port" in replica.launch:
                _move_to_socket(replica, machine, view)
            else:
                _note_sandbox(replica)
                _look_at(replica, machine, view)
        except MmError as error:
            log.warning("%s: %s", replica.uid, error)
    seat_the_unserved(machine)
    _clear_alarms_of_the_gone()


def _busy() -> QuerySet[Activation, Any]:
    """Deployments that an activation is working on: their engines are its own business."""
    return Activation.objects.active().values("deployment")


def _note_missing_bytes(store: Store) -> set[int]:
    """Live generations that need objects which are not in the store; an alarm for each.

    After a restore without the store's bytes, for example.
    """
    lost = hosts.lacking(store)
    for generation in hosts.live_generations():
        gone = lost.get(generation)
        _clear(generation.deployment, AlarmKind.BYTES, keep=(gone,) if gone else ())
        if gone:
            message = f"{gone[:80]} is not in this host's store; `mm rebuild --live` brings it back"
            _raise(generation, AlarmKind.BYTES, gone, message)
    return {generation.pk for generation in lost}


def seat_the_unserved(machine: EngineHost) -> None:
    """A live generation without a replica gets one; the next looks prove it."""
    seated = Replica.objects.filter(
        generation=OuterRef("live"), state__in=ACTIVE_REPLICA, trial=None
    )
    unserved = (
        Deployment.objects.filter(host__name=settings.HOST_NAME, live__isnull=False)
        .exclude(pk__in=_busy())
        .exclude(Exists(seated))
        .select_related("live__deployment", "host")
    )
    fresh: list[Replica] = []
    for deployment in unserved:
        live = deployment.live
        if live is None or absent(machine.store(), live.system) is not None:
            continue
        with transaction.atomic():
            Host.objects.select_for_update().get(pk=deployment.host_id)
            if not unserved.filter(pk=deployment.pk).exists():
                continue  # an activation has just taken it
            replica = Replica.objects.create(
                uid=new_uid(live), generation=live, host=deployment.host
            )
            log.warning("%s is live and has no engine: %s is to be one", live.uid, replica.uid)
            fresh.append(replica)
    for replica in fresh:
        try:
            engines.start(replica, launch_of(replica, machine), machine)
        except MmError as error:  # the next look tries again, and raises an alarm
            log.warning("%s: %s", replica.uid, error)


def _idle_deployments() -> list[Replica]:
    """Replicas of deployments that no activation is working on."""
    return list(
        Replica.objects.filter(host__name=settings.HOST_NAME, state__in=ACTIVE_REPLICA)
        .exclude(generation__deployment__in=_busy())
        .select_related("generation__deployment", "trial__generation", "trial__deployment", "host")
    )


def _end_leftover(replica: Replica, machine: EngineHost) -> None:
    """An engine of a generation that is not live, and that no activation wants."""
    log.warning("%s serves nothing: ending it", replica.uid)
    machine.stop(replica)
    Replica.objects.filter(pk=replica.pk, state=replica.state).update(
        state=ReplicaState.STOPPED, stopped_at=timezone.now()
    )


def _look_at(replica: Replica, machine: EngineHost, view: gates.GateView | None) -> None:
    if replica.state != ReplicaState.READY:
        _bring_back(replica, machine)
        return
    launch = launch_of(replica, machine)
    process = machine.process(replica)
    fell = replica.process is not None and process != replica.process
    if process != replica.process:
        note_process(replica, process)
    if fell:
        _fell(replica, process, launch, machine)
        return
    _note_drift(replica, machine.drift(replica, launch))
    if process is None:
        _not_alive(replica, launch, machine, "its process does not run")
        return
    if machine.loading(replica, launch):
        return
    clients = None if view is None else view.inflight.get(replica.generation.uid, 0) > 0
    if clients is False:
        _forget_work(replica)
    if not clients and not _is_due(replica):
        return
    mark = _work(replica, launch, machine, clients=bool(clients))
    if mark:
        _judge_work(replica, launch, machine, mark)
    elif mark is not None or not clients:  # who has some and does not tell is asked afterwards
        _ask(replica, launch, machine)


def _move_to_socket(replica: Replica, machine: EngineHost, view: gates.GateView | None) -> None:
    """Restart an engine of version 0.1: it listens on a TCP port, the gate asks its socket.

    The upgrade has made the gates hold its requests; those that it works on get some time.
    """
    deployment = replica.generation.deployment
    working = view is not None and view.inflight.get(replica.generation.uid, 0) > 0
    ends = deployment.hold_until
    if working and ends is not None and ends - timezone.now() > timedelta(seconds=LOAD_AT_LEAST_S):
        return
    log.warning("%s listens on a TCP port: restarting it on a socket", replica.uid)
    feed.publish_snapshot(force=False)
    machine.stop(replica)
    engines.start(replica, launch_of(replica, machine), machine)


def _bring_back(replica: Replica, machine: EngineHost) -> None:
    """Nothing is routed to the live generation: a failed activation or an upgrade left it so.

    Its engine is started until it proves itself; then requests go to it again.
    """
    if replica.activation_id is not None:
        message = "it could not be restored after a failed activation; mmadmin keeps trying"
        _raise(replica.generation, AlarmKind.UNHEALTHY, LIVENESS, message)
    launch = launch_of(replica, machine)
    process = machine.process(replica)
    if process is None:
        _not_alive(replica, launch, machine, "its process does not run", goes_back=False)
        return
    if machine.loading(replica, launch):
        return
    try:
        machine.prove(
            replica,
            launch,
            wanted=None,
            deadline_s=PROOF_S,
            parent_report=None,
            brief=True,
            on_progress=partial(log.info, "%s: %s", replica.uid),
            check=lambda: None,
        )
    except (ProbeFailed, Unreachable) as error:
        _not_alive(replica, launch, machine, error.message, goes_back=False)
        return
    log.warning("%s is back", replica.uid)
    note_process(replica, process)
    with transaction.atomic():
        Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY, error="")
        states.advance(
            replica.generation_id,
            GenerationState.LIVE,
            only_from=(GenerationState.DRAINING,),
            reason="restored",
        )
        Deployment.objects.filter(live=replica.generation_id).update(hold_until=None)
    feed.publish_snapshot(force=False)
    _is_alive(replica)


def _fell(
    replica: Replica, process: ProcessIdentity | None, launch: LaunchSpec, machine: EngineHost
) -> None:
    """Its process ended, and the supervisor has started it again, or is about to."""
    if process is not None and _started_with_us(
        process
    ):  # everything was restarted: the engine did not fail
        _not_alive(replica, launch, machine, "its process was started again")
        return
    now = timezone.now()
    soon = replica.fell_at is not None and now - replica.fell_at < timedelta(seconds=FALLS_WITHIN_S)
    falls = replica.falls + 1 if soon else 1
    Replica.objects.filter(pk=replica.pk).update(falls=falls, fell_at=now)
    if falls < FALLS_ALLOWED:
        mended = " and was started again" if process is not None else ""
        _not_alive(replica, launch, machine, f"its process ended{mended}")
        return
    message = f"its process ended {falls} times, each soon after the other"
    Replica.objects.filter(pk=replica.pk).update(failures=1)  # asked at the next look
    _raise(replica.generation, AlarmKind.UNHEALTHY, LIVENESS, message)
    _go_back(replica.generation, message)


def _started_with_us(process: ProcessIdentity) -> bool:
    """True when it was started before this worker: its supervisor ended, or the machine did."""
    us = ProcessIdentity.me()
    return process.boot == us.boot and process.started <= us.started


def _work(
    replica: Replica, launch: LaunchSpec, machine: EngineHost, *, clients: bool
) -> str | None:
    """What the engine has in work; one that is silent although clients wait has moved nothing."""
    try:
        return machine.work(replica, launch)
    except Unreachable:
        return (replica.work or SILENT) if clients else ""


def _judge_work(replica: Replica, launch: LaunchSpec, machine: EngineHost, mark: str) -> None:
    """Whether anything has moved since the last look, or lately enough.

    A verdict counts like any failed check, so that it takes two looks: a clock that jumps convicts
    nobody.
    """
    now = timezone.now()
    if mark != replica.work or replica.worked_at is None:
        Replica.objects.filter(pk=replica.pk).update(work=mark, worked_at=now)
        if replica.work not in ("", SILENT):
            _is_alive(replica)
        return
    stall_s = parse_spec(replica.generation.spec_toml).activation.stall_s
    if stall_s and now - replica.worked_at >= timedelta(seconds=stall_s):
        message = f"nothing of what it has in work has moved for {stall_s} s"
        _not_alive(replica, launch, machine, message)


def _forget_work(replica: Replica) -> None:
    """What it had in work is done."""
    if replica.worked_at is not None:
        Replica.objects.filter(pk=replica.pk).update(work="", worked_at=None)
        replica.work, replica.worked_at = "", None


def _ask(replica: Replica, launch: LaunchSpec, machine: EngineHost) -> None:
    """A tiny completion."""
    _forget_work(replica)
    try:
        machine.alive(replica, launch)
    except Unreachable as error:
        _not_alive(replica, launch, machine, error.message)
    else:
        _is_alive(replica)


def _is_due(replica: Replica) -> bool:
    """True when nothing else shows that the engine lives, and it was not asked just now."""
    now = timezone.now()
    if replica.failures:
        return True
    if replica.checked_at and replica.checked_at > now - timedelta(seconds=CHECK_EVERY_S):
        return False
    return not UsageEvent.objects.filter(
        deployment=replica.generation.deployment.name,
        generation=replica.generation.number,
        outcome="ok",
        at__gt=now - timedelta(seconds=QUIET_S),
    ).exists()


def _is_alive(replica: Replica) -> None:
    Replica.objects.filter(pk=replica.pk).update(checked_at=timezone.now(), failures=0)
    _clear(replica.generation.deployment, AlarmKind.UNHEALTHY, keep=())


def _not_alive(
    replica: Replica,
    launch: LaunchSpec,
    machine: EngineHost,
    message: str,
    *,
    goes_back: bool = True,
) -> None:
    now = timezone.now()
    failures = replica.failures + 1
    Replica.objects.filter(pk=replica.pk).update(checked_at=now, failures=failures)
    if failures < FAILURES_ALLOWED:
        return
    _raise(replica.generation, AlarmKind.UNHEALTHY, LIVENESS, message)
    if goes_back and _go_back(replica.generation, message):
        return
    pause = min(PAUSE_S * 2**replica.restarts, PAUSE_MAX_S) if replica.restarts else 0
    if replica.restarted_at and replica.restarted_at > now - timedelta(seconds=pause):
        return
    log.warning("%s is not alive (%s): restarting it", replica.uid, message)
    Replica.objects.filter(pk=replica.pk).update(
        restarts=replica.restarts + 1,
        restarted_at=now,
        failures=0,
        work="",
        worked_at=None,
        pid=None,
    )
    machine.stop(replica)
    engines.start(replica, launch, machine)


def _go_back(fallen: Generation, message: str) -> bool:
    """Queue a roll-back when the generation fell within its watch window; True when it did."""
    deployment = fallen.deployment
    if not deployment.auto_rollback:
        return False
    last = deployment.activations.filter(state=JobState.SUCCEEDED).order_by("-pk").first()
    if last is None or last.target_id != fallen.pk or last.previous is None:
        return False
    window = timedelta(seconds=parse_spec(fallen.spec_toml).activation.watch_window_s)
    if last.ended_at is None or last.ended_at + window < timezone.now():
        return False
    before = last.previous
    if before.state != GenerationState.RETIRED or last.kind != ActivationKind.ACTIVATE:
        return False  # what a roll-back has left is nothing to go back to
    reason = f"automatic: {fallen.uid} failed: {message}"
    try:
        with transaction.atomic():
            activation = Activation.objects.create(
                deployment=deployment,
                target=before,
                previous=fallen,
                kind=ActivationKind.ROLLBACK,
                reason=reason,
                host=last.host,
                actor=None,
            )
            AuditEvent.objects.create(
                actor=None,
                verb="deployment.rollback",
                subject=f"deployment:{deployment.name}",
                summary=f"rollback {before.uid} {reason}",
                details={"generation": before.number, "activation": activation.pk},
            )
            enqueue_on_commit(activation)
    except IntegrityError:
        return True  # someone is activating already
    feed.announce_job(activation)
    return True


def _note_drift(replica: Replica, found: Mapping[str, str]) -> None:
    """One alarm a subject; what differs otherwise than before is another alarm."""
    told = Alarm.objects.filter(
        deployment=replica.generation.deployment, kind=AlarmKind.DRIFT, cleared_at=None
    )
    same = {alarm.subject for alarm in told if found.get(alarm.subject) == alarm.message}
    _clear(replica.generation.deployment, AlarmKind.DRIFT, keep=tuple(same))
    for subject, message in found.items():
        _raise(replica.generation, AlarmKind.DRIFT, subject, message)


def _note_sandbox(replica: Replica) -> None:
    """An alarm while an engine can do all that the user of mmadmin can do."""
    generation = replica.generation
    open_to_all = replica.sandbox == UNFENCED
    _clear(generation.deployment, AlarmKind.SANDBOX, keep=(UNFENCED,) if open_to_all else ())
    if open_to_all:
        message = "its engine runs without a sandbox; `mm doctor` says why and what to do"
        _raise(generation, AlarmKind.SANDBOX, UNFENCED, message)


def _raise(generation: Generation, kind: AlarmKind, subject: str, message: str) -> None:
    deployment = generation.deployment
    _, new = Alarm.objects.get_or_create(
        deployment=deployment,
        kind=kind,
        subject=subject,
        cleared_at=None,
        defaults={"generation": generation, "message": message},
    )
    if new:
        log.warning("%s: %s: %s", generation.uid, subject, message)
        feed.announce("deployment", deployment.pk, deployment=deployment.name)


def _clear(deployment: Deployment, kind: AlarmKind, *, keep: tuple[str, ...]) -> None:
    cleared = (
        Alarm.objects.filter(deployment=deployment, kind=kind, cleared_at=None)
        .exclude(subject__in=keep)
        .update(cleared_at=timezone.now())
    )
    if cleared:
        feed.announce("deployment", deployment.pk, deployment=deployment.name)


def _clear_alarms_of_the_gone() -> None:
    """An alarm about a generation that is no longer live says nothing."""
    open_alarms = Alarm.objects.filter(
        cleared_at=None, deployment__host__name=settings.HOST_NAME
    ).select_related("deployment")
    gone = [a.pk for a in open_alarms if a.generation_id != a.deployment.live_id]
    if gone:
        Alarm.objects.filter(pk__in=gone).update(cleared_at=timezone.now())
