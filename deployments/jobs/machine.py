"""The machine as builds and activations touch it: store, network, supervisor, engines.

The only module of the jobs that knows the host room. Each method opens what it needs: nothing is
kept between jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from django.conf import settings

from deployments.jobs.host import Description
from deployments.models import Generation, Replica, ReplicaState, ReportKind
from mmadmin.core import catalog
from mmadmin.core.access import engine_secret
from mmadmin.core.build.builder import StepTools
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json, Recipe
from mmadmin.core.engines.protocol import SOMEWHERE, LaunchSpec, Seat, System
from mmadmin.core.engines.system import read_system
from mmadmin.core.errors import Conflict, InvalidModel, MmError, ProbeFailed
from mmadmin.core.fit.facts import HostFacts, host_facts_from_json
from mmadmin.core.fit.placement import (
    Beside,
    HostView,
    Running,
    Wanted,
    choose_seat,
    footprints_as_json,
    freed,
    promised,
    seats,
)
from mmadmin.core.home import Home
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.core.recipes.patch_template import rendering_of
from mmadmin.core.source_policy import Access
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.spec import ActivationSpec, Spec, parse_spec
from mmadmin.core.store import Staging, Store
from mmadmin.core.store.substitute import Substituter
from mmadmin.core.store.verify import require_intact
from mmadmin.host import engine_process, fit
from mmadmin.host.binary_caches import configured_substituter
from mmadmin.host.doctor import Patient, run_checks
from mmadmin.host.drift import drift
from mmadmin.host.engine_sandbox import holds_here, level_setting
from mmadmin.host.facts import driver_and_gpus, host_facts
from mmadmin.host.hub import Hub
from mmadmin.host.known_digests import KnownDigests
from mmadmin.host.probe import ask_rest, liveness, prove, work
from mmadmin.host.readiness import is_loading, wait_ready
from mmadmin.host.resolve import Sources, resolve
from mmadmin.host.source_guard import Guard
from mmadmin.host.template_matrix import render_in_child, template_of
from mmadmin.host.toolbox import HostConfig, HostToolbox

log = logging.getLogger(__name__)

LOG_LINES = 2000
"""Of an engine's log that are read for what it says about memory."""
Reports = Mapping[ReportKind, Any]


class Machine:
    """The present host, as builds, host tasks, activations, trials and the watch touch it."""

    def __init__(self) -> None:
        self.home: Home = settings.HOME

    # --- builds

    def store(self) -> Store:
        """The store of this machine."""
        return Store(self.home.store)

    def facts(self) -> HostFacts:
        """What this machine is."""
        try:
            sandbox = holds_here(level_setting()).message
        except MmError as error:  # the level that is asked for does not work
            sandbox = error.message
        return replace(host_facts(self.home.store), sandbox=sandbox)

    def resolve(
        self, spec: Spec, previous: Lock | None, access: Access, log: Callable[[str], None]
    ) -> Lock:
        """Pin the spec's moving parts."""
        guard = Guard(access, self.home)
        sources = Sources(digests=KnownDigests(self.home.digests), guard=guard)
        return resolve(spec, previous, sources=sources, on_progress=log)

    def goal(self, spec: Spec, lock: Lock, facts: HostFacts) -> Derivation:
        """The system's derivation."""
        fit.check_engine(spec, facts)
        return assemble(spec, lock, facts)

    def recipe(self, kind: str) -> Recipe:
        """The recipe of a kind."""
        return catalog.recipe(kind)

    def forecast(
        self, spec: Spec, lock: Lock, running: Sequence[Replica]
    ) -> tuple[Sequence[str], Any] | None:
        """Whether the model will fit, before it is fetched."""
        found = fit.before_download(spec, lock, self._view(running))
        return None if found is None else (found.messages, found.answer)

    def _view(self, running: Sequence[Replica]) -> HostView:
        """The machine with what runs on it."""
        facts = self.facts()
        views = [
            fit.running_view(replica.generation.deployment.name, replica.pid, facts)
            for replica in running
            if replica.pid is not None
        ]
        return HostView(settings.HOST_NAME, facts, views, fit.calibration_of(self.home))

    def substituter(self, store: Store, log: Callable[[str], None]) -> Substituter | None:
        """Other hosts' stores, where `substituters.json` names some."""
        return configured_substituter(self.home, store, report=log)

    def describe(self, system: str, spec: Spec) -> Description:
        """What a built system is, for the record."""
        store = self.store()
        found = read_system(store.object_path(system))
        sizes = [store.object(name) for name in store.closure(system)]
        reports: dict[ReportKind, Any] = {}
        for kind, make in REPORTS.items():
            try:
                data = make(self, found, spec, reports)
            except MmError as error:  # fails no build
                log.warning("%s of %s: %s", kind, found.alias, error)
            else:
                reports |= {} if data is None else {kind: data}
        return Description(sum(part.size for part in sizes if part is not None), reports)

    def toolbox(
        self,
        staging: Staging,
        log: Callable[[str], None],
        progress: Callable[[int, int, str], None],
        cancelled: Callable[[], bool],
        access: Access,
    ) -> StepTools:
        """What one build step can do to the host; no step's program sees private files."""
        config = replace(
            HostConfig.from_env(
                self.home.store / "downloads",
                hidden=self.home.private,
                guard=Guard(access, self.home),
            ),
            starting=self._starting,
        )
        return HostToolbox(staging, log, progress, cancelled, config=config)

    # --- host tasks

    def offers(
        self, repo: str, revision: str, options: dict[str, Any] | None, running: Sequence[Replica]
    ) -> dict[str, Any]:
        """A repository's models and whether each fits on this host."""
        return dict(fit.offers(Hub.from_env(), repo, revision, [self._view(running)], options))

    def examine(self) -> list[dict[str, Any]]:
        """What the doctor finds."""
        patient = Patient(
            home=self.home,
            ports=settings.PORTS,
            facts=self.facts(),
            redis_url=settings.REDIS_URL,
            hub=Hub.from_env(),
            public_origin=settings.PUBLIC_ORIGIN,
        )
        return [dict(result.as_json()) for result in run_checks(patient)]

    # --- activations

    def system(self, generation: Generation) -> System:
        """What a generation runs, from this machine's store."""
        return read_system(self.store().object_path(generation.system))

    def preflight(self, generation: Generation) -> None:
        """Raise unless every object of the closure is here and intact, and the engine can run.

        The engine is asked for its options here already: a swap stops the old one before it starts
        the new one.
        """
        require_intact(self.store(), generation.system)
        launch = self.launch(generation, SOMEWHERE)
        engine_process.check_command(self._with_closure(launch, generation))

    def beside(
        self, generation: Generation, running: Replica | None, gone: Sequence[Replica] = ()
    ) -> Beside:
        """Whether there is memory for it now, beside or instead of what runs, and on which GPUs."""
        facts = self.facts()
        facts = promised(facts, self._starting(facts, but=[*gone, *([running] if running else [])]))
        for replica in gone:
            if (held := self._holds(replica, facts)) is not None:
                facts = freed(facts, held)
        leaving = self._holds(running, facts) if running is not None else None
        known = fit.calibration_of(self.home)
        return choose_seat(seats(self._wanted(generation), facts, known, leaving), facts, leaving)

    def gpus(self, generation: Generation) -> list[dict[str, Json]] | None:
        """The GPUs that it starts on now; None on a machine without GPUs."""
        uuids = {gpu.index: gpu.uuid for gpu in driver_and_gpus()[1]}
        if not uuids:
            return None
        chosen = self.beside(generation, None).devices
        return [{"index": index, "uuid": uuids[index]} for index in chosen]

    def _wanted(self, generation: Generation) -> Wanted:
        """What is placed: by the system, its file and the machine that built it."""
        built_on = generation.host_facts
        return fit.wanted_of_system(
            self.system(generation),
            parse_spec(generation.spec_toml),
            host_facts_from_json(built_on) if built_on else None,
        )

    def _holds(self, replica: Replica, facts: HostFacts) -> Running | None:
        """What the replica's engine has of the host's memory; None when it does not run.

        A driver that names no processes (in a container) does not say it: then as predicted.
        """
        process = self.process(replica)
        if process is None:
            return None
        view = fit.running_view(replica.generation.uid, process.pid, facts)
        predicted = replica.footprint
        if view.devices or predicted is None:
            return view
        return replace(view, devices=predicted.running(view.name, None, facts).devices)

    def _starting(
        self, facts: HostFacts | None = None, but: Sequence[Replica] = ()
    ) -> list[Running]:
        """What engines that still load were given and have not taken yet."""
        found = Replica.objects.filter(
            host__name=settings.HOST_NAME,
            state__in=(ReplicaState.STARTING, ReplicaState.PROBING),
        ).select_related("generation__deployment", "host")
        replicas = [replica for replica in found if replica not in but]
        if not replicas:
            return []
        facts = facts or self.facts()
        return [self._promise(replica, facts) for replica in replicas]

    def _promise(self, replica: Replica, facts: HostFacts) -> Running:
        """What an engine that is still loading has not taken yet of what it was given."""
        process, promise = self.process(replica), replica.footprint
        name = replica.generation.uid
        if promise is None:
            return Running(name, {})
        held = fit.running_view(name, process.pid, facts) if process else Running(name, {})
        devices = zip(promise.devices, promise.per_device, strict=True)
        return Running(
            name,
            {index: max(size - held.devices.get(index, 0), 0) for index, size in devices},
            max(promise.own_bytes - held.host_bytes, 0),
        )

    def launch(self, generation: Generation, seat: Seat) -> LaunchSpec:
        """The command that starts a replica in that seat."""
        system = self.system(generation)
        return catalog.engine(system.engine_kind).launch(system, seat)

    def start(self, replica: Replica, launch: LaunchSpec) -> str:
        """Put the engine under the supervisor, unless it runs already; its sandbox's level."""
        found = engine_process.status(self.home, replica.uid)
        runs = found is not None and found.state in ("STARTING", "RUNNING", "BACKOFF")
        if runs and engine_process.runs(self.home, replica.uid, launch):
            return engine_process.sandbox_level(self.home, replica.uid)
        shown = self._with_closure(launch, replica.generation)
        shown = replace(shown, devices=replica.gpu_indices)
        engine_process.start(self.home, replica.uid, shown, self.secret(replica))
        return engine_process.sandbox_level(self.home, replica.uid)

    def _with_closure(self, launch: LaunchSpec, generation: Generation) -> LaunchSpec:
        """The launch with the folders of all that its generation is made of."""
        store = self.store()
        closure = [str(store.object_path(name)) for name in store.closure(generation.system)]
        return replace(launch, readable=[*launch.readable, *closure])

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
        """Wait until the engine has proved itself; returns the probe report."""
        secret = self.secret(replica)
        if wanted is None:
            ready = wait_ready(
                self.home,
                replica.uid,
                launch,
                secret,
                deadline_s=deadline_s,
                on_progress=on_progress,
                check=check,
            )
            if replica.gpu_indices:
                self._on_its_gpus(replica)
            return ready.as_json()
        report = prove(
            self.home,
            replica.uid,
            launch,
            secret,
            wanted=wanted,
            deadline_s=deadline_s,
            parent_report=parent_report,
            brief=brief,
            on_progress=on_progress,
            check=check,
        )
        return report.as_json() | {"memory": self._on_its_gpus(replica)}

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
        secret = self.secret(replica)
        return ask_rest(launch, secret, report, may_generate=may_generate, on_progress=on_progress)

    def _seated(self, replica: Replica, facts: HostFacts) -> fit.Seated | None:
        """The running engine beside its plan; None where there is none."""
        process = self.process(replica)
        if process is None:
            return None
        devices = replica.gpu_indices
        if devices is None:
            devices = [gpu.index for gpu in facts.gpus]
        try:
            wanted = self._wanted(replica.generation)
            made = fit.estimate_on(wanted, facts, devices, fit.calibration_of(self.home))
        except MmError as error:
            log.warning("memory of %s: %s", replica.uid, error)
            return None
        return fit.Seated(wanted, made, devices, process.pid)

    def _on_its_gpus(self, replica: Replica) -> list[dict[str, Json]]:
        """Predicted beside measured memory; raises `ProbeFailed` unless the GPUs hold the model."""
        facts = self.facts()
        seated = self._seated(replica, facts)
        if seated is None:
            return []
        lines = engine_process.log_tail(self.home.engine_log(replica.uid), LOG_LINES)
        if replica.gpu_indices and (fault := fit.missing_on_gpus(seated, facts, lines)):
            raise ProbeFailed(
                fault,
                remedy="look at the engine's log; if it is meant for the CPU, its file must say so",
                probe="gpus",
            )
        return fit.report(seated, facts, lines, home=self.home)

    def process(self, replica: Replica) -> ProcessIdentity | None:
        """The running engine's process."""
        return engine_process.process(self.home, replica.uid)

    def stop(self, replica: Replica) -> None:
        """End the engine's whole group."""
        engine_process.stop(self.home, replica.uid, recorded=replica.process)

    def secret(self, replica: Replica) -> str:
        """What the engine asks of whoever speaks to it."""
        master: bytes = settings.ENGINE_MASTER
        if not master:
            raise Conflict("this installation has no engine secret yet", remedy="run `mm up` first")
        return engine_secret(master, replica.uid)

    # --- watching

    def alive(self, replica: Replica, launch: LaunchSpec) -> None:
        """Raise `Unreachable` unless a tiny completion comes back in time."""
        liveness(launch, self.secret(replica))

    def loading(self, replica: Replica, launch: LaunchSpec) -> bool:
        """True while the engine loads its model, for as long as that may take."""
        process = self.process(replica)
        if process is None or process.age_s > launch.load_deadline_s:
            return False
        return is_loading(launch, self.secret(replica))

    def work(self, replica: Replica, launch: LaunchSpec) -> str | None:
        """A mark of how far the engine's requests are; empty = none is in work, None = unknown."""
        return work(launch, self.secret(replica))

    def drift(self, replica: Replica, launch: LaunchSpec) -> Mapping[str, str]:
        """What differs between the running engine and its plan: subject → message."""
        found = drift(
            self.home,
            replica.uid,
            launch,
            system=self.system(replica.generation),
            secret=self.secret(replica),
            store=self.store(),
        )
        messages: dict[str, list[str]] = {}
        for one in found:
            messages.setdefault(one.what, []).append(one.message)
        return {what: "; ".join(said) for what, said in messages.items()}


def _command(_machine: Machine, system: System, _spec: Spec, _made: Reports) -> list[str]:
    """The engine's argv in a seat that says nothing."""
    return list(catalog.engine(system.engine_kind).launch(system, SOMEWHERE).argv)


def _template(_machine: Machine, system: System, _spec: Spec, _made: Reports) -> str:
    """The template that it is served with; empty where the model has none."""
    try:
        return template_of(system)
    except InvalidModel:
        return ""


def _renders(_machine: Machine, _system: System, _spec: Spec, made: Reports) -> Any:
    """What the template makes of each conversation; None = it has no template."""
    template = made.get(ReportKind.TEMPLATE)
    return dict(render_in_child({"template": template})["template"]) if template else None


def _rendering(_machine: Machine, system: System, _spec: Spec, _made: Reports) -> Any:
    """What the template's patches change; None = it has none."""
    return rendering_of(system.template) if system.template else None


def _model(_machine: Machine, system: System, _spec: Spec, _made: Reports) -> Any:
    """What the model says about itself."""
    return dict(system.facts.metadata) if system.facts else None


def _needs(machine: Machine, system: System, spec: Spec, _made: Reports) -> Any:
    """The memory that its engine will hold on each set of GPUs, whatever runs on them now."""
    facts = machine.facts()
    gpus = [replace(gpu, memory_free_bytes=gpu.memory_total_bytes) for gpu in facts.gpus]
    facts = replace(facts, gpus=tuple(gpus))
    wanted = fit.wanted_of_system(system, spec, facts)
    return footprints_as_json(list(seats(wanted, facts, fit.calibration_of(machine.home))))


REPORTS: Mapping[ReportKind, Callable[[Machine, System, Spec, Reports], Any]] = {
    ReportKind.COMMAND: _command,
    ReportKind.TEMPLATE: _template,
    ReportKind.RENDERS: _renders,
    ReportKind.RENDERING: _rendering,
    ReportKind.MODEL: _model,
    ReportKind.NEEDS: _needs,
}
"""Who makes each report of a built system, in this order; None = there is nothing to report."""
