"""A kept generation on trial beside the live one: the phases of `core.generations.trial`, durable.

A trial that is open sleeps: its job is queued, nobody holds it, and the sweeper hands it out when
its time is over. Everything else (a person, an activation that needs the memory, an engine that
died) ends it by moving that time to now. Whatever kills a worker, the row says where to go on, and
an engine whose trial has ended without it is ended by the watch.

An activation of the generation on trial takes its engine over, as it is; one of another generation
ends the trial first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.db import InterfaceError, OperationalError, transaction
from django.db.models import F, QuerySet
from django.utils import timezone

from deployments.broker import feed
from deployments.jobs import gates, lease, states
from deployments.jobs.engines import ACTIVE_REPLICA, Engines, launch_of, seat_of
from deployments.jobs.host import EngineHost
from deployments.jobs.recorder import Ended, Recorder, Sleeps, recording
from deployments.models import (
    Activation,
    AuditEvent,
    Generation,
    Replica,
    ReplicaState,
    ReportKind,
    Trial,
)
from mmadmin.core.errors import Cancelled, Conflict, DoesNotFit, LeaseLost, MmError
from mmadmin.core.fit.placement import Beside
from mmadmin.core.generations.lifecycle import ACTIVE_JOB, JobState
from mmadmin.core.generations.trial import FORWARD, MESSAGES, Phase, TrialStatus, after, turn_back

log = logging.getLogger(__name__)

FORWARD_ATTEMPTS = 3
"""A trial that lost its worker this often before it was open is given up."""
DRAIN_S = 20
"""A trial's requests are people's who look on: what is not said by then is cut."""
LOOK_AGAIN_S = 0.2
FAILURES_ALLOWED = 2
"""Looks in a row that must find no process: the supervisor may start it again meanwhile."""


def run(recorder: Recorder[Trial], machine: EngineHost) -> None:
    """Go through the phases that are left. Raises `Sleeps` once it is open."""
    TrialRun(recorder, machine).run()


class TrialRun(Engines):
    """One attempt at a trial."""

    trial: Trial

    def __init__(self, recorder: Recorder[Trial], machine: EngineHost) -> None:
        super().__init__(recorder, machine)
        self.trial = Trial.objects.select_related(
            "deployment__live__deployment", "generation__deployment", "host"
        ).get(pk=recorder.job.pk)
        self.trial.fence = recorder.job.fence
        recorder.job = self.trial
        self.generation: Generation = self.trial.generation
        self._phases: Mapping[Phase, Callable[[], None]] = {
            Phase.PREFLIGHT: self._preflight,
            Phase.START: self._start,
            Phase.PROBE: self._probe,
            Phase.OPEN: self._open,
            Phase.CLOSE: self._close,
            Phase.DRAIN: self._drain,
            Phase.STOP: self._stop,
        }

    # --- order

    def run(self) -> None:
        """All that is left, on the way that it is on."""
        phase = Phase(self.trial.phase or Phase.PREFLIGHT)
        if phase is Phase.OPEN and self._is_over():
            phase = Phase.CLOSE
        elif phase in FORWARD:
            try:
                self._check_attempts()
                self._go(phase)
            except (LeaseLost, OperationalError, InterfaceError):
                raise
            except Cancelled as cancelled:
                phase = self._turn_back(self._cancelled(cancelled).as_json())
            except MmError as failed:
                phase = self._turn_back(failed.as_json())
            except Exception as bug:
                log.exception("trial %s", self.trial.pk)
                phase = self._turn_back(states.bug(bug))
            else:
                raise Sleeps
        self.recorder.ignore_cancel()
        self._go(phase)
        if self.trial.error is not None:
            raise Ended(self.trial.error)

    def _is_over(self) -> bool:
        return self.trial.ends_at is not None and self.trial.ends_at <= timezone.now()

    def _check_attempts(self) -> None:
        if self.trial.attempts > FORWARD_ATTEMPTS:
            raise lease.KILLED

    def _cancelled(self, error: Cancelled) -> Cancelled:
        """Why it was cancelled: whoever did it has written it down."""
        why = Trial.objects.values_list("ending", flat=True).get(pk=self.trial.pk)
        return Cancelled(why) if why else error

    def _turn_back(self, error: dict[str, Any]) -> Phase:
        back = turn_back(Phase(self.trial.phase or Phase.PREFLIGHT))
        lease.write(self.trial, error=error, ending=states.message(error), phase=back.value)
        return back

    def _go(self, start: Phase) -> None:
        phase: Phase | None = start
        while phase is not None:
            self.recorder.check()
            lease.write(self.trial, phase=phase.value)
            feed.announce_job(self.trial)
            self.recorder.log(f"{phase.value}: {MESSAGES[phase]}")
            self._patiently(phase.value, self._phases[phase])
            phase = after(phase)

    # --- phases

    def _preflight(self) -> None:
        """Everything is there, and there is room beside what runs."""
        live = self._live()
        if live is None:
            raise Conflict(
                f"{self.trial.deployment.name} has no live generation to run beside",
                remedy=f"activate {self.generation.uid} instead",
            )
        self.machine.preflight(self.generation)
        serving = self._serving()
        own = next((one for one in serving if one.generation_id == live.pk), None)
        room = self.machine.beside(self.generation, own)
        if room.mode != "overlap":
            raise DoesNotFit(
                f"{self.generation.uid} does not fit beside what runs: {room.message}",
                remedy=self._what_to_stop(serving, live, room),
                **room.as_json(),
            )

    def _start(self) -> None:
        """A seat and a process."""
        self._start_replica(self.generation)

    def _probe(self) -> None:
        """The engine shows that it is what it should be."""
        self._show(self.generation)

    def _open(self) -> None:
        """The gates route its name; its time begins."""
        self._publish()
        if self.trial.ends_at is None:
            now = timezone.now()
            ends_at = now + timedelta(minutes=self.trial.minutes)
            lease.write(self.trial, opened_at=now, ends_at=ends_at)

    def _close(self) -> None:
        """The gates route it no more."""
        if not self.trial.ending:
            with lease.fenced(self.trial):
                lease.write(self.trial, ending="its time was over")
                note_end(self.trial)
        self._publish()

    def _drain(self) -> None:
        """Its requests end by themselves, for so long."""
        gates.wait_idle(
            self.generation.uid,
            self.trial.snapshot_version,
            timeout_s=DRAIN_S,
            sleep=self.recorder.wait,
        )

    def _stop(self) -> None:
        """Its engine ends."""
        self._stop_replicas(self.generation)

    # --- parts

    def _belongs_to(self) -> dict[str, Any]:
        return {"trial": self.trial}

    def _parent_report(self) -> Mapping[str, Any] | None:
        live = self._live()
        return live.report(ReportKind.PROBES) if live else None

    def _live(self) -> Generation | None:
        return self.trial.deployment.live

    def _serving(self) -> list[Replica]:
        """Every engine of this host but its own; other trials first: they are the cheapest."""
        found = Replica.objects.filter(host=self.trial.host, state__in=ACTIVE_REPLICA)
        rows = found.exclude(trial=self.trial).order_by("uid")
        return sorted(
            rows.select_related("generation__deployment", "trial", "host"),
            key=lambda replica: replica.trial_id is None,
        )

    def _what_to_stop(self, serving: Iterable[Replica], live: Generation, room: Beside) -> str:
        """Which single engine would have to end for it to fit, or that none would do."""
        others = [one for one in serving if one.generation_id != live.pk]
        enough = [
            _called(one)
            for one in others
            if self.machine.beside(self.generation, one).mode != "refuse"
        ]
        ways = [f"stop {' or '.join(enough)} first"] if enough else []
        if room.mode == "swap":
            ways.append(f"activate {self.generation.uid} instead: {live.uid} ends for it")
        return ", or ".join(ways) or "stop several deployments, or use a smaller quant or context"


def _called(replica: Replica) -> str:
    """A running engine as people know it."""
    if replica.trial is not None:
        return f"the trial of {replica.generation.uid}"
    return str(replica.generation.deployment.name)


def take_over(activation: Activation, machine: EngineHost) -> bool:
    """Make the engine of the target's own trial the activation's; True when it is.

    It is taken over as long as it is proved and what would be started anyway. Idempotent.
    """
    for trial in _active(deployment=activation.deployment):
        _take_over(trial, activation, machine)
    return Replica.objects.filter(
        activation=activation, generation=activation.target, state=ReplicaState.READY
    ).exists()


def settle(activation: Activation, recorder: Recorder[Activation], machine: EngineHost) -> None:
    """Before a deployment's route changes its trial is over. Idempotent."""
    target = activation.target
    for trial in _active(deployment=activation.deployment):
        why = f"{target.uid} goes live" if target else f"{trial.deployment.name} is stopped"
        _end_now(trial, recorder, machine, why)


def tidy(activation: Activation, machine: EngineHost) -> None:
    """End engines of the deployment whose trial has ended without them."""
    _end_leftovers(Replica.objects.filter(generation__deployment=activation.deployment), machine)


def engines(activation: Activation) -> tuple[list[Replica], list[Replica]]:
    """The engines on trial on the activation's host: its own deployment's, and the others."""
    found = Replica.objects.filter(
        host=activation.host, state__in=ACTIVE_REPLICA, trial__state__in=ACTIVE_JOB
    ).select_related("generation__deployment", "trial", "host")
    own: list[Replica] = []
    others: list[Replica] = []
    for replica in found.order_by("pk"):
        of = replica.generation.deployment_id
        (own if of == activation.deployment_id else others).append(replica)
    return own, others


def give_memory(
    replicas: Iterable[Replica],
    activation: Activation,
    recorder: Recorder[Activation],
    machine: EngineHost,
) -> None:
    """End these trials, whose memory the activation needs."""
    target = activation.target
    for trial in _active(replicas__in=list(replicas)):
        _end_now(trial, recorder, machine, f"{target.uid if target else ''} needs the memory")


def _active(**those: Any) -> QuerySet[Trial]:
    found = Trial.objects.active().filter(**those).distinct()
    return found.select_related("deployment", "generation__deployment", "host")


def _take_over(trial: Trial, activation: Activation, machine: EngineHost) -> bool:
    """Make the trial's engine the activation's; False when that is not safe."""
    target = activation.target
    if target is None or trial.generation_id != target.pk or not trial.asleep:
        return False
    replica = (
        trial.replicas.filter(state=ReplicaState.READY, host=activation.host)
        .select_related("generation__deployment", "host")
        .first()
    )
    if replica is None or machine.process(replica) is None:
        return False
    planned, launch = machine.launch(target, seat_of(replica)), launch_of(replica, machine)
    if [*launch.argv] != [*planned.argv] or dict(launch.env) != dict(planned.env):
        return False
    with lease.fenced(activation):
        sleeps = Trial.objects.filter(pk=trial.pk, state=JobState.QUEUED, fence=trial.fence)
        trial.ending = f"{target.uid} goes live with its engine"
        if not sleeps.filter(cancel_requested_at=None).move(
            JobState.SUCCEEDED, ended_at=timezone.now(), ending=trial.ending
        ):
            return False
        Replica.objects.filter(pk=replica.pk).update(trial=None, activation=activation)
        note_end(trial)
        feed.announce_job(trial)
    return True


def _end_now(trial: Trial, recorder: Recorder[Any], machine: EngineHost, why: str) -> None:
    """End a trial from within another job; returns when its engine has ended."""
    recorder.log(f"the trial of {trial.generation.uid} ends: {why}")
    _ask_to_end(trial, why)
    while Trial.objects.active().filter(pk=trial.pk).exists():
        with recording(Trial, trial.pk) as ours:
            if ours is not None:
                run(ours, machine)
        recorder.wait(LOOK_AGAIN_S if ours is None else 0)
    _end_leftovers(trial.replicas.all(), machine)


def _ask_to_end(trial: Trial, why: str) -> None:
    with transaction.atomic():
        if trial.end_soon(why):
            note_end(trial)
            feed.announce_job(trial)


def _end_leftovers(replicas: QuerySet[Replica], machine: EngineHost) -> None:
    """End engines whose trial has ended without them."""
    left = replicas.filter(trial__isnull=False, state__in=ACTIVE_REPLICA).exclude(
        trial__state__in=ACTIVE_JOB
    )
    for replica in left.select_related("generation__deployment", "host"):
        log.warning("%s outlived its trial: ending it", replica.uid)
        machine.stop(replica)
        Replica.objects.filter(pk=replica.pk, state__in=ACTIVE_REPLICA).update(
            state=ReplicaState.STOPPED, stopped_at=timezone.now(), pid=None
        )


def look_at(replica: Replica, machine: EngineHost) -> None:
    """The watch's part: an engine without a trial ends, and so does a trial without an engine."""
    trial = replica.trial
    if trial is None:
        return
    if not trial.active:
        _end_leftovers(Replica.objects.filter(pk=replica.pk), machine)
    elif trial.status is TrialStatus.OPEN and (
        replica.state != ReplicaState.READY or machine.process(replica) is None
    ):
        Replica.objects.filter(pk=replica.pk).update(failures=F("failures") + 1)
        if replica.failures + 1 >= FAILURES_ALLOWED:
            _ask_to_end(trial, "its engine has ended")
    elif replica.failures:
        Replica.objects.filter(pk=replica.pk).update(failures=0)


def note_end(trial: Trial) -> None:
    """Write into the audit log that mmadmin itself ends a trial; part of a transaction."""
    AuditEvent.objects.create(
        actor=None,
        verb="trial.end",
        subject=f"deployment:{trial.deployment.name}",
        summary=f"trial of {trial.generation.uid} ends: {trial.ending}",
        details={"generation": trial.generation.number, "trial": trial.pk},
    )
