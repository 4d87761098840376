"""Goal + store → plan: what is here, what must be built, and why.

A plan is advice: it may be stale when it is carried out, so the builder looks again under its
lock. It is topological (inputs first) and minimal: an input that is gone, of a step that is here,
is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mmadmin.core import catalog
from mmadmin.core.build.derivation import Derivation, thawed, topological
from mmadmin.core.build.recipe import FixedFile, Recipe
from mmadmin.core.canonical import digest
from mmadmin.core.errors import InvalidDerivation, NotFound, StoreCorrupt
from mmadmin.core.store import Store
from mmadmin.core.store.tree import fixed_entries, object_name
from mmadmin.core.store.verify import is_intact

if TYPE_CHECKING:
    from mmadmin.core.store.substitute import Substituter  # loads cryptography

FIXED_DOMAIN = "mmadmin-fixed-v1"

SHORT = 24
"""Longest value that a reason quotes."""

Action = Literal["cached", "substitute", "build", "fetch"]
RecipeOf = Callable[[str], Recipe]
"""Finds a recipe by its kind (`catalog.recipe`)."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the store knows about a derivation's output."""

    resolved_key: str | None
    """None while an input's output is unknown."""
    object: str | None
    """Name, also when the object is not here; None = unknown until it is built."""
    here: bool
    fixed: Sequence[FixedFile] | None = None
    elsewhere: bool = False
    """True when another store says, by enough trusted signatures, that it has the object."""


class Outputs:
    """Outputs of derivations as far as they are known: pinned, or recorded under their key.

    Remembers what it found; call `refresh` after the store changed.
    """

    def __init__(
        self,
        store: Store,
        recipe_of: RecipeOf = catalog.recipe,
        elsewhere: Substituter | None = None,
    ) -> None:
        self.store = store
        self.recipe_of = recipe_of
        self.elsewhere = elsewhere
        self.damaged: set[str] = set()
        """Names of objects that are known to be damaged: they have to be made again."""
        self._known: dict[str, Known] = {}

    def of(self, derivation: Derivation) -> Known:
        """What is known about one derivation; looks at its inputs first."""
        if derivation.digest not in self._known:
            for needed in topological(derivation):
                if needed.digest not in self._known:
                    self._known[needed.digest] = self._look(needed)
        return self._known[derivation.digest]

    def refresh(self) -> None:
        """Look again at what was not here or damaged; call it after a build or a collection."""
        self.damaged = {name for name in self.damaged if not is_intact(self.store, name)}
        self._known = {
            key: known
            for key, known in self._known.items()
            if known.here and known.object and self._is_here(known.object)
        }

    def damaged_in(self, name: str) -> set[str]:
        """Names of damaged objects among an object and all that it needs."""
        if not self.damaged:
            return set()
        try:
            return self.damaged.intersection(self.store.closure(name))
        except NotFound:  # collected meanwhile
            return set()

    def _is_here(self, name: str) -> bool:
        try:
            return self.store.has_object(name)
        except StoreCorrupt:  # its folder is gone
            self.damaged.add(name)
            return False

    def _look(self, derivation: Derivation) -> Known:
        recipe = checked_recipe(derivation, self.recipe_of)
        fixed = recipe.fixed_output(thawed(derivation.params))
        if fixed is not None:
            entries = fixed_entries(fixed)
            name = object_name(entries, derivation.name)
            key = digest(
                FIXED_DOMAIN,
                {"name": derivation.name, "files": [entry.as_json() for entry in entries]},
            )
            return Known(key, name, self._is_here(name), fixed)
        realised: dict[str, str] = {}
        for input_name, needed in derivation.inputs.items():
            output = self._known[needed.digest].object
            if output is None:
                return Known(None, None, here=False)
            realised[input_name] = output if recipe.refers_to_inputs else output[:64]
        key = derivation.resolved_key(realised)
        record = self.store.realisation_record(key)
        if record is not None and (self.elsewhere is None or self._is_here(record.object)):
            return Known(key, record.object, self._is_here(record.object))
        there = self.elsewhere.output(key) if self.elsewhere else None
        if there is not None:
            return Known(key, there, self._is_here(there), elsewhere=True)
        return Known(key, record.object if record else None, here=False)


def checked_recipe(derivation: Derivation, recipe_of: RecipeOf = catalog.recipe) -> Recipe:
    """The derivation's recipe, once it accepted the params; `InvalidDerivation` otherwise."""
    recipe = recipe_of(derivation.recipe)
    if recipe.version != derivation.version:
        raise InvalidDerivation(
            f"{derivation.label} is for version {derivation.version} of its recipe, "
            f"this mmadmin has version {recipe.version}",
            remedy="lock the spec again to plan with the recipes of this version",
        )
    recipe.check(thawed(derivation.params))
    return recipe


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One derivation of a plan."""

    derivation: Derivation
    action: Action
    why: str
    output: str | None
    """Object name, where it is known beforehand."""
    size_bytes: int
    """cached: the object's size; fetch: bytes still to fetch; build: 0, not known."""
    certain: bool = True
    """False when an input is rebuilt: this step is skipped if that comes out as before."""

    @property
    def digest(self) -> str:
        """Of the derivation."""
        return self.derivation.digest

    def as_json(self) -> dict[str, Any]:
        """The step as data."""
        return {
            "derivation": self.digest,
            "name": self.derivation.name,
            "recipe": self.derivation.recipe,
            "inputs": [needed.digest for needed in self.derivation.inputs.values()],
            "action": self.action,
            "why": self.why,
            "output": self.output,
            "size_bytes": self.size_bytes,
            "certain": self.certain,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do for a goal: steps in order, inputs first."""

    goal: Derivation
    steps: tuple[PlanStep, ...]
    copied_bytes: int = 0
    """Bytes of inputs that its build steps write once more (`Recipe.copies`)."""

    @property
    def work(self) -> tuple[PlanStep, ...]:
        """The steps that are not cached."""
        return tuple(step for step in self.steps if step.action != "cached")

    @property
    def fetch_bytes(self) -> int:
        """Bytes still to fetch, as far as they are known."""
        return sum(step.size_bytes for step in self.steps if step.action == "fetch")

    @property
    def written_bytes(self) -> int:
        """Bytes that it adds to the store at least: what is fetched, and copies of it.

        What other steps write is not known before they have run.
        """
        return self.fetch_bytes + self.copied_bytes

    def count(self, action: Action) -> int:
        """How many steps have this action."""
        return sum(step.action == action for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        """The plan as data."""
        return {
            "goal": self.goal.digest,
            "steps": [step.as_json() for step in self.steps],
            "cached": self.count("cached"),
            "build": self.count("build"),
            "fetch": self.count("fetch"),
            "substitute": self.count("substitute"),
            "fetch_bytes": self.fetch_bytes,
            "written_bytes": self.written_bytes,
        }


def plan(
    goal: Derivation,
    store: Store,
    recipe_of: RecipeOf = catalog.recipe,
    elsewhere: Substituter | None = None,
) -> Plan:
    """What must be done for `goal`; changes nothing.

    Everything that is here is listed as cached; of what is not here, only what the goal needs.
    """
    return plan_with(goal, Outputs(store, recipe_of, elsewhere))


def plan_with(goal: Derivation, outputs: Outputs) -> Plan:
    """The same, by what is known already."""
    outputs.of(goal)
    order = topological(goal)
    here = {d.digest for d in order if usable(outputs, d)}
    needed = {goal.digest}
    for derivation in reversed(order):
        known = outputs.of(derivation)
        if derivation.digest in needed - here and known.fixed is None and not known.elsewhere:
            needed.update(d.digest for d in derivation.inputs.values())
    steps = []
    for derivation in order:
        if derivation.digest in here:
            steps.append(_cached(derivation, outputs))
        elif derivation.digest in needed:
            steps.append(_todo(derivation, outputs))
    sizes = {step.digest: step.size_bytes for step in steps}
    copied = sum(
        sizes.get(step.derivation.inputs[name].digest, 0)
        for step in steps
        if step.action == "build"
        for name in outputs.recipe_of(step.derivation.recipe).copies
        if name in step.derivation.inputs
    )
    return Plan(goal, tuple(steps), copied)


def usable(outputs: Outputs, derivation: Derivation) -> bool:
    """True when its object is here and whole, with everything that the object needs."""
    known = outputs.of(derivation)
    if not known.here or known.object is None:
        return False
    return not outputs.damaged_in(known.object) and not outputs.store.lost_reference(known.object)


def why_now(derivation: Derivation, outputs: Outputs) -> str:
    """Why a derivation that is not usable has to be realised."""
    return _todo(derivation, outputs).why


def _cached(derivation: Derivation, outputs: Outputs) -> PlanStep:
    known = outputs.of(derivation)
    why = "its pinned content is in the store" if known.fixed is not None else "built before"
    size = outputs.store.object_size(known.object) if known.object else 0
    return PlanStep(derivation, "cached", why, known.object, size)


def _todo(derivation: Derivation, outputs: Outputs) -> PlanStep:
    known = outputs.of(derivation)
    store = outputs.store
    if known.fixed is not None:
        missing = [f for f in known.fixed if not store.has_blob(f.sha256, executable=f.executable)]
        why = (
            f"{len(missing)} of {len(known.fixed)} pinned files are not in the store"
            if missing
            else "all of its files are in the store and only have to be linked"
        )
        size = sum(file.size for file in missing)
        return PlanStep(derivation, "fetch", why, known.object, size)
    if known.elsewhere and not known.here:
        return PlanStep(derivation, "substitute", "another store has it", known.object, 0)
    unknown = [d.label for d in derivation.inputs.values() if outputs.of(d).object is None]
    if unknown:
        why = f"builds from {', '.join(unknown)}, built first; skipped if that comes out as before"
        return PlanStep(derivation, "build", why, None, 0, certain=False)
    if known.object is None:
        return PlanStep(derivation, "build", _what_changed(derivation, outputs), None, 0)
    if known.object in outputs.damaged:
        why = "built before, but damaged"
    elif damaged := outputs.damaged_in(known.object):
        why = f"it needs {min(damaged)}, which is damaged"
    elif known.here and (lost := store.lost_reference(known.object)):
        why = f"it needs {lost}, which is gone"
    else:
        why = "built before, but no longer in the store"
    return PlanStep(derivation, "build", why, known.object, 0)


def _what_changed(derivation: Derivation, outputs: Outputs) -> str:
    """Why a step whose inputs are known was never built: what is new since it was last built."""
    store = outputs.store
    last = store.last_built(derivation.recipe, derivation.name)
    if not isinstance(last, dict):
        return "never built here"
    changes = []
    if last["version"] != derivation.version:
        changes.append(f"the recipe (version {last['version']} → {derivation.version})")
    changes += _changed_params(last["params"], thawed(derivation.params))
    for name in sorted(last["inputs"].keys() | derivation.inputs.keys()):
        before, after = last["inputs"].get(name), derivation.inputs.get(name)
        if before is None or after is None:
            changes.append(f"input {name} (" + ("new)" if before is None else "gone)"))
        elif before != after.digest:
            outputs_before = {r.object for r in store.realisations_by(before)}
            if outputs.of(after).object not in outputs_before:
                changes.append(f"input {name}")
    return f"changed: {', '.join(changes)}" if changes else "never built from these inputs"


def _changed_params(before: Any, after: Any) -> list[str]:
    """Names of the params that differ, with both values where they are short."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            words = [_short(side.get(name)) for side in (before, after)]
            found.append(f"{name} ({words[0]} → {words[1]})" if all(words) else name)
    return found


def _short(value: Any) -> str:
    text = "none" if value in (None, "", [], {}) else str(value)
    simple = not isinstance(value, dict | list) or text == "none"
    return text if simple and len(text) <= SHORT else ""
