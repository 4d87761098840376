"""The machine as builds and activations touch it: store, network, supervisor, engines.

The only module of the jobs that knows the host room. Each method opens what it needs: nothing is
kept between jobs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import psutil
from django.conf import settings

from deployments.jobs.builds import Description
from deployments.models import Generation, Replica
from mmadmin.core import catalog
from mmadmin.core.access import engine_secret
from mmadmin.core.assemble import assemble
from mmadmin.core.builder import StepTools
from mmadmin.core.derivation import Derivation
from mmadmin.core.engine import LaunchSpec, Needs, Seat, System
from mmadmin.core.errors import Conflict, DoesNotFit, StoreCorrupt
from mmadmin.core.facts import HostFacts
from mmadmin.core.home import Home
from mmadmin.core.lock import Lock
from mmadmin.core.recipe import Json, Recipe
from mmadmin.core.spec import Spec
from mmadmin.core.store import Staging, Store
from mmadmin.core.system import read_system
from mmadmin.host import engine_process
from mmadmin.host.facts import host_facts
from mmadmin.host.readiness import wait_ready
from mmadmin.host.resolve import resolve
from mmadmin.host.toolbox import HostConfig, HostToolbox

RESERVE_SHARE = 20
"""A twentieth of a memory stays free beside what engines are predicted to need."""


class Machine:
    """The hands of builds and of activations on this host."""

    def __init__(self) -> None:
        self.home: Home = settings.HOME

    # --- builds

    def store(self) -> Store:
        """The store of this machine."""
        return Store(self.home.store)

    def facts(self) -> HostFacts:
        """What this machine is."""
        return host_facts(self.home.store)

    def resolve(self, spec: Spec, previous: Lock | None, log: Callable[[str], None]) -> Lock:
        """Pin the spec's moving parts."""
        return resolve(spec, previous, on_progress=log)

    def goal(self, spec: Spec, lock: Lock, facts: HostFacts) -> Derivation:
        """The system's derivation."""
        return assemble(spec, lock, facts)

    def recipe(self, kind: str) -> Recipe:
        """The recipe of a kind."""
        return catalog.recipe(kind)

    def describe(self, system: str) -> Description:
        """What a built system is, for the record."""
        store = self.store()
        found = read_system(store.object_path(system))
        launch = catalog.engine(found.engine_kind).launch(found, Seat(host="127.0.0.1", port=0))
        sizes = [store.object(name) for name in store.closure(system)]
        return Description(
            command=launch.argv,
            template=found.template.read_text(encoding="utf-8") if found.template else None,
            size_bytes=sum(part.size for part in sizes if part is not None),
        )

    def toolbox(
        self,
        staging: Staging,
        log: Callable[[str], None],
        progress: Callable[[int, int, str], None],
        cancelled: Callable[[], bool],
    ) -> StepTools:
        """The hands of one build step; no step's program may see the secrets."""
        config = HostConfig.from_env(self.home.store / "downloads", hidden=[self.home.secrets])
        return HostToolbox(staging, log, progress, cancelled, config=config)

    # --- activations

    def system(self, generation: Generation) -> System:
        """What a generation runs, from this machine's store."""
        return read_system(self.store().object_path(generation.system))

    def preflight(self, generation: Generation) -> None:
        """Raise unless every object of the closure is here and complete."""
        store = self.store()
        for name in store.closure(generation.system):
            if store.object(name) is None:
                raise StoreCorrupt(
                    f"{generation.uid} needs {name}, which is not in the store",
                    remedy="build the generation again",
                )
        system = read_system(store.object_path(generation.system))
        for part in (system.engine, system.model, system.template, system.mmproj):
            if part is not None and not part.exists():
                raise StoreCorrupt(
                    f"{generation.uid} needs {part.name}, which is not in the store",
                    remedy="`mm store verify` says what is damaged; build the generation again",
                )

    def fits_beside(self, generation: Generation, running: Generation) -> bool:
        """True when memory is free for both; raises `DoesNotFit` when not even for one."""
        facts = self.facts()
        wanted = self._needs(generation)
        if facts.gpus and wanted.per_device:
            free = sorted((gpu.memory_free_bytes for gpu in facts.gpus), reverse=True)
            if all(
                need <= have for need, have in zip(wanted.per_device, free, strict=False)
            ) and len(wanted.per_device) <= len(free):
                return True
            total = sorted((gpu.memory_total_bytes for gpu in facts.gpus), reverse=True)
            if len(wanted.per_device) > len(total) or any(
                need > have for need, have in zip(wanted.per_device, total, strict=False)
            ):
                raise self._does_not_fit(generation, wanted, total)
            return False
        spare = facts.memory_total_bytes // RESERVE_SHARE
        if wanted.host_bytes + spare <= facts.memory_available_bytes:
            return True
        held = self._needs(running).host_bytes
        if wanted.host_bytes > facts.memory_available_bytes + held:
            raise self._does_not_fit(generation, wanted, [facts.memory_available_bytes + held])
        return False

    def _needs(self, generation: Generation) -> Needs:
        system = self.system(generation)
        if system.facts is None:
            return Needs(parts={})
        return catalog.engine(system.engine_kind).needs(system.facts, system.options)

    def _does_not_fit(self, generation: Generation, wanted: Needs, have: list[int]) -> DoesNotFit:
        need = sum(wanted.per_device) or wanted.host_bytes
        return DoesNotFit(
            f"{generation.uid} needs {need / 2**30:.1f} GiB, and only "
            f"{sum(have) / 2**30:.1f} GiB can be made free",
            remedy="use a smaller quant or context, or stop other deployments",
            parts=dict(wanted.parts),
        )

    def launch(self, generation: Generation, seat: Seat) -> LaunchSpec:
        """The command that starts a replica in that seat."""
        system = self.system(generation)
        return catalog.engine(system.engine_kind).launch(system, seat)

    def port_is_free(self, port: int) -> bool:
        """True when the port can be bound."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
        return engine_process.port_owner(port) is None

    def start(self, replica: Replica, launch: LaunchSpec) -> None:
        """Put the engine under the supervisor, unless it runs already."""
        found = engine_process.status(self.home, replica.uid)
        if found is not None and found.state in ("STARTING", "RUNNING", "BACKOFF"):
            return
        engine_process.start(self.home, replica.uid, launch, self._secret(replica))

    def wait_ready(
        self,
        replica: Replica,
        launch: LaunchSpec,
        *,
        deadline_s: int,
        on_progress: Callable[[str], None],
        check: Callable[[], None],
    ) -> Mapping[str, Json]:
        """Wait until the engine has proved itself; returns the probe report."""
        return wait_ready(
            self.home,
            replica.uid,
            launch,
            self._secret(replica),
            deadline_s=deadline_s,
            on_progress=on_progress,
            check=check,
        ).as_json()

    def process(self, replica: Replica) -> tuple[int, float] | None:
        """Pid and start time of the running engine."""
        found = engine_process.status(self.home, replica.uid)
        if found is None or not found.pid:
            return None
        try:
            return found.pid, psutil.Process(found.pid).create_time()
        except psutil.NoSuchProcess:
            return None

    def stop(self, replica: Replica) -> None:
        """End the engine's whole group."""
        engine_process.stop(
            self.home,
            replica.uid,
            port=replica.port,
            pid=replica.pid,
            started=replica.pid_started,
        )

    def _secret(self, replica: Replica) -> str:
        master: bytes = settings.ENGINE_MASTER
        if not master:
            raise Conflict("this installation has no engine secret yet", remedy="run `mm up` first")
        return engine_secret(master, replica.uid)
