"""Engines as jobs see them: a seat for a generation, a process in it, its proof, its end.

Activations and trials start their engines with the same machine. A replica's row comes before its
process and ends after it, so that no engine runs that the records do not know. Each step looks at
what is already so before it acts, and may be done again after a crash.

Effects go through `host.EngineHost`, so that all of this is tested without an engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from django.conf import settings
from django.utils import timezone

from deployments.broker import feed
from deployments.jobs import gates, lease, reports
from deployments.jobs.host import EngineHost
from deployments.jobs.recorder import Recorder
from deployments.models import Generation, Host, Replica, ReplicaState, ReportKind, Trial
from mmadmin.core.engines.protocol import SOMEWHERE, LaunchSpec, Seat
from mmadmin.core.engines.stored_launch import is_stored, launch_as_json, launch_from_json
from mmadmin.core.errors import Conflict, ProbeFailed, Unreachable
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.core.spec.spec import ActivationSpec, parse_spec

PATIENCE_S = 120
"""How long a step waits for a supervisor or broker that does not answer."""
SEEN_S = 10
"""How long the gates get to take up a route; they also read it from the file."""
ACTIVE_REPLICA = (
    ReplicaState.STARTING,
    ReplicaState.PROBING,
    ReplicaState.READY,
    ReplicaState.DRAINING,
)


class Engines:
    """The engines of one job: the runs of activations and trials are made of these steps."""

    trial: Trial | None = None
    """Whose engines these are: of this trial, or of none."""

    def __init__(self, recorder: Recorder[Any], machine: EngineHost) -> None:
        self.recorder = recorder
        self.machine = machine

    def _belongs_to(self) -> dict[str, Any]:
        """The fields of a new replica that say which job started it."""
        raise NotImplementedError

    def _parent_report(self) -> Mapping[str, Any] | None:
        """What the generation that is live has shown, for comparison."""
        raise NotImplementedError

    def _patiently(self, what: str, act: Callable[[], None]) -> None:
        """Do it, patient with a supervisor that is being restarted."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                act()
            except Unreachable as error:
                if time.monotonic() > deadline:
                    raise
                self.recorder.log(f"{what}: {error}; trying again")
                self.recorder.wait(1)
            else:
                return

    def _replicas(self, generation: Generation) -> list[Replica]:
        """The job's own; a trial's engine only for an activation that has taken it over."""
        found = Replica.objects.filter(
            generation=generation,
            host=self.recorder.job.host,
            trial=self.trial,
            state__in=ACTIVE_REPLICA,
        )
        return list(found.select_related("generation__deployment", "host"))

    def _replica_of(self, generation: Generation) -> Replica:
        found = self._replicas(generation)
        if not found:
            raise Conflict(f"{generation.uid} has no replica", remedy="activate it again")
        return found[0]

    def _start_replica(self, generation: Generation) -> None:
        found = self._replicas(generation)
        replica = found[0] if found else self._seat(generation)
        gpus = "".join(f", GPU {index}" for index in replica.gpu_indices or ())
        self.recorder.log(f"{replica.uid}{gpus}")
        start(replica, launch_of(replica, self.machine), self.machine)

    def _seat(self, generation: Generation) -> Replica:
        """A replica row with GPUs: the database decides between two that want them."""
        host = self.recorder.job.host
        with lease.fenced(self.recorder.job):
            # two that start at once must see each other's GPUs
            Host.objects.select_for_update().get(pk=host.pk)
            return Replica.objects.create(
                uid=new_uid(generation),
                generation=generation,
                host=host,
                devices=self.machine.gpus(generation),
                **self._belongs_to(),
            )

    def _show(self, generation: Generation, *, brief: bool = False) -> None:
        """The engine shows that it is what it should be; what it showed once is not asked again."""
        replica = self._replica_of(generation)
        if (generation.report(ReportKind.PROBES) or {}).get(
            "ok"
        ):  # it does not change: what it showed holds
            self._prove(replica, generation, wanted=None)
            return
        wanted = parse_spec(generation.spec_toml).activation
        try:
            report = self._prove(replica, generation, wanted=wanted, brief=brief)
        except ProbeFailed as error:
            if (failed := error.details.pop("report", None)) is not None:
                self._keep_report(generation, failed)
            raise
        self._keep_report(generation, report)

    def _keep_report(self, generation: Generation, report: Mapping[str, Any]) -> None:
        made = {ReportKind.PROBES: dict(report)}
        reports.write(generation, made, self.recorder.job, self.machine.store())

    def _prove(
        self,
        replica: Replica,
        generation: Generation,
        *,
        wanted: ActivationSpec | None,
        brief: bool = False,
    ) -> Mapping[str, Any]:
        launch = launch_of(replica, self.machine)
        Replica.objects.filter(pk=replica.pk, state=ReplicaState.STARTING).update(
            state=ReplicaState.PROBING
        )
        try:
            report = self.machine.prove(
                replica,
                launch,
                wanted=wanted,
                parent_report=self._parent_report(),
                brief=brief,
                deadline_s=self._load_deadline_s(generation),
                on_progress=self.recorder.log,
                check=self.recorder.check,
            )
        finally:
            process = self.machine.process(replica)
            if process is not None:
                note_process(replica, process)
        with lease.fenced(self.recorder.job):
            Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY, error="")
        return report

    def _load_deadline_s(self, generation: Generation) -> int:
        wanted = parse_spec(generation.spec_toml).activation.load_deadline_s
        return wanted or self.machine.launch(generation, SOMEWHERE).load_deadline_s

    def _publish(self) -> None:
        """Tell the gates what is so now, and wait a moment until all of them know."""
        version = feed.publish_snapshot(force=False)
        lease.write(self.recorder.job, snapshot_version=version)
        if not gates.wait_seen(version, timeout_s=SEEN_S, sleep=self.recorder.wait):
            self.recorder.log(f"not every gate has confirmed version {version}")

    def _stop_replicas(self, generation: Generation) -> None:
        for replica in self._replicas(generation):
            self.machine.stop(replica)
            with lease.fenced(self.recorder.job):
                Replica.objects.filter(pk=replica.pk).update(
                    state=ReplicaState.STOPPED, stopped_at=timezone.now(), pid=None
                )
            self.recorder.log(f"{replica.uid} has ended")


def note_process(replica: Replica, process: ProcessIdentity | None) -> None:
    """Write down which process the replica is now; None = none."""
    if process is None:
        Replica.objects.filter(pk=replica.pk).update(pid=None)
        return
    Replica.objects.filter(pk=replica.pk).update(
        pid=process.pid, started=process.started, boot=process.boot
    )


def new_uid(generation: Generation) -> str:
    """The name of one more replica of a generation."""
    return f"{generation.uid.replace('/', '.')}.{secrets.token_hex(4)}"


def seat_of(replica: Replica) -> Seat:
    """Where a replica sits."""
    return Seat(
        socket=str(settings.HOME.engine_socket(replica.uid)),
        devices=replica.gpu_indices,
        uuids=[str(gpu["uuid"]) for gpu in replica.devices or ()],
        scratch=str(settings.HOME.scratch(replica.uid)),
    )


def start(replica: Replica, launch: LaunchSpec, machine: EngineHost) -> None:
    """Start the replica's engine, unless it runs, and record the level of its sandbox."""
    level = machine.start(replica, launch)
    Replica.objects.filter(pk=replica.pk).update(sandbox=level)


def launch_of(replica: Replica, machine: EngineHost) -> LaunchSpec:
    """What the replica is started with, by its record; recorded now if it has none yet."""
    if is_stored(replica.launch):
        return launch_from_json(replica.launch)
    launch = machine.launch(replica.generation, seat_of(replica))
    replica.launch = launch_as_json(launch)
    replica.slots = launch.expect.slots
    replica.context_per_slot = launch.expect.context_per_slot
    replica.save(update_fields=["launch", "slots", "context_per_slot"])
    return launch
