"""Realising derivations: one, or a goal with everything that it needs.

Any number of builders may want the same derivation at once: one builds, the others wait and take
its result. A builder that is killed leaves nothing that counts; the next one starts afresh.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mmadmin.core import catalog
from mmadmin.core.build.derivation import Derivation, thawed, topological
from mmadmin.core.build.outputs import check_mentions
from mmadmin.core.build.planner import Outputs, RecipeOf, checked_recipe, plan_with, usable, why_now
from mmadmin.core.build.recipe import FixedFile, Recipe, Requirements, Requiring, Toolbox
from mmadmin.core.callbacks import Report, silent
from mmadmin.core.errors import Conflict, DigestMismatch, MmError, StoreCorrupt
from mmadmin.core.store import Entry, Lease, Realisation, Staging, Store, StoreObject
from mmadmin.core.store.disk import disk_full
from mmadmin.core.store.tree import fixed_entries, object_name
from mmadmin.core.store.verify import is_intact

if TYPE_CHECKING:
    from mmadmin.core.store.substitute import Substituter  # loads cryptography


class StepTools(Toolbox, Protocol):
    """A toolbox that also tells the builder how the step was done."""

    @property
    def known(self) -> Mapping[str, str]:
        """Digests of output files, by path inside the output, that need not be read again."""
        ...

    def holding(
        self, wanted: Requirements, owner: str, on_wait: Report
    ) -> AbstractContextManager[None]:
        """Have what a step requires, from here to the end of the block; waits until it is free.

        `on_wait` is told what is missing, at every look. Raises `DoesNotFit` when the host can
        never have it, and `Cancelled`.
        """
        ...

    @property
    def sandbox_level(self) -> str:
        """What fenced the step's programs in: bubblewrap, unshare or none."""
        ...


ToolsFor = Callable[[Derivation, Staging, Path], StepTools]
"""(derivation, attempt, log file) → the step's toolbox."""


class Observer(Protocol):
    """Sees how a goal is realised; may raise `Cancelled` to stop between steps."""

    def step_started(self, derivation: Derivation, why: str) -> None:
        """The step is being built or fetched; said again when it is, after a wait."""
        ...

    def step_waiting(self, derivation: Derivation, holder: str) -> None:
        """Another builder makes the same, or what the step requires is not free.

        `holder` is the other build's `owner`, or what is missing.

        Asked several times a second, for as long as that takes: return to go on waiting, raise
        (`Cancelled`, `LeaseLost`) to stop at once.
        """
        ...

    def step_cached(self, derivation: Derivation, found: StoreObject) -> None:
        """Nothing had to be done."""
        ...

    def step_built(self, derivation: Derivation, found: StoreObject, seconds: float) -> None:
        """The step is done."""
        ...

    def step_failed(self, derivation: Derivation, error: BaseException) -> None:
        """The step failed; the error goes on to the caller."""
        ...


class _Unobserved:
    """An observer that ignores everything."""

    step_started = step_waiting = step_cached = step_built = step_failed = staticmethod(silent)


UNOBSERVED: Observer = _Unobserved()


@dataclass(frozen=True, slots=True)
class GoalRoot:
    """A root to set on the goal before the build's lease ends, so that nothing is collected."""

    kind: str
    key: str
    reason: str


def realise(
    goal: Derivation,
    store: Store,
    toolbox_for: ToolsFor,
    observer: Observer,
    *,
    root: GoalRoot | None = None,
    recipe_of: RecipeOf = catalog.recipe,
    substituter: Substituter | None = None,
    host: str = "",
    owner: str = "",
) -> Realisation:
    """Realise a goal and everything that it needs, in order; returns the goal's record.

    What is here already is only reported, unless it is damaged: then it is made again.
    Demand-driven: a step that an early cutoff made needless is neither built nor reported. What
    `substituter` can get from other stores is not built; what it cannot after all, is. `root` is
    set before the lease ends. `owner` names the builder for those who wait for a step of it.
    """
    with store.lease(owner or f"build of {goal.label}") as lease:
        outputs = Outputs(store, recipe_of, substituter)
        _find_damage(goal, outputs, lease)
        reported = _report_cached(goal, outputs, observer, lease)
        tried: set[str] = set()
        while (derivation := next_step(goal, outputs, tried)) is not None:
            if substituter and derivation.digest not in tried and outputs.of(derivation).object:
                tried.add(derivation.digest)
                if _substitute(derivation, outputs, substituter, observer, lease):
                    reported.add(derivation.digest)
                continue
            if derivation.digest in reported:
                raise StoreCorrupt(
                    f"{derivation.label} was built, but the store does not show it",
                    remedy="look for damage with `mm store verify`",
                )
            reported.add(derivation.digest)
            _step(derivation, outputs, toolbox_for, observer, lease=lease, host=host)
        for derivation in topological(goal):  # cut off early: an input came out as before
            known = outputs.of(derivation)
            if derivation.digest not in reported and known.here and known.object:
                observer.step_cached(derivation, _there(store, known.object))
        known = outputs.of(goal)
        if known.object is None or known.resolved_key is None:
            raise StoreCorrupt(f"{goal.label} was built, but the store has no record of it")
        store.protect(lease, [known.object])
        if root is not None:
            store.add_root(root.kind, root.key, known.object, root.reason)
        return store.realisation(known.resolved_key) or _fixed_record(
            goal, known.resolved_key, known.object
        )


def next_step(goal: Derivation, outputs: Outputs, tried: AbstractSet[str]) -> Derivation | None:
    """The one derivation that can be realised now and that `goal` needs; None when it is here.

    Goes down only where it must: into inputs whose output is unknown, and once all are known and
    the step itself is not here, into inputs that are not here. Where other stores are asked, a
    step whose output is known is first tried there (`tried` are those that were).
    """
    derivation = goal
    while not usable(outputs, derivation):
        known = outputs.of(derivation)
        ask = outputs.elsewhere is not None and derivation.digest not in tried
        if known.fixed is not None or (ask and known.object is not None):
            return derivation
        inputs = list(derivation.inputs.values())
        below = [d for d in inputs if outputs.of(d).object is None]
        below = below or [d for d in inputs if not usable(outputs, d)]
        if not below:
            return derivation
        derivation = below[0]
    return None


def _substitute(
    derivation: Derivation,
    outputs: Outputs,
    substituter: Substituter,
    observer: Observer,
    lease: Lease,
) -> bool:
    """Get a step's known output from another store; False when it cannot be had."""
    known = outputs.of(derivation)
    if known.object is None or known.resolved_key is None:
        return False
    begin = time.monotonic()
    observer.step_started(derivation, "looked for in other stores")
    if known.elsewhere:
        made_from = _made_from(derivation, outputs)
        done = substituter.pull_output(known.resolved_key, lease, made_from) is not None
    else:
        done = substituter.pull(known.object, lease)
    if done:
        found = _there(outputs.store, known.object)
        for step in topological(derivation):  # so that it is found again without asking
            _write_record(step, outputs)
        outputs.refresh()
        observer.step_built(derivation, found, time.monotonic() - begin)
    return done


def _write_record(derivation: Derivation, outputs: Outputs) -> None:
    known = outputs.of(derivation)
    if known.elsewhere and known.resolved_key and known.object:
        record = Realisation(
            known.resolved_key,
            derivation.digest,
            known.object,
            "substituted",
            inputs=_made_from(derivation, outputs),
        )
        outputs.store.record(record, derivation, object_elsewhere=True)


def _made_from(derivation: Derivation, outputs: Outputs) -> tuple[str, ...]:
    """The objects that a step with a known key is made from; a pinned one is made from none."""
    if outputs.of(derivation).fixed is not None:
        return ()
    found = (outputs.of(needed).object for needed in derivation.inputs.values())
    return tuple(sorted({name for name in found if name is not None}))


def _find_damage(goal: Derivation, outputs: Outputs, lease: Lease) -> None:
    """Look for damage in what would be taken from the store, so that it is made again.

    Of a goal that is here, only what it needs at run time is looked at.
    """
    store, known = outputs.store, outputs.of(goal)
    if known.object and usable(outputs, goal) and not store.protect(lease, [known.object]):
        names = set(store.closure(known.object))
    else:
        found = (outputs.of(derivation) for derivation in topological(goal))
        names = {one.object for one in found if one.here and one.object}
        names -= set(store.protect(lease, names))
    outputs.damaged.update(name for name in names if not is_intact(store, name))


def _report_cached(
    goal: Derivation, outputs: Outputs, observer: Observer, lease: Lease
) -> set[str]:
    """Protect and report what is here; the digests of what was reported."""
    store = outputs.store
    planned = plan_with(goal, outputs)
    steps = [step for step in planned.steps if step.action == "cached"]
    gone = set(store.protect(lease, [step.output for step in steps if step.output]))
    reported = set()
    for step in steps:
        if step.output and step.output not in gone:
            observer.step_cached(step.derivation, _there(store, step.output))
            reported.add(step.digest)
    return reported


def _step(
    derivation: Derivation,
    outputs: Outputs,
    toolbox_for: ToolsFor,
    observer: Observer,
    *,
    lease: Lease,
    host: str,
) -> None:
    begin, waited = time.monotonic(), False

    def on_wait(holder: str) -> None:
        nonlocal waited
        waited = True
        observer.step_waiting(derivation, holder)

    def on_begin() -> None:
        nonlocal begin, waited
        if waited:  # the other builder did not finish it, or what the step requires is free
            begin, waited = time.monotonic(), False
            observer.step_started(derivation, why_now(derivation, outputs))

    observer.step_started(derivation, why_now(derivation, outputs))
    work = _Work(derivation, outputs, toolbox_for, lease, host)
    try:
        done, built = _build(work, on_wait, on_begin)
    except BaseException as error:
        observer.step_failed(derivation, error)
        raise
    found = _there(outputs.store, done.object)
    outputs.refresh()
    if built:
        observer.step_built(derivation, found, time.monotonic() - begin)
    else:
        observer.step_cached(derivation, found)


def _there(store: Store, name: str) -> StoreObject:
    found = store.object(name)
    if found is None:
        raise StoreCorrupt(f"{name} vanished from the store while it was leased")
    return found


def _fixed_record(derivation: Derivation, key: str, name: str) -> Realisation:
    return Realisation(key, derivation.digest, name, "fixed", built_at=int(time.time()), inputs=())


@dataclass(frozen=True, slots=True)
class _Work:
    derivation: Derivation
    outputs: Outputs
    toolbox_for: ToolsFor
    lease: Lease
    host: str


def _build(work: _Work, on_wait: Report, on_begin: Callable[[], None]) -> tuple[Realisation, bool]:
    """The record, and whether anything had to be done for it."""
    derivation, outputs, lease = work.derivation, work.outputs, work.lease
    store = outputs.store
    recipe = checked_recipe(derivation, outputs.recipe_of)
    inputs = _inputs(derivation, outputs, lease)
    key = outputs.of(derivation).resolved_key
    if key is None:
        raise Conflict(f"{derivation.label}: an input is not realised")
    with store.lock(
        f"build-{key}", on_wait=on_wait, report_every_s=0, owner=lease.owner
    ) as lock_fd:
        store.after("locked")
        outputs.refresh()
        found = outputs.of(derivation)  # look again: another builder may have done it
        if found.here and found.object and not store.protect(lease, [found.object]):
            record = store.realisation(key)
            if record is None:  # pinned content that came some other way
                record = _fixed_record(derivation, key, found.object)
                store.record(record, derivation)
            if usable(outputs, derivation):
                return record, False
        on_begin()
        with store.staging(lease, inherit=(lock_fd,)) as staging:
            store.after("staged")
            attempt = _Attempt(work, key, recipe, found.fixed, inputs, on_wait, on_begin)
            return _perform(attempt, store, staging), True


@dataclass(frozen=True, slots=True)
class _Attempt:
    work: _Work
    key: str
    recipe: Recipe
    fixed: Sequence[FixedFile] | None
    inputs: Mapping[str, StoreObject]
    on_wait: Report
    on_begin: Callable[[], None]


def _inputs(derivation: Derivation, outputs: Outputs, lease: Lease) -> dict[str, StoreObject]:
    """The input objects, protected by the lease; a pinned output needs none."""
    if outputs.of(derivation).fixed is not None:
        return {}
    found = {}
    for name, needed in derivation.inputs.items():
        output = outputs.of(needed).object
        if output is None or outputs.store.protect(lease, [output]):
            outputs.refresh()
            raise Conflict(
                f"{derivation.label}: its input {needed.label} is not in the store",
                remedy="build again; the whole graph is realised in order",
            )
        found[name] = _there(outputs.store, output)
    return found


def _perform(attempt: _Attempt, store: Store, staging: Staging) -> Realisation:
    derivation, recipe = attempt.work.derivation, attempt.recipe
    log = store.layout.logs / f"{attempt.key[:32]}-{staging.folder.name}.log"
    begin = time.monotonic()
    known: Mapping[str, str] = {}
    sandbox = "fixed"
    if attempt.fixed is not None and store.assemble(attempt.fixed, staging):
        log_name = ""
    else:
        log_name = log.name
        tools = attempt.work.toolbox_for(derivation, staging, log)
        inputs = {name: found.path for name, found in attempt.inputs.items()}
        try:
            with _requirements(attempt, tools):
                recipe.build(thawed(derivation.params), inputs, staging.out, tools)
        except DigestMismatch as error:
            _keep(store, error)
            raise
        except OSError as error:
            raise disk_full(error, doing=f"building {derivation.label}") or error from error
        known, sandbox = tools.known, tools.sandbox_level
        if attempt.fixed is None:
            check_mentions(staging.out, _transient(attempt, staging), skip=known)
    store.after("written")

    def record(name: str) -> Realisation:
        return Realisation(
            resolved_key=attempt.key,
            derivation=derivation.digest,
            object=name,
            sandbox=sandbox,
            host=attempt.work.host,
            built_ms=round((time.monotonic() - begin) * 1000),
            built_at=int(time.time()),
            log=log_name,
            inputs=tuple(sorted({found.name for found in attempt.inputs.values()})),
        )

    refs = [found.name for found in attempt.inputs.values()] if recipe.refers_to_inputs else []
    expect = None
    if attempt.fixed is not None:
        expect = object_name(fixed_entries(attempt.fixed), derivation.name)
    sealed = store.seal(
        staging,
        derivation.name,
        refs=refs,
        known=known,
        expect=expect,
        realise=record,
        derivation=derivation,
        on_mismatch=lambda entries: _mismatch(attempt, entries),
    )
    return record(sealed.name)


@contextmanager
def _requirements(attempt: _Attempt, tools: StepTools) -> Iterator[None]:
    """What the recipe requires, held while it builds."""
    recipe, derivation = attempt.recipe, attempt.work.derivation
    if not isinstance(recipe, Requiring):
        yield
        return
    wanted = recipe.requires(thawed(derivation.params))
    owner = f"{derivation.label} ({attempt.work.lease.owner})"
    with tools.holding(wanted, owner, attempt.on_wait):
        attempt.on_begin()
        yield


def _transient(attempt: _Attempt, staging: Staging) -> dict[bytes, str]:
    """What the output may not mention: the bytes, and a description."""
    found = {os.fsencode(staging.folder): "the folder that it was built in"}
    if not attempt.recipe.refers_to_inputs:
        for name, one in attempt.inputs.items():
            found[one.hash.encode()] = f"the store path of its input {name}"
    return found


def _keep(store: Store, error: DigestMismatch) -> None:
    """Keep what was fetched under its true digest: a corrected pin downloads nothing."""
    path, actual = error.details.get("path"), error.details.get("actual")
    if not isinstance(path, str) or not isinstance(actual, str):
        return
    file = Path(path)
    mine = any(f in file.parents for f in (store.layout.staging, store.layout.downloads))
    if mine and file.is_file():
        store.keep_blob(file, actual)


def _mismatch(attempt: _Attempt, entries: tuple[Entry, ...]) -> MmError:
    """Says which pinned file came out otherwise, and as what."""
    pinned = {entry.path: entry for entry in fixed_entries(attempt.fixed or ())}
    found = {entry.path: entry for entry in entries}
    for path in sorted(pinned.keys() | found.keys()):
        want, got = pinned.get(path), found.get(path)
        if want == got:
            continue
        label = attempt.work.derivation.label
        if want is None or got is None:
            state = "is not pinned" if want is None else "is missing"
            return DigestMismatch(f"{label}: the file {path} {state}", path=path)
        return DigestMismatch(
            f"{label}: {path} has sha256 {got.sha256} ({got.size} bytes), "
            f"pinned is {want.sha256} ({want.size} bytes)",
            remedy="if the new content is right, lock again: what was fetched is kept",
            path=path,
            expected=want.sha256,
            actual=got.sha256,
        )
    return DigestMismatch(f"{attempt.work.derivation.label}: the output is not as pinned")
