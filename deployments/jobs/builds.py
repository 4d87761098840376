"""A build: spec → lock → graph → plan → objects → a system that can go live.

Each part leaves its result in the record before the next begins, and the store keeps every
finished step, so a build that is killed anywhere goes on where it was when it is claimed again.
Effects on the machine go through `host.BuildHost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from deployments.broker import feed
from deployments.broker.queue import enqueue_on_commit
from deployments.jobs import lease, reports, states
from deployments.jobs.host import BuildHost, Description
from deployments.jobs.recorder import Recorder
from deployments.models import (
    Activation,
    ActivationKind,
    Build,
    BuildStep,
    Generation,
    Replica,
    ReplicaState,
    StepState,
)
from mmadmin.core.build.builder import GoalRoot, StepTools, realise
from mmadmin.core.build.derivation import Derivation, graph_from_json, graph_to_json, topological
from mmadmin.core.build.planner import Plan, plan
from mmadmin.core.errors import (
    Cancelled,
    DigestMismatch,
    LeaseLost,
    MmError,
    SourceUnavailable,
)
from mmadmin.core.generations.history_file import only_the_same
from mmadmin.core.generations.lifecycle import GenerationState, JobState, waiting_message
from mmadmin.core.source_policy import Access
from mmadmin.core.spec.lock import Lock, lock_as_json, lock_from_json
from mmadmin.core.spec.spec import Spec, parse_spec
from mmadmin.core.store import Staging, Store, StoreObject
from mmadmin.core.store.substitute import Substituter

STATE_OF_ACTION = {"cached": StepState.CACHED}
FAILED = (GenerationState.FAILED,)
NOT_NEEDED = "not needed: its inputs came out as before"


def run(recorder: Recorder[Build], machine: BuildHost) -> None:
    """Do the whole build, or what is left of it. Raises what it failed of."""
    build = Build.objects.select_related(
        "generation__deployment__host", "generation__parent", "deployment", "host"
    ).get(pk=recorder.job.pk)
    build.fence = recorder.job.fence
    recorder.job = build
    recorder.check()
    generation = build.generation
    if generation is not None:
        with lease.fenced(build):
            states.advance(
                generation.pk,
                GenerationState.BUILDING,
                only_from=(GenerationState.PLANNED, *([] if generation.system else FAILED)),
                actor_id=build.actor_id,
                reason=generation.reason,
            )
    spec = parse_spec(build.spec_toml)
    access = build.access
    access.check_spec(spec)  # a record may have been made another way than by our actions
    recorder.phase("locking")
    lock = _lock(recorder, machine, spec, access)
    access.check_lock(lock)
    recorder.phase("planning")
    facts = machine.facts()
    again = generation is not None and bool(generation.system)
    if generation is not None and again:
        goal = graph_from_json(generation.graph)  # what it was made of, whatever the host is now
    else:
        goal = machine.goal(spec, lock, facts)
    access.check_graph(goal)
    store = machine.store()
    substituter = machine.substituter(store, recorder.log)
    planned = plan(goal, store, machine.recipe, substituter)
    as_json = planned.as_json() | {
        "disk_free_bytes": store.free_bytes(),
        "disk_usable_bytes": store.usable_bytes(),
    }
    if any(step.action == "fetch" for step in planned.steps):
        as_json["fit"] = _forecast(recorder, machine, spec, lock)
    with lease.fenced(build):
        Build.objects.filter(pk=build.pk).update(plan=as_json)
        _write_steps(build, goal, planned)
        if generation is not None and not again:
            Generation.objects.filter(pk=generation.pk).update(
                graph=graph_to_json(goal), host_facts=facts.as_json()
            )
    feed.announce_job(build)
    if generation is not None:
        recorder.phase("building")
        if again:
            with only_the_same():
                system = _realise(
                    recorder, machine, goal, store, generation, substituter=substituter
                )
            _compare(generation, system)
            return
        system = _realise(recorder, machine, goal, store, generation, substituter=substituter)
        _finish(recorder, generation, system, machine.describe(system, spec), store)


def _compare(generation: Generation, system: str) -> None:
    """What was built again must be what it was."""
    if system != generation.system:
        raise DigestMismatch(
            f"{generation.uid} came out as {system} instead of {generation.system}",
            remedy="a step does not make the same bytes twice: `mm build --check` says which",
            expected=generation.system,
            actual=system,
        )


def _forecast(recorder: Recorder[Build], machine: BuildHost, spec: Spec, lock: Lock) -> Any:
    """What fits where, before the download; None where that is unknown."""
    running = Replica.objects.filter(host=recorder.job.host, state=ReplicaState.READY)
    try:
        found = machine.forecast(spec, lock, list(running.select_related("generation__deployment")))
    except SourceUnavailable as error:
        recorder.log(f"whether it fits is unknown for now: {error}")
        return None
    if found is None:
        return None
    for line in found[0]:
        recorder.log(line)
    return found[1]


def _lock(recorder: Recorder[Build], machine: BuildHost, spec: Spec, access: Access) -> Lock:
    """The generation's lock, made once; a dry run's is thrown away."""
    generation = recorder.job.generation
    if generation is not None and generation.lock is not None:
        return lock_from_json(generation.lock)
    before = generation.parent if generation else _newest(recorder.job)
    previous = lock_from_json(before.lock) if before is not None and before.lock else None
    lock = machine.resolve(spec, previous, access, recorder.log)
    if generation is not None:
        with lease.fenced(recorder.job):
            Generation.objects.filter(pk=generation.pk, lock__isnull=True).update(
                lock=lock_as_json(lock)
            )
    recorder.check()
    return lock


def _newest(build: Build) -> Generation | None:
    if build.deployment is None:
        return None
    return build.deployment.live or build.deployment.generations.first()


def _write_steps(build: Build, goal: Derivation, planned: Plan) -> None:
    """One row a planned step; rows of an earlier attempt are brought up to date."""
    digests = {step.digest for step in planned.steps}
    BuildStep.objects.filter(build=build).exclude(derivation__in=digests).delete()
    order = {derivation.digest: n for n, derivation in enumerate(topological(goal))}
    for step in sorted(planned.steps, key=lambda step: order[step.digest]):
        BuildStep.objects.update_or_create(
            build=build,
            derivation=step.digest,
            defaults={
                "position": order[step.digest],
                "name": step.derivation.name,
                "recipe": step.derivation.recipe,
                "inputs": sorted(
                    d.digest for d in step.derivation.inputs.values() if d.digest in digests
                ),
                "state": STATE_OF_ACTION.get(step.action, StepState.WAITING),
                "why": step.why,
                "output": step.output or "",
                "size_bytes": step.size_bytes,
                "waits_for": "",
                "error": None,
            },
        )


def _realise(
    recorder: Recorder[Build],
    machine: BuildHost,
    goal: Derivation,
    store: Store,
    generation: Generation,
    *,
    substituter: Substituter | None,
) -> str:
    """Build what is missing; returns the name of the system object."""
    observer, access = StepRecorder(recorder, store), recorder.job.access

    def tools_for(derivation: Derivation, staging: Staging, log_path: Path) -> StepTools:
        step_id = observer.step(derivation).pk
        log_file = log_path.open("a", encoding="utf-8", errors="replace", buffering=1)
        observer.log_files.append(log_file)

        def log(line: str) -> None:
            log_file.write(line + "\n")
            recorder.log(line, step_id)

        return machine.toolbox(
            staging,
            log,
            lambda done, total, unit: recorder.progress(step_id, done, total, unit),
            recorder.cancelled,
            access,
        )

    try:
        done = realise(
            goal,
            store,
            tools_for,
            observer,
            root=GoalRoot("generation", generation.uid, f"generation {generation.uid}"),
            recipe_of=machine.recipe,
            host=recorder.job.host.name,
            substituter=substituter,
            owner=f"build {recorder.job.pk} of {generation.uid}",
        )
    except LeaseLost:
        raise
    except BaseException:
        recorder.check()  # a job that went elsewhere, or was cancelled, says so
        raise
    finally:
        observer.close()
    return done.object


WAITS_FOR_LENGTH = 200
"""Characters that a step's row has room for."""


class StepRecorder:
    """Writes each step's fate into its row: the builder's `Observer`."""

    def __init__(self, recorder: Recorder[Build], store: Store) -> None:
        self.recorder = recorder
        self.store = store
        self.log_files: list[Any] = []
        self._steps: dict[str, BuildStep] = {
            step.derivation: step for step in BuildStep.objects.filter(build=recorder.job.pk)
        }

    def step(self, derivation: Derivation) -> BuildStep:
        """The row of a derivation; made now when the plan did not have the step."""
        found = self._steps.get(derivation.digest)
        if found is None:
            found = BuildStep.objects.create(
                build=self.recorder.job,
                position=len(self._steps),
                derivation=derivation.digest,
                name=derivation.name,
                recipe=derivation.recipe,
                inputs=sorted(d.digest for d in derivation.inputs.values()),
            )
            self._steps[derivation.digest] = found
        return found

    def close(self) -> None:
        """Close the log files."""
        for file in self.log_files:
            file.close()
        self.log_files.clear()

    def _write(self, derivation: Derivation, **values: Any) -> None:
        step = self.step(derivation)
        self.recorder.flush()
        with lease.fenced(self.recorder.job):
            BuildStep.objects.filter(pk=step.pk).update(**values)
        build = self.recorder.job
        of_job = {build.noun: build.pk}
        feed.announce("step", step.pk, deployment=build.deployment_name, of_job=of_job)

    def step_started(self, derivation: Derivation, why: str) -> None:
        """The step is being built or fetched."""
        self.recorder.check()
        if self.step(derivation).waits_for:
            self._go_on(derivation, f"no longer waits for {self.step(derivation).waits_for}")
        self._write(
            derivation,
            state=StepState.RUNNING,
            why=why,
            waits_for="",
            started_at=timezone.now(),
            ended_at=None,
            error=None,
        )

    def step_waiting(self, derivation: Derivation, holder: str) -> None:
        """Say what it waits for when that is new, and look for a cancel each time."""
        self.recorder.check()
        step = self.step(derivation)
        holder = holder[:WAITS_FOR_LENGTH]
        if step.waits_for == holder:
            return
        if not step.waits_for:
            self.recorder.phase("waiting")
        step.waits_for = holder
        self.recorder.log(waiting_message(holder), step.pk)
        self._write(derivation, state=StepState.WAITING, waits_for=holder, started_at=None)

    def _go_on(self, derivation: Derivation, message: str) -> None:
        """The wait is over."""
        step = self.step(derivation)
        self.recorder.log(message, step.pk)
        step.waits_for = ""
        self.recorder.phase("building")

    def step_cached(self, derivation: Derivation, found: StoreObject) -> None:
        """Nothing had to be done, or another builder did it meanwhile."""
        step = self._steps.get(derivation.digest)
        if step is None:
            return
        more: dict[str, Any] = {}
        if step.waits_for:
            more = {"why": f"made meanwhile by {step.waits_for}", "waits_for": ""}
            self._go_on(derivation, f"{step.waits_for} has made it")
        self._write(
            derivation,
            state=StepState.CACHED,
            output=found.name,
            size_bytes=found.size,
            started_at=None,
            **more,
        )

    def step_built(self, derivation: Derivation, found: StoreObject, seconds: float) -> None:  # noqa: ARG002
        """The step is done, here or by another host."""
        substituted = any(
            record.derivation == derivation.digest and record.sandbox == "substituted"
            for record in self.store.realisations_of(found.name)
        )
        self._write(
            derivation,
            state=StepState.SUBSTITUTED if substituted else StepState.BUILT,
            output=found.name,
            size_bytes=found.size,
            ended_at=timezone.now(),
        )

    def step_failed(self, derivation: Derivation, error: BaseException) -> None:
        """The step failed; the job's end marks a step that was cancelled or errored."""
        if isinstance(error, MmError) and not isinstance(error, Cancelled | LeaseLost):
            self._write(
                derivation,
                state=StepState.FAILED,
                error=error.as_json(),
                ended_at=timezone.now(),
            )


def _finish(
    recorder: Recorder[Build],
    generation: Generation,
    system: str,
    described: Description,
    store: Store,
) -> None:
    """The generation is built; it goes live when that was asked for."""
    build = recorder.job
    recorder.flush()
    reports.write(generation, described.reports, build, store)
    queued = True
    with lease.fenced(build):
        BuildStep.objects.filter(build=build, state=StepState.WAITING).update(
            state=StepState.CACHED, why=NOT_NEEDED
        )
        states.advance(
            generation.pk,
            GenerationState.BUILT,
            actor_id=build.actor_id,
            system=system,
            size_bytes=described.size_bytes,
            built_at=timezone.now(),
        )
        if build.activate_after:
            queued = _activate(build, generation)
    if not queued:
        recorder.log(
            f"not activated: another activation of {generation.deployment.name} is under way; "
            f"activate generation {generation.number} when that has ended"
        )


def _activate(build: Build, generation: Generation) -> bool:
    """Queue the activation; False where one is under way, which is not disturbed."""
    deployment = generation.deployment
    live = type(deployment).objects.values_list("live", flat=True).get(pk=deployment.pk)
    try:
        with transaction.atomic():
            activation = Activation.objects.create(
                deployment=deployment,
                target=generation,
                previous_id=live,
                kind=ActivationKind.ACTIVATE,
                reason=generation.reason,
                host=build.host,
                actor=build.actor,
            )
    except IntegrityError:
        return False
    enqueue_on_commit(activation)
    feed.announce_job(activation)
    return True


def next_build(host_id: int, exclude: Sequence[int] = ()) -> Build | None:
    """The build that has waited longest for a slot on the host."""
    waiting = Build.objects.filter(host=host_id, state=JobState.QUEUED).exclude(pk__in=exclude)
    return waiting.select_related("host", "deployment").order_by("pk").first()
