"""Making a generation live: the walk of `core.activation`, durable, each phase repeatable.

The phase is written before it begins. A worker that is killed in it leaves a row that says where
to go on, and every phase looks at what is already so before it acts. Nothing is taken down before
its successor has proved itself, except in a swap, where memory forces it; there the old
generation comes back when the new one fails. After the flip an activation only finishes.

Effects on engines go through `Hands`, so that this walk is tested without any.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

from django.conf import settings
from django.db import IntegrityError, InterfaceError, OperationalError
from django.utils import timezone

from deployments import feed
from deployments.jobs import gates, lease, states
from deployments.jobs.recorder import Ended, Recorder
from deployments.models import (
    Activation,
    Deployment,
    Generation,
    Replica,
    ReplicaState,
    Transition,
)
from mmadmin.core.activation import (
    WORDS,
    Kind,
    Mode,
    Phase,
    Walk,
    after,
    begin,
    choose_mode,
    may_turn_back,
    turn_back,
)
from mmadmin.core.engine import LaunchSpec, Seat
from mmadmin.core.errors import (
    Cancelled,
    Conflict,
    DoesNotFit,
    LeaseLost,
    MmError,
    ProbeFailed,
    Unreachable,
)
from mmadmin.core.lifecycle import GenerationState
from mmadmin.core.placement import Beside
from mmadmin.core.spec import ActivationSpec, parse_spec

log = logging.getLogger(__name__)

PATIENCE_S = 120
"""How long a phase waits for a supervisor or broker that does not answer."""
FLIP_SEEN_S = 10
"""How long the gates get to take up a route; they also read it from the file."""
PORTS = 1000
ACTIVE_REPLICA = (
    ReplicaState.STARTING,
    ReplicaState.PROBING,
    ReplicaState.READY,
    ReplicaState.DRAINING,
)
FORWARD_ATTEMPTS = 3
"""A walk that lost its worker so often before the flip goes back."""


class Hands(Protocol):
    """What an activation does to engines. Every method may be called again after a crash."""

    def preflight(self, generation: Generation) -> None:
        """Raise unless the generation's closure is intact and its engine could start here."""
        ...

    def beside(self, generation: Generation, running: Replica | None) -> Beside:
        """Whether there is memory for it now, beside or instead of what runs."""
        ...

    def launch(self, generation: Generation, seat: Seat) -> LaunchSpec:
        """The command that starts a replica in that seat."""
        ...

    def port_is_free(self, port: int) -> bool:
        """True when nothing listens on the port of this machine."""
        ...

    def start(self, replica: Replica, launch: LaunchSpec) -> None:
        """Put the engine under the supervisor, unless it runs already."""
        ...

    def prove(
        self,
        replica: Replica,
        launch: LaunchSpec,
        *,
        wanted: ActivationSpec | None,
        deadline_s: int,
        parent_report: Mapping[str, Any] | None,
        on_progress: Callable[[str], None],
        check: Callable[[], None],
    ) -> Mapping[str, Any]:
        """Wait until the engine has proved itself; returns the probe report.

        Without `wanted` only that it is the right one and answers: it has shown the rest before.
        """
        ...

    def process(self, replica: Replica) -> tuple[int, float] | None:
        """Pid and start time of the running engine."""
        ...

    def stop(self, replica: Replica) -> None:
        """End the engine's whole group; returns when port and memory are free."""
        ...


def walk(recorder: Recorder[Activation], hands: Hands) -> None:
    """Go through the phases that are left. Raises what the activation failed of, once undone."""
    Walker(recorder, hands).run()


class Walker:
    """One attempt at an activation."""

    def __init__(self, recorder: Recorder[Activation], hands: Hands) -> None:
        self.recorder = recorder
        self.hands = hands
        self.activation = Activation.objects.select_related(
            "deployment__host", "target__deployment", "previous__deployment", "host"
        ).get(pk=recorder.job.pk)
        self.activation.fence = recorder.job.fence
        recorder.job = self.activation
        self.deployment: Deployment = self.activation.deployment

    # --- order

    def run(self) -> None:
        """All that is left, forward or back."""
        walk = self._where()
        if not walk.undoing:
            try:
                self._check_attempts(walk)
                self._go(walk)
            except (LeaseLost, OperationalError, InterfaceError):
                raise
            except Exception as error:
                walk = self._where()
                if not may_turn_back(walk):
                    raise
                walk = self._begin_undo(walk, error)
            else:
                return
        self.recorder.ignore_cancel()
        self._go(walk)
        raise Ended(self.activation.error or {})

    def _check_attempts(self, walk: Walk) -> None:
        if self.activation.attempts > FORWARD_ATTEMPTS and may_turn_back(walk):
            raise lease.KILLED

    def _where(self) -> Walk:
        """The walk as the record has it."""
        it = self.activation
        begun = begin(Kind(it.kind), has_previous=it.previous is not None)
        live = Deployment.objects.values_list("live", flat=True).get(pk=self.deployment.pk)
        return replace(
            begun,
            phase=Phase(it.phase or begun.phase),
            mode=Mode(it.mode or Mode.OVERLAP),
            undoing=it.undoing,
            flipped=live == (it.target.pk if it.target else None) and bool(it.phase),
        )

    def _go(self, start: Walk) -> None:
        """From a phase to the end of its way."""
        walk: Walk | None = start
        while walk is not None:
            if walk.phase is Phase.FLIP:
                self._last_word()
            self._do(walk.phase)
            mode = Mode(self.activation.mode) if self.activation.mode else None
            walk = after(walk, mode=mode)
        self._close_phase()

    def _last_word(self) -> None:
        """Heed a cancel that the recorder has not seen yet; from here on one comes too late."""
        asked = Activation.objects.filter(
            pk=self.activation.pk, cancel_requested_at__isnull=False
        ).exists()
        if asked and self.activation.phase != Phase.FLIP:
            raise Cancelled("cancelled by a person")
        self.recorder.ignore_cancel()

    def _close_phase(self) -> None:
        phases = [dict(entry) for entry in self.activation.phases]
        phases[-1]["ended"] = timezone.now().isoformat()
        lease.write(self.activation, phases=phases)

    def _begin_undo(self, walk: Walk, error: Exception) -> Walk:
        if isinstance(error, MmError):
            as_json = error.as_json()
        else:
            log.error("activation %s", self.activation.pk, exc_info=error)
            as_json = states.bug(error)
        self.recorder.log(f"failed: {states.words(as_json)}")
        back = turn_back(walk)
        lease.write(self.activation, undoing=True, error=as_json, phase=back.phase)
        return back

    def _do(self, phase: Phase) -> None:
        """Enter a phase and do it, patient with a supervisor that is being restarted."""
        self.recorder.check()
        self._enter(phase)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                getattr(self, f"_{phase.value}")()
            except Unreachable as error:
                if time.monotonic() > deadline:
                    raise
                self.recorder.log(f"{phase.value}: {error}; trying again")
                self.recorder.wait(1)
            else:
                return

    def _enter(self, phase: Phase) -> None:
        now = timezone.now().isoformat()
        phases = [dict(entry) for entry in self.activation.phases]
        if not phases or phases[-1]["phase"] != phase.value:
            if phases:
                phases[-1]["ended"] = now
            phases.append({"phase": phase.value, "started": now, "ended": None})
        lease.write(self.activation, phase=phase.value, phases=phases)
        lease.announce(self.activation)
        self.recorder.log(f"--- {phase.value}: {WORDS[phase]}")

    # --- phases

    def _preflight(self) -> None:
        """Look whether all is there and whether there is room: overlap or swap."""
        target = self._target()
        self.hands.preflight(target)
        old = self.activation.previous
        running = self._replicas(old) if old is not None else []
        room = self.hands.beside(target, running[0] if running else None)
        if room.mode == "refuse":
            raise DoesNotFit(
                f"{target.uid} does not fit: {room.words}",
                remedy="use a smaller quant or context, or stop other deployments",
                **room.as_json(),
            )
        mode = choose_mode(
            self._options().mode,
            has_previous=bool(running),
            fits_beside=room.mode == "overlap",
        )
        lease.write(self.activation, mode=mode.value)
        self.recorder.log(f"{mode.value} of {target.uid}: {room.words}")

    def _hold(self) -> None:
        """New requests wait at the gates while there is no engine."""
        hold_s = self._options().hold_s + self._load_deadline_s(self._target())
        self._route(hold_until=timezone.now() + timedelta(seconds=hold_s))

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
        replica = self._replica_of(target)
        if (target.probe_report or {}).get("ok"):  # it does not change: what it showed holds
            self._prove(replica, target, wanted=None)
            return
        try:
            report = self._prove(replica, target, wanted=self._options())
        except ProbeFailed as error:
            if (failed := error.details.pop("report", None)) is not None:
                self._keep_report(target, failed)
            raise
        self._keep_report(target, report)

    def _keep_report(self, target: Generation, report: Mapping[str, Any]) -> None:
        with lease.fenced(self.activation):
            Generation.objects.filter(pk=target.pk).update(probe_report=report)

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
            Deployment.objects.filter(pk=self.deployment.pk).update(live=target, hold_until=None)
            if target is not None:
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
            self._old_drains(old)
        self._publish()
        timeout_s = self._options().drain_timeout_s
        idle = gates.wait_idle(
            old.uid,
            self.activation.snapshot_version,
            timeout_s=timeout_s,
            sleep=self.recorder.wait,
        )
        self.recorder.log(
            f"{old.uid} is idle" if idle else f"{old.uid} is still busy after {timeout_s} s: cut"
        )

    def _stop(self) -> None:
        """The old generation's engines end."""
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
            started = (GenerationState.STARTING, GenerationState.PROBING)
            not_begun = (GenerationState.BUILT, GenerationState.RETIRED)
            states.advance(
                target.pk,
                after,
                only_from=started if cancelled else started + not_begun,
                actor_id=self.activation.actor_id,
                reason=states.words(error),
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

    def _old_drains(self, old: Generation) -> None:
        states.advance(
            old.pk, GenerationState.DRAINING, only_from=(GenerationState.LIVE,), **self._by()
        )
        Replica.objects.filter(generation=old, state=ReplicaState.READY).update(
            state=ReplicaState.DRAINING
        )

    def _route(self, *, hold_until: Any) -> None:
        with lease.fenced(self.activation):
            Deployment.objects.filter(pk=self.deployment.pk).update(hold_until=hold_until)
        self._publish()

    def _publish(self) -> None:
        version = feed.publish_snapshot(force=False)
        lease.write(self.activation, snapshot_version=version)
        if not gates.wait_seen(version, timeout_s=FLIP_SEEN_S, sleep=self.recorder.wait):
            self.recorder.log(f"not every gate has told that it knows version {version}")

    def _replicas(self, generation: Generation) -> list[Replica]:
        return list(
            Replica.objects.filter(
                generation=generation, host=self.activation.host, state__in=ACTIVE_REPLICA
            ).select_related("generation__deployment", "host")
        )

    def _replica_of(self, generation: Generation) -> Replica:
        found = self._replicas(generation)
        if not found:
            raise Conflict(f"{generation.uid} has no replica", remedy="activate it again")
        return found[0]

    def _start_replica(self, generation: Generation) -> None:
        found = self._replicas(generation)
        replica = found[0] if found else self._seat(generation)
        launch = self.hands.launch(generation, seat_of(replica))
        self.recorder.log(f"{replica.uid} on port {replica.port}")
        Replica.objects.filter(pk=replica.pk).update(
            launch={"argv": list(launch.argv), "env": dict(launch.env)},
            slots=launch.probe.slots,
            context_per_slot=launch.probe.context_per_slot,
        )
        self.hands.start(replica, launch)

    def _seat(self, generation: Generation) -> Replica:
        """A replica row with a free port: the database decides between two that want it."""
        host = self.activation.host
        taken = set(
            Replica.objects.filter(host=host, state__in=ACTIVE_REPLICA).values_list(
                "port", flat=True
            )
        )
        first = settings.PORTS.engines_from
        for port in range(first, first + PORTS):
            if port in taken or not self.hands.port_is_free(port):
                continue
            try:
                with lease.fenced(self.activation):
                    return Replica.objects.create(
                        uid=f"{self.deployment.name}.{generation.number}.{secrets.token_hex(4)}",
                        generation=generation,
                        host=host,
                        port=port,
                        activation=self.activation,
                    )
            except IntegrityError:
                continue
        raise Conflict(
            f"no free port for an engine from {first} to {first + PORTS - 1}",
            remedy="stop what listens there, or set MM_ENGINE_PORTS_FROM",
        )

    def _prove(
        self, replica: Replica, generation: Generation, *, wanted: ActivationSpec | None
    ) -> Mapping[str, Any]:
        launch = self.hands.launch(generation, seat_of(replica))
        Replica.objects.filter(pk=replica.pk, state=ReplicaState.STARTING).update(
            state=ReplicaState.PROBING
        )
        try:
            report = self.hands.prove(
                replica,
                launch,
                wanted=wanted,
                parent_report=self._parent_report(),
                deadline_s=self._load_deadline_s(generation),
                on_progress=self.recorder.log,
                check=self.recorder.check,
            )
        finally:
            process = self.hands.process(replica)
            if process is not None:
                Replica.objects.filter(pk=replica.pk).update(pid=process[0], pid_started=process[1])
        with lease.fenced(self.activation):
            Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY, error="")
        return report

    def _parent_report(self) -> Mapping[str, Any] | None:
        return self.activation.previous.probe_report if self.activation.previous else None

    def _load_deadline_s(self, generation: Generation) -> int:
        wanted = parse_spec(generation.spec_toml).activation.load_deadline_s
        return wanted or self.hands.launch(generation, Seat("127.0.0.1", 1)).load_deadline_s

    def _stop_replicas(self, generation: Generation) -> None:
        for replica in self._replicas(generation):
            self.hands.stop(replica)
            with lease.fenced(self.activation):
                Replica.objects.filter(pk=replica.pk).update(
                    state=ReplicaState.STOPPED, stopped_at=timezone.now(), pid=None
                )
            self.recorder.log(f"{replica.uid} has ended")


def seat_of(replica: Replica) -> Seat:
    """Where a replica sits."""
    return Seat(host="127.0.0.1", port=replica.port)
