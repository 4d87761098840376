"""Engines as jobs see them: a seat for a generation, a process in it, its proof, its end.

Activations and trials start their engines with the same hands. A replica's row comes before its
process and ends after it, so that no engine runs that the records do not know. Each step looks at
what is already so before it acts, and may be done again after a crash.

Effects go through `Hands`, so that all of this is tested without an engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from django.conf import settings
from django.db import IntegrityError
from django.utils import timezone

from deployments.broker import feed
from deployments.jobs import gates, lease
from deployments.jobs.recorder import Recorder
from deployments.models import Generation, Host, Replica, ReplicaState, Trial
from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.protocol import LaunchSpec, Seat
from mmadmin.core.engines.stored_launch import launch_as_json, launch_from_json
from mmadmin.core.errors import Conflict, ProbeFailed, Unreachable
from mmadmin.core.fit.placement import Beside
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.core.spec.spec import ActivationSpec, parse_spec

PATIENCE_S = 120
"""How long a step waits for a supervisor or broker that does not answer."""
SEEN_S = 10
"""How long the gates get to take up a route; they also read it from the file."""
PORTS = 1000
ACTIVE_REPLICA = (
    ReplicaState.STARTING,
    ReplicaState.PROBING,
    ReplicaState.READY,
    ReplicaState.DRAINING,
)


class Hands(Protocol):
    """What jobs do to engines. Every method may be called again after a crash."""

    def preflight(self, generation: Generation) -> None:
        """Raise unless the generation's closure is intact and its engine could start here."""
        ...

    def beside(
        self, generation: Generation, running: Replica | None, gone: Sequence[Replica] = ()
    ) -> Beside:
        """Whether there is memory for it now, beside or instead of what runs.

        It is looked at as if the engines of `gone` had ended.
        """
        ...

    def gpus(self, generation: Generation) -> list[dict[str, Json]] | None:
        """The GPUs that it starts on now, each `{"index", "uuid"}`; None = the machine has none."""
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
        brief: bool,
        on_progress: Callable[[str], None],
        check: Callable[[], None],
    ) -> Mapping[str, Any]:
        """Wait until the engine has proved itself; returns the probe report.

        Without `wanted` only that it is the right one and answers: it has shown the rest before.
        A `brief` report lacks the rows that decide nothing.
        """
        ...

    def ask_rest(
        self,
        replica: Replica,
        launch: LaunchSpec,
        report: Mapping[str, Any],
        *,
        may_generate: Callable[[], bool],
        on_progress: Callable[[str], None],
    ) -> Mapping[str, Any]:
        """The report with the rows that it lacks, asked of the engine while it serves."""
        ...

    def process(self, replica: Replica) -> ProcessIdentity | None:
        """The running engine's process."""
        ...

    def stop(self, replica: Replica) -> None:
        """End the engine's whole group; returns when port and memory are free."""
        ...


class Engines:
    """The engines of one job: the walks of activations and trials are made of these steps."""

    trial: Trial | None = None
    """Whose engines these are: of this trial, or of none."""

    def __init__(self, recorder: Recorder[Any], hands: Hands) -> None:
        self.recorder = recorder
        self.hands = hands

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
        """The job's own: what is on trial is no activation's, unless that has taken it over."""
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
        self.recorder.log(f"{replica.uid} on port {replica.port}{gpus}")
        self.hands.start(replica, launch_of(replica, self.hands))

    def _seat(self, generation: Generation) -> Replica:
        """A replica row with a port and GPUs: the database decides between two that want them."""
        host = self.recorder.job.host
        for port in ports(host, self.hands.port_is_free):
            try:
                with lease.fenced(self.recorder.job):
                    # two that start at once must see each other's GPUs
                    Host.objects.select_for_update().get(pk=host.pk)
                    return Replica.objects.create(
                        uid=new_uid(generation),
                        generation=generation,
                        host=host,
                        port=port,
                        devices=self.hands.gpus(generation),
                        **self._belongs_to(),
                    )
            except IntegrityError:
                continue
        first = settings.PORTS.engines_from
        raise Conflict(
            f"no free port for an engine from {first} to {first + PORTS - 1}",
            remedy="stop what listens there, or set MM_ENGINE_PORTS_FROM",
        )

    def _show(self, generation: Generation, *, brief: bool = False) -> None:
        """The engine shows that it is what it should be; what it showed once is not asked again."""
        replica = self._replica_of(generation)
        if (generation.probe_report or {}).get("ok"):  # it does not change: what it showed holds
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
        with lease.fenced(self.recorder.job):
            Generation.objects.filter(pk=generation.pk).update(probe_report=report)
        generation.probe_report = dict(report)

    def _prove(
        self,
        replica: Replica,
        generation: Generation,
        *,
        wanted: ActivationSpec | None,
        brief: bool = False,
    ) -> Mapping[str, Any]:
        launch = launch_of(replica, self.hands)
        Replica.objects.filter(pk=replica.pk, state=ReplicaState.STARTING).update(
            state=ReplicaState.PROBING
        )
        try:
            report = self.hands.prove(
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
            process = self.hands.process(replica)
            if process is not None:
                note_process(replica, process)
        with lease.fenced(self.recorder.job):
            Replica.objects.filter(pk=replica.pk).update(state=ReplicaState.READY, error="")
        return report

    def _load_deadline_s(self, generation: Generation) -> int:
        wanted = parse_spec(generation.spec_toml).activation.load_deadline_s
        return wanted or self.hands.launch(generation, Seat("127.0.0.1", 1)).load_deadline_s

    def _publish(self) -> None:
        """Tell the gates what is so now, and wait a moment until all of them know."""
        version = feed.publish_snapshot(force=False)
        lease.write(self.recorder.job, snapshot_version=version)
        if not gates.wait_seen(version, timeout_s=SEEN_S, sleep=self.recorder.wait):
            self.recorder.log(f"not every gate has told that it knows version {version}")

    def _stop_replicas(self, generation: Generation) -> None:
        for replica in self._replicas(generation):
            self.hands.stop(replica)
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


def ports(host: Host, is_free: Callable[[int], bool]) -> Iterator[int]:
    """Ports for one more engine of the host, lowest first: no replica has them, nothing listens."""
    taken = set(
        Replica.objects.filter(host=host, state__in=ACTIVE_REPLICA).values_list("port", flat=True)
    )
    first = settings.PORTS.engines_from
    return (n for n in range(first, first + PORTS) if n not in taken and is_free(n))


def new_uid(generation: Generation) -> str:
    """The name of one more replica of a generation."""
    return f"{generation.uid.replace('/', '.')}.{secrets.token_hex(4)}"


def seat_of(replica: Replica) -> Seat:
    """Where a replica sits."""
    return Seat(
        host="127.0.0.1",
        port=replica.port,
        devices=replica.gpu_indices,
        uuids=[str(gpu["uuid"]) for gpu in replica.devices or ()],
        scratch=str(settings.HOME.scratch(replica.uid)),
    )


class Launches(Protocol):
    """What plans launches."""

    def launch(self, generation: Generation, seat: Seat) -> LaunchSpec:
        """The command that starts a replica in that seat."""
        ...


def launch_of(replica: Replica, launches: Launches) -> LaunchSpec:
    """What the replica is started with, by its record; recorded now if it has none yet."""

    def planned() -> LaunchSpec:
        return launches.launch(replica.generation, seat_of(replica))

    if replica.launch:
        return launch_from_json(replica.launch, planned)
    launch = planned()
    replica.launch = launch_as_json(launch)
    replica.slots = launch.expect.slots
    replica.context_per_slot = launch.expect.context_per_slot
    replica.save(update_fields=["launch", "slots", "context_per_slot"])
    return launch
