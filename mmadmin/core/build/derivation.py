"""A derivation: one build step as data, and the graph that its inputs span.

Equal derivations have equal digests on every machine; nothing of a machine, a mirror or a clock
is in them. The *resolved key* names inputs by what they came out as, so that an input that is
rebuilt to the same bytes stops the rebuild there (early cutoff).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mmadmin.core.build.recipe import Json, Params
from mmadmin.core.canonical import digest
from mmadmin.core.errors import InvalidDerivation

DERIVATION_DOMAIN = "mmadmin-drv-v1"
KEY_DOMAIN = "mmadmin-key-v1"

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,127}")
"""Names of derivations, and with them the tail of object names: plain file names."""
KIND = re.compile(r"[a-z][a-z0-9-]{0,63}")
FIELDS = frozenset({"name", "recipe", "version", "params", "inputs"})


@dataclass(frozen=True, slots=True, eq=False)
class Derivation:
    """One build step: a recipe's kind and version, its params, and the steps it builds from."""

    name: str
    recipe: str
    version: int
    params: Params = field(default_factory=dict)
    inputs: Mapping[str, Derivation] = field(default_factory=dict)
    digest: str = field(init=False)
    """Hex identity; inputs enter by their digests."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidDerivation(
                f"{self.name!r} is not a valid derivation name",
                remedy="use up to 128 letters, digits and . _ + = -, not starting with . + = -",
            )
        if not KIND.fullmatch(self.recipe):
            raise InvalidDerivation(f"{self.recipe!r} is not a valid recipe kind")
        if isinstance(self.version, bool) or self.version < 1:
            raise InvalidDerivation(f"{self.label}: version must be a positive integer")
        for name in self.inputs:
            if not NAME.fullmatch(name):
                raise InvalidDerivation(f"{self.label}: {name!r} is not a valid input name")
        object.__setattr__(self, "params", _frozen(self.params))
        object.__setattr__(self, "inputs", MappingProxyType(dict(sorted(self.inputs.items()))))
        found = digest(DERIVATION_DOMAIN, self._data({k: d.digest for k, d in self.inputs.items()}))
        object.__setattr__(self, "digest", found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Derivation) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Derivation {self.label} {self.digest[:12]}>"

    @property
    def label(self) -> str:
        """What a person reads: `<recipe> <name>`."""
        return f"{self.recipe} {self.name}"

    def resolved_key(self, realised: Mapping[str, str]) -> str:
        """The key under which its result is recorded: inputs by what they came out as.

        `realised` maps every input's name to its object's hash (or name, for recipes whose
        output names its inputs).
        """
        if set(realised) != set(self.inputs):
            raise InvalidDerivation(
                f"{self.label}: realised inputs {sorted(realised)} are not {sorted(self.inputs)}"
            )
        return digest(KEY_DOMAIN, self._data(realised))

    def as_json(self) -> dict[str, Any]:
        """The derivation as data, inputs by digest."""
        return self._data({name: d.digest for name, d in self.inputs.items()})

    def _data(self, inputs: Mapping[str, str]) -> dict[str, Any]:
        return {
            "name": self.name,
            "recipe": self.recipe,
            "version": self.version,
            "params": thawed(self.params),
            "inputs": dict(inputs),
        }


def topological(goal: Derivation) -> list[Derivation]:
    """Every derivation that `goal` needs, itself included: inputs first, each once.

    The order depends on the graph only. Iterative: a chain may be longer than the recursion limit.
    """
    order: list[Derivation] = []
    seen: set[str] = set()
    stack: list[tuple[Derivation, Iterator[Derivation]]] = [(goal, iter(goal.inputs.values()))]
    seen.add(goal.digest)
    while stack:
        derivation, inputs = stack[-1]
        for needed in inputs:
            if needed.digest not in seen:
                seen.add(needed.digest)
                stack.append((needed, iter(needed.inputs.values())))
                break
        else:
            stack.pop()
            order.append(derivation)
    return order


def graph_to_json(goal: Derivation) -> dict[str, Any]:
    """The whole graph as data: `{"goal": digest, "derivations": {digest: {...}}}`."""
    return {
        "goal": goal.digest,
        "derivations": {d.digest: d.as_json() for d in topological(goal)},
    }


def graph_from_json(data: Any) -> Derivation:
    """The goal of a graph; refuses unknown fields, cycles, gaps and digests that do not fit."""
    if not isinstance(data, dict) or set(data) != {"goal", "derivations"}:
        raise InvalidDerivation('a graph has the fields "goal" and "derivations", no others')
    rows = data["derivations"]
    if not isinstance(rows, dict) or not isinstance(data["goal"], str):
        raise InvalidDerivation("a graph maps digests to derivations")
    made: dict[str, Derivation] = {}
    open_: list[str] = [data["goal"]]
    waiting: set[str] = set()
    while open_:
        wanted = open_[-1]
        if wanted in made:
            open_.pop()
            continue
        row = _row(rows, wanted)
        missing = [d for d in row["inputs"].values() if d not in made]
        if missing:
            if wanted in waiting:
                raise InvalidDerivation(f"derivation {wanted[:12]} needs itself")
            waiting.add(wanted)
            open_.extend(missing)
            continue
        made[wanted] = _one(row, wanted, made)
        open_.pop()
    if set(rows) != set(made):
        extra = sorted(set(rows) - set(made))
        raise InvalidDerivation(f"the graph holds derivations that its goal does not need: {extra}")
    return made[data["goal"]]


def _row(rows: Mapping[str, Any], wanted: str) -> dict[str, Any]:
    row = rows.get(wanted)
    if not isinstance(row, dict):
        raise InvalidDerivation(f"derivation {wanted[:12]} is missing from the graph")
    if set(row) != FIELDS:
        odd = sorted(set(row) ^ FIELDS)
        raise InvalidDerivation(f"derivation {wanted[:12]}: unknown or missing fields {odd}")
    inputs = row["inputs"]
    if not isinstance(inputs, dict) or not all(isinstance(d, str) for d in inputs.values()):
        raise InvalidDerivation(f"derivation {wanted[:12]}: inputs must map names to digests")
    for name, kind in (("name", str), ("recipe", str), ("version", int), ("params", dict)):
        if not isinstance(row[name], kind):
            raise InvalidDerivation(f"derivation {wanted[:12]}: {name} must be {kind.__name__}")
    return row


def _one(row: Mapping[str, Any], wanted: str, made: Mapping[str, Derivation]) -> Derivation:
    derivation = Derivation(
        name=row["name"],
        recipe=row["recipe"],
        version=row["version"],
        params=row["params"],
        inputs={name: made[d] for name, d in row["inputs"].items()},
    )
    if derivation.digest != wanted:
        raise InvalidDerivation(
            f"{derivation.label} is listed as {wanted[:12]} but is {derivation.digest[:12]}",
            remedy="the graph was edited or damaged: lock the spec again",
        )
    return derivation


def _frozen(value: Any) -> Any:
    """A deeply read-only copy."""
    if isinstance(value, Mapping):
        return MappingProxyType({str(k): _frozen(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value


def thawed(value: Any) -> Any:
    """The same value as plain dicts and lists, for recipes and JSON."""
    if isinstance(value, Mapping):
        return {k: thawed(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [thawed(item) for item in value]
    return value


__all__ = ["Derivation", "Json", "graph_from_json", "graph_to_json", "thawed", "topological"]
