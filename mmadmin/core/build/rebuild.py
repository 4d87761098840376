"""Building again: to compare (a rebuild check), or to get back bytes that were damaged.

A rebuild happens in staging and changes nothing that is in the store. Its inputs must be there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmadmin.core import catalog
from mmadmin.core.build.builder import UNOBSERVED, StepTools, ToolsFor, realise
from mmadmin.core.build.derivation import Derivation, thawed
from mmadmin.core.build.planner import Outputs, RecipeOf, checked_recipe
from mmadmin.core.errors import (
    InvalidDerivation,
    InvalidModel,
    MmError,
    NotFound,
    StoreCorrupt,
)
from mmadmin.core.store import Entry, Lease, Staging, Store, StoreObject
from mmadmin.core.store.commit import hash_tree
from mmadmin.core.store.tree import object_name

Outcome = Literal["match", "mismatch", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A path that came out otherwise."""

    path: str
    message: str
    tensors: Sequence[str] = ()
    """Names of the tensors that differ, for a model file; empty when only metadata does."""

    def as_json(self) -> dict[str, Any]:
        """The difference as data."""
        return {"path": self.path, "difference": self.message, "tensors": list(self.tensors)}


@dataclass(frozen=True, slots=True)
class Check:
    """What a rebuild showed."""

    derivation: str
    outcome: Outcome
    message: str
    object: str
    """What the store has."""
    rebuilt: str = ""
    """What it came out as this time, kept under a `check` root when it differs."""
    differences: tuple[Difference, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The result as data."""
        return {
            "derivation": self.derivation,
            "outcome": self.outcome,
            "message": self.message,
            "object": self.object,
            "rebuilt": self.rebuilt,
            "differences": [d.as_json() for d in self.differences],
        }


def check(
    derivation: Derivation,
    store: Store,
    toolbox_for: ToolsFor,
    *,
    recipe_of: RecipeOf = catalog.recipe,
) -> Check:
    """Build a realised derivation again and compare; never repairs, keeps both sides.

    Raises what the recipe raises; `NotFound` when the derivation was never built here.
    """
    outputs = Outputs(store, recipe_of)
    known = outputs.of(derivation)
    if known.object is None or not known.here:
        raise NotFound(
            f"{derivation.label} is not in the store, so there is nothing to compare with",
            remedy="build it first",
        )
    recipe = checked_recipe(derivation, recipe_of)
    if known.fixed is not None:
        message = "its content is pinned: `mm store verify --contents` compares it with the pin"
        return Check(derivation.digest, "inconclusive", message, known.object)
    with store.lease(f"check of {derivation.label}") as lease:
        store.protect(lease, [known.object])
        old = _here(store, known.object)
        lacking = [d for d in derivation.inputs.values() if not outputs.of(d).here]
        if lacking:
            message = f"its input {lacking[0].label} is no longer in the store"
            return Check(derivation.digest, "inconclusive", message, old.name)
        with rebuilt(derivation, outputs, toolbox_for, lease) as (staging, tools):
            entries = hash_tree(staging, tools.known)
            if object_name(entries, derivation.name) == old.name:
                return Check(derivation.digest, "match", "every byte is the same", old.name)
            hashed = {entry.path: entry.sha256 for entry in entries if entry.kind == "file"}
            new = store.seal(staging, derivation.name, refs=old.refs, known=hashed)
            store.add_root(
                "check", derivation.digest, new.name, f"differs from {old.name} when rebuilt"
            )
        differences = compare(old, new)
    if recipe.determinism == "none":
        outcome: Outcome = "inconclusive"
        message = f"differs, but {derivation.recipe} does not promise the same bytes"
    else:
        outcome = "mismatch"
        message = f"{len(differences)} paths differ, though {derivation.recipe} promises "
        message += "the same bytes" + (
            " on the same platform" if recipe.determinism == "same-platform" else ""
        )
    return Check(derivation.digest, outcome, message, old.name, new.name, differences)


def _here(store: Store, name: str) -> StoreObject:
    found = store.object(name)
    if found is None:
        raise StoreCorrupt(f"{name} vanished from the store while it was leased")
    return found


@contextmanager
def rebuilt(
    derivation: Derivation, outputs: Outputs, toolbox_for: ToolsFor, lease: Lease
) -> Iterator[tuple[Staging, StepTools]]:
    """Run the recipe into a staging folder that vanishes at the end."""
    store = outputs.store
    recipe = checked_recipe(derivation, outputs.recipe_of)
    inputs: dict[str, Path] = {}
    for name, needed in derivation.inputs.items():
        output = outputs.of(needed).object
        if output is None or store.protect(lease, [output]):
            raise NotFound(f"{derivation.label}: its input {needed.label} is not in the store")
        inputs[name] = store.object_path(output)
    with store.staging(lease) as staging:
        log = store.layout.logs / f"{derivation.digest[:32]}-again-{os.getpid()}.log"
        tools = toolbox_for(derivation, staging, log)
        recipe.build(thawed(derivation.params), inputs, staging.out, tools)
        yield staging, tools


def compare(old: StoreObject, new: StoreObject) -> tuple[Difference, ...]:
    """What differs between two objects, path by path; for model files, which tensors."""
    before = {entry.path: entry for entry in old.files}
    after = {entry.path: entry for entry in new.files}
    found = []
    for path in sorted(before.keys() | after.keys()):
        was, is_ = before.get(path), after.get(path)
        if was == is_:
            continue
        if was is None or is_ is None:
            message = "is only in the rebuild" if was is None else "is missing in the rebuild"
            found.append(Difference(path, message))
        else:
            found.append(_difference(path, was, is_, old.path / path, new.path / path))
    return tuple(found)


def _difference(path: str, was: Entry, is_: Entry, one: Path, other: Path) -> Difference:
    if was.kind != is_.kind:
        return Difference(path, f"was a {was.kind}, is a {is_.kind}")
    if was.kind == "link":
        return Difference(path, f"pointed to {was.target}, points to {is_.target}")
    if was.sha256 == is_.sha256:
        return Difference(path, "has another executable bit")
    owner = catalog.format_of(path)
    if owner is not None:
        try:
            return Difference(path, *owner.difference(one, other))
        except InvalidModel as error:
            return Difference(path, f"has other bytes, and cannot be read: {error.message}")
    where = _first_difference(one, other)
    return Difference(path, f"{was.size} → {is_.size} bytes, first differs at byte {where}")


def _first_difference(one: Path, other: Path) -> int:
    """Offset of the first byte that differs; the shorter size when one begins the other."""
    place = 0
    with one.open("rb") as a, other.open("rb") as b:
        while True:
            left, right = a.read(1 << 20), b.read(1 << 20)
            if left != right:
                pairs = enumerate(zip(left, right, strict=False))
                short = min(len(left), len(right))
                return place + next((i for i, (x, y) in pairs if x != y), short)
            if not left:
                return place
            place += len(left)


def load_graph(store: Store, digest: str) -> Derivation:
    """A derivation that was built here, with all its inputs, from the store's records."""
    made: dict[str, Derivation] = {}
    todo = [digest]
    while todo:
        wanted = todo[-1]
        row = store.derivation(wanted)
        if not isinstance(row, dict):
            raise NotFound(f"the store has no record of the derivation {wanted[:12]}")
        missing = [d for d in row["inputs"].values() if d not in made]
        if missing:
            todo.extend(missing)
            continue
        found = Derivation(
            name=row["name"],
            recipe=row["recipe"],
            version=row["version"],
            params=row["params"],
            inputs={name: made[d] for name, d in row["inputs"].items()},
        )
        if found.digest != wanted:
            raise InvalidDerivation(f"the record of the derivation {wanted[:12]} is damaged")
        made[wanted] = found
        todo.pop()
    return made[digest]


class Rebuild:
    """Gets a damaged file back by running its step again; a `repair.BlobSource`.

    For a fetch this downloads: files that are whole are taken from the store, so that only the
    damaged one is transferred. Inputs that were collected are fetched or built again first.
    """

    label = "a rebuild"

    def __init__(
        self, store: Store, toolbox_for: ToolsFor, *, recipe_of: RecipeOf = catalog.recipe
    ) -> None:
        self.store = store
        self.toolbox_for = toolbox_for
        self.recipe_of = recipe_of

    def get(self, want: Entry, owner: str, to: Path) -> bool:
        """Write the bytes of `want` to `to`, if a rebuild of its object has them."""
        for record in self.store.realisations_of(owner):
            try:
                derivation = load_graph(self.store, record.derivation)
            except MmError:  # built elsewhere: there is no record of how
                continue
            with self.store.lease(f"repair of {derivation.label}") as lease:
                self._realise_inputs(derivation)
                outputs = Outputs(self.store, self.recipe_of)
                with rebuilt(derivation, outputs, self.toolbox_for, lease) as (staging, _):
                    made = staging.out / want.path
                    if made.is_file() and not made.is_symlink():
                        made.rename(to)
                        return True
        return False

    def _realise_inputs(self, derivation: Derivation) -> None:
        for needed in derivation.inputs.values():
            realise(
                needed,
                self.store,
                self.toolbox_for,
                UNOBSERVED,
                recipe_of=self.recipe_of,
                owner=f"repair of {derivation.label}",
            )


__all__: Sequence[str] = ["Check", "Difference", "Rebuild", "check", "compare", "load_graph"]
