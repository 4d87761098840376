"""Making a generation live: the phases of `core.generations.activation`, durable and repeatable.

The phase is written before it begins. A worker that is killed in it leaves a row that says where
to go on, and every phase looks at what is already so before it acts. Nothing is taken down before
its successor has proved itself, except in a swap, where memory forces it; there the old
generation comes back when the new one fails. After the flip an activation only finishes, unless a
person returns while the old engine still runs beside the new one.

Seats, processes and proofs of engines are in `engines`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import InterfaceError, OperationalError
from django.utils import timezone

from deployments.broker import feed
from deployments.jobs import gates, lease, states, trials
from deployments.jobs.engines import Engines, launch_of
from deployments.jobs.host import EngineHost
from deployments.jobs.recorder import Ended, Recorder
from deployments.models import (
    Activation,
    AlarmKind,
    Deployment,
    Generation,
    Replica,
    ReplicaState,
    ReportKind,
    Transition,
)
from mmadmin.core.errors import (
    Cancelled,
    Conflict,
    DoesNotFit,
    LeaseLost,
    MmError,
    Unreachable,
)
from mmadmin.core.fit.placement import Beside, make_room
from mmadmin.core.generations.activation import (
    MESSAGES,
    Mode,
    Phase,
    Position,
    after,
    choose_mode,
    may_return,
    may_turn_back,
    turn_back,
)
from mmadmin.core.generations.lifecycle import GenerationState
from mmadmin.core.spec.spec import ActivationSpec, parse_spec

log = logging.getLogger(__name__)

ROOM_S = 20
"""How long a probe that nothing waits for stands back behind the clients of the engine."""
ROOM_POLL_S = 0.2
FORWARD_ATTEMPTS = 3
"""A run that lost its worker this often before the flip goes back."""


def run(recorder: Recorder[Activation], machine: EngineHost) -> None:
    """Go through the phases that are left. Raises what the activation failed of, once undone."""
    ActivationRun(recorder, machine).run()


class ActivationRun(Engines):
    """One attempt at an activation."""

    def __init__(self, recorder: Recorder[Activation], machine: EngineHost) -> None:
        super().__init__(recorder, machine)
        self.activation = Activation.objects.select_related(
            "deployment__host", "target__deployment", "previous__deployment", "host"
        ).get(pk=recorder.job.pk)
        self.activation.fence = recorder.job.fence
        recorder.job = self.activation
        self.deployment: Deployment = self.activation.deployment
        self._phases: Mapping[Phase, Callable[[], None]] = {
            Phase.PREFLIGHT: self._preflight,
            Phase.HOLD: self._hold,
            Phase.START: self._start,
            Phase.PROBE: self._probe,
            Phase.FLIP: self._flip,
            Phase.DRAIN: self._drain,
            Phase.STOP: self._stop,
            Phase.RETIRE: self._retire,
            Phase.EXAMINE: self._examine,
            Phase.UNSTART: self._unstart,
            Phase.RESTART: self._restart,
            Phase.REPROBE: self._reprobe,
            Phase.REOPEN: self._reopen,
            Phase.RETURN: self._return,
            Phase.REDRAIN: self._redrain,
        }

    # --- order

    def run(self) -> None:
        """All that is left, forward or back."""
        at = self._where()
        if not at.undoing:
            try:
                self._check_attempts(at)
                self._go(at)
            except (LeaseLost, OperationalError, InterfaceError):
                raise
            except Exception as error:
                at = self._where()
                returns = isinstance(error, Cancelled) and may_return(at)
                if not (returns or may_turn_back(at)):
                    raise
                at = self._begin_undo(at, error)
            else:
                return
        self.recorder.ignore_cancel()
        self._go(at)
        raise Ended(self.activation.error or {})

    def _check_attempts(self, at: Position) -> None:
        if self.activation.attempts > FORWARD_ATTEMPTS and may_turn_back(at):
            raise lease.KILLED

    def _where(self) -> Position:
        """The position as the record has it."""
        live = Deployment.objects.values_list("live", flat=True).get(pk=self.deployment.pk)
        return self.activation.position(live)

    def _go(self, start: Position) -> None:
        """From a phase to the end of its way."""
        at: Position | None = start
        while at is not None:
            self._listen(at)
            self._do(at.phase)
            mode = Mode(self.activation.mode) if self.activation.mode else None
            at = after(at, mode=mode)
        self._close_phase()

    def _listen(self, at: Position) -> None:
        """Hear of a cancel while it leads back; where that ends, look for one not yet seen."""
        if at.undoing:
            return
        if may_return(at) and self._old_serves():
            self.recorder.heed_cancel()
            return
        if at.phase is Phase.FLIP:
            leaves = self.activation.phase != Phase.FLIP
        elif at.flipped:
            leaves = may_return(self._where()) and at.phase is Phase.STOP and self._old_serves()
        else:
            return
        if leaves:
            self._last_word()
        self.recorder.ignore_cancel()

    def _last_word(self) -> None:
        asked = Activation.objects.filter(
            pk=self.activation.pk, cancel_requested_at__isnull=False
        ).exists()
        if asked:
            raise Cancelled("cancelled by a person")

    def _old_serves(self) -> bool:
        """True when the old generation's engine could take requests again."""
        old = self._old()
        try:
            runs = any(self.machine.process(replica) for replica in self._replicas(old))
        except Unreachable:
            return False
        return runs and not self._has_fallen(old)

    def _close_phase(self) -> None:
        phases = [dict(entry) for entry in self.activation.phases]
        phases[-1]["ended"] = timezone.now().isoformat()
        lease.write(self.activation, phases=phases)

    def _begin_undo(self, at: Position, error: Exception) -> Position:
        if isinstance(error, MmError):
            as_json = error.as_json()
        else:
            log.error("activation %s", self.activation.pk, exc_info=error)
            as_json = states.bug(error)
        self.recorder.log(f"failed: {states.message(as_json)}")
        back = turn_back(at)
        lease.write(self.activation, undoing=True, error=as_json, phase=back.phase)
        return back

    def _do(self, phase: Phase) -> None:
        """Enter a phase and do it, patient with a supervisor that is being restarted."""
        self.recorder.check()
        self._enter(phase)
        self._patiently(phase.value, self._phases[phase])

    def _enter(self, phase: Phase) -> None:
        now = timezone.now().isoformat()
        phases = [dict(entry) for entry in self.activation.phases]
        if not phases or phases[-1]["phase"] != phase.value:
            if phases:
                phases[-1]["ended"] = now
            phases.append({"phase": phase.value, "started": now, "ended": None})
        lease.write(self.activation, phase=phase.value, phases=phases)
        feed.announce_job(self.activation)
        self.recorder.log(f"--- {phase.value}: {MESSAGES[phase]}")

    # --- phases

    def _preflight(self) -> None:
        """Look whether all is there and whether there is room: overlap or swap."""
        target = self._target()
        self._check_name(target)
        self.machine.preflight(target)
        old = self.activation.previous
        running = self._replicas(old) if old is not None else []
        trials.tidy(self.activation, self.machine)
        if trials.take_over(self.activation, self.machine):
            room = Beside("overlap", "its engine runs already: it was on trial")
        else:
            room = self._make_room(target, running[0] if running else None)
        mode = self._choose(target, room, has_previous=bool(running))
        lease.write(self.activation, mode=mode.value)
        self.recorder.log(f"{mode.value} of {target.uid}: {room.message}")

    def _make_room(self, target: Generation, running: Replica | None) -> Beside:
        """Whether there is memory beside what runs; trials end where that makes room.

        None ends for an activation that is refused: what there would be without them is looked at
        first, and what there is, once they have ended.
        """
        own, others = trials.engines(self.activation)
        room, needed = make_room(
            lambda gone: self.machine.beside(target, running, [*own, *gone]),
            others,
            wanted=self._options().mode,
        )
        self._choose(target, room, has_previous=running is not None)
        trials.settle(self.activation, self.recorder, self.machine)
        trials.give_memory(needed, self.activation, self.recorder, self.machine)
        return self.machine.beside(target, running) if own or needed else room

    def _choose(self, target: Generation, room: Beside, *, has_previous: bool) -> Mode:
        """Overlap or swap. Raises `DoesNotFit` or `Conflict` when neither can be."""
        if room.mode == "refuse":
            raise DoesNotFit(
                f"{target.uid} does not fit: {room.message}",
                remedy="use a smaller quant or context, or stop other deployments",
                **room.as_json(),
            )
        return choose_mode(
            self._options().mode,
            has_previous=has_previous,
            fits_beside=room.mode == "overlap",
        )

    def _check_name(self, target: Generation) -> None:
        """Refuse when clients call another deployment by the target's model name."""
        taken = Deployment.called(target.public_name, but=self.deployment.name)
        if taken is not None:
            raise Conflict(
                f"clients call the deployment {taken.name} {target.public_name!r}, which is what"
                f" {target.uid} wants to be called",
                remedy=f"give {taken.name} another public_name, or deploy this one with another",
            )

    def _hold(self) -> None:
        """New requests wait at the gates while there is no engine."""
        hold_s = self._options().hold_s + self._load_deadline_s(self._target())
        with lease.fenced(self.activation):
            self._hold_until(timezone.now() + timedelta(seconds=hold_s))
            self._old_drains(self._old())
        self._publish()

    def _start(self) -> None:
        """A seat and a process for the target."""
        target = self._target()
        with lease.fenced(self.activation):
            states.advance(target.pk, GenerationState.STARTING, **self._by())
        self._start_replica(target)

    def _probe(self) -> None:
        """The engine shows that it is what it should be."""
        target = self._target()
        with lease.fenced(self.activation):
            states.advance(target.pk, GenerationState.PROBING, **self._by())
        self._show(target, brief=self.activation.mode == Mode.SWAP)

    def _flip(self) -> None:
        """From here on the gates route to the target."""
        target, old = self.activation.target, self.activation.previous
        with lease.fenced(self.activation):
            expected = [old.pk if old else None, target.pk if target else None]
            live = Deployment.objects.values_list("live", flat=True).get(pk=self.deployment.pk)
            if live not in expected:
                raise Conflict(
                    f"{self.deployment.name} was changed by someone else meanwhile",
                    remedy="look at its history and try again",
                )
            of = Deployment.objects.filter(pk=self.deployment.pk)
            of.update(live=target, hold_until=None)
            if target is not None:
                self._check_name(target)
                of.update(public_name=target.public_name)
                states.advance(target.pk, GenerationState.LIVE, **self._by())
            if old is not None:
                self._old_drains(old)
        self._publish()

    def _drain(self) -> None:
        """Requests of the old generation end by themselves, for so long."""
        old = self.activation.previous
        if old is None:
            return
        with lease.fenced(self.activation):
            drains_only_now = self._old_drains(old)
        if drains_only_now:  # else the phase before has told the gates
            self._publish()
        self._let_finish(old, 0 if self._has_fallen(old) else self._options().drain_timeout_s)

    def _let_finish(self, generation: Generation, timeout_s: int) -> None:
        """Wait until no gate has anything for it, at most for so long."""
        uid = generation.uid
        idle = gates.wait_idle(
            uid,
            self.activation.snapshot_version,
            timeout_s=timeout_s,
            sleep=self.recorder.wait,
        )
        self.recorder.log(
            f"{uid} is idle" if idle else f"{uid} is still busy after {timeout_s} s: cut"
        )

    def _has_fallen(self, old: Generation) -> bool:
        """True when the watch found it dead: its requests would never end."""
        return self.deployment.alarms.filter(
            generation=old, kind=AlarmKind.UNHEALTHY, cleared_at=None
        ).exists()

    def _stop(self) -> None:
        """The old generation's engines end."""
        if self.activation.target is None:
            trials.settle(self.activation, self.recorder, self.machine)
            trials.tidy(self.activation, self.machine)
        if self.activation.previous is not None:
            self._stop_replicas(self.activation.previous)

    def _retire(self) -> None:
        """The old generation stays in the store, ready to come back."""
        old = self.activation.previous
        if old is None:
            return
        with lease.fenced(self.activation):
            states.advance(
                old.pk,
                GenerationState.RETIRED,
                only_from=(GenerationState.DRAINING,),
                **self._by(),
            )

    def _examine(self) -> None:
        """What the probe left out, so that held requests did not wait for it.

        The generation serves already: nothing that comes of it changes that.
        """
        target = self._target()
        try:
            replica = self._replica_of(target)
            report = self.machine.ask_rest(
                replica,
                launch_of(replica, self.machine),
                target.report(ReportKind.PROBES) or {},
                may_generate=lambda: self._has_room(replica),
                on_progress=self.recorder.log,
            )
        except MmError as error:
            self.recorder.log(f"not examined: {error.message}")
        else:
            self._keep_report(target, report)

    def _has_room(self, replica: Replica) -> bool:
        """Whether its clients leave a slot free; waits a little for one, but not past a cancel."""
        deadline = time.monotonic() + ROOM_S
        while True:
            asked = Activation.objects.filter(
                pk=self.activation.pk, cancel_requested_at__isnull=False
            )
            view = gates.look()
            if asked.exists() or view is None:
                return False
            if view.inflight.get(replica.generation.uid, 0) < replica.slots:
                return True
            if time.monotonic() > deadline:
                return False
            self.recorder.wait(ROOM_POLL_S)

    # --- phases of the way back

    def _unstart(self) -> None:
        """Nothing of the target runs on."""
        target = self.activation.target
        if target is None:
            return
        self._stop_replicas(target)
        error = self.activation.error or {}
        cancelled = error.get("code") == "cancelled"
        after = GenerationState.FAILED
        if cancelled:
            was_live = Transition.objects.filter(generation=target, after=GenerationState.LIVE)
            after = GenerationState.RETIRED if was_live.exists() else GenerationState.BUILT
        with lease.fenced(self.activation):
            started = (
                GenerationState.STARTING,
                GenerationState.PROBING,
                GenerationState.DRAINING,  # it had been live
            )
            # a kept one whose engine was not started has shown nothing: it stays what it was
            not_begun = () if cancelled else (GenerationState.BUILT,)
            states.advance(
                target.pk,
                after,
                only_from=(*started, *not_begun),
                actor_id=self.activation.actor_id,
                reason=states.message(error),
            )

    def _restart(self) -> None:
        """The old generation's engine, back in a seat."""
        old = self._old()
        with lease.fenced(self.activation):
            Deployment.objects.filter(pk=self.deployment.pk, live=self.activation.target).update(
                live=old
            )
        hold_s = self._options().hold_s + self._load_deadline_s(old)
        self._route(hold_until=timezone.now() + timedelta(seconds=hold_s))
        self._start_replica(old)

    def _reprobe(self) -> None:
        """The old generation proves itself again."""
        old = self._old()
        for replica in self._replicas(old):
            self._prove(replica, old, wanted=None)

    def _reopen(self) -> None:
        """Held requests go on, to the old generation."""
        old = self._old()
        with lease.fenced(self.activation):
            states.advance(
                old.pk,
                GenerationState.LIVE,
                only_from=(GenerationState.DRAINING,),
                reason="restored",
            )
        self._route(hold_until=None)

    def _return(self) -> None:
        """The flip is taken back: the old generation's engine has run on."""
        target, old = self._target(), self._old()
        with lease.fenced(self.activation):
            of = Deployment.objects.filter(pk=self.deployment.pk, live=target)
            if Deployment.called(old.public_name, but=self.deployment.name) is None:
                of.update(public_name=old.public_name)
            of.update(live=old)
            states.advance(
                old.pk,
                GenerationState.LIVE,
                only_from=(GenerationState.DRAINING,),
                reason="restored",
            )
            Replica.objects.filter(generation=old, trial=None, state=ReplicaState.DRAINING).update(
                state=ReplicaState.READY
            )
            self._old_drains(target)
        self._publish()

    def _redrain(self) -> None:
        """Requests that the new generation got meanwhile end by themselves."""
        self._let_finish(self._target(), self._options().drain_timeout_s)

    # --- parts

    def _by(self) -> dict[str, Any]:
        return {"actor_id": self.activation.actor_id, "reason": self.activation.reason}

    def _target(self) -> Generation:
        assert self.activation.target is not None  # noqa: S101 (only a stop has none)
        return self.activation.target

    def _old(self) -> Generation:
        assert self.activation.previous is not None  # noqa: S101 (checked by _must_restore)
        return self.activation.previous

    def _options(self) -> ActivationSpec:
        generation = self.activation.target or self._old()
        return parse_spec(generation.spec_toml).activation

    def _old_drains(self, old: Generation) -> bool:
        """False when it drained already."""
        states.advance(
            old.pk, GenerationState.DRAINING, only_from=(GenerationState.LIVE,), **self._by()
        )
        serving = Replica.objects.filter(generation=old, state=ReplicaState.READY)
        return bool(serving.update(state=ReplicaState.DRAINING))

    def _hold_until(self, moment: datetime | None) -> None:
        Deployment.objects.filter(pk=self.deployment.pk).update(hold_until=moment)

    def _route(self, *, hold_until: datetime | None) -> None:
        with lease.fenced(self.activation):
            self._hold_until(hold_until)
        self._publish()

    def _belongs_to(self) -> dict[str, Any]:
        return {"activation": self.activation}

    def _parent_report(self) -> Mapping[str, Any] | None:
        old = self.activation.previous
        return old.report(ReportKind.PROBES) if old is not None else None
