"""Derivations: identity, order, and graphs as data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.build.derivation import Derivation, graph_from_json, graph_to_json, topological
from mmadmin.core.errors import InvalidDerivation
from tests.core.workshop import step

GOLDEN_DIGEST = "a957fd5519c3563bfa2af918f613b58bb65741cf4ff20580f78e90302e132350"
GOLDEN_KEY = "1d9bba0077db806230161fa4fcc705749fbd0b4b7ebc183d9a7fee2243aa8699"


def golden() -> Derivation:
    """The derivation with the committed digest."""
    shard = Derivation("shard", "fetch", 1, {"files": [{"path": "a.gguf", "sha256": "0" * 64}]})
    return Derivation("model", "merge", 2, {"output": "m.gguf"}, {"shards": shard})


@st.composite
def graphs(draw: st.DrawFn) -> Derivation:
    """A random graph with shared inputs; its goal is the last step."""
    made: list[Derivation] = []
    for number in range(draw(st.integers(1, 12))):
        chosen = draw(st.sets(st.integers(0, len(made) - 1), max_size=3)) if made else set()
        inputs = {f"i{n}": made[i] for n, i in enumerate(sorted(chosen))}
        made.append(step(f"s{number}", **inputs))
    return made[-1]


def test_golden_digests_never_change() -> None:
    """The identity of a derivation and its key are the committed ones."""
    assert golden().digest == GOLDEN_DIGEST
    assert golden().resolved_key({"shards": "1" * 64}) == GOLDEN_KEY


def test_equal_data_is_an_equal_derivation() -> None:
    """Order of keys and the types of containers do not matter; content does."""
    one = Derivation("m", "merge", 1, {"a": 1, "b": [1, {"c": 2}]})
    other = Derivation("m", "merge", 1, {"b": (1, {"c": 2}), "a": 1})
    assert one == other
    assert hash(one) == hash(other)
    assert one.digest == other.digest
    for changed in (
        Derivation("n", "merge", 1, {"a": 1, "b": [1, {"c": 2}]}),
        Derivation("m", "fetch", 1, {"a": 1, "b": [1, {"c": 2}]}),
        Derivation("m", "merge", 2, {"a": 1, "b": [1, {"c": 2}]}),
        Derivation("m", "merge", 1, {"a": 2, "b": [1, {"c": 2}]}),
        Derivation("m", "merge", 1, {"a": 1, "b": [1, {"c": 2}]}, {"x": one}),
    ):
        assert changed != one


def test_params_cannot_be_changed_afterwards() -> None:
    """A derivation takes a deep, read-only copy of its params."""
    params: dict[str, Any] = {"a": [1], "b": {"c": 1}}
    derivation = Derivation("m", "merge", 1, params)
    before = derivation.digest
    params["a"].append(2)
    params["b"]["c"] = 3
    assert Derivation("m", "merge", 1, derivation.params).digest == before
    with pytest.raises(TypeError):
        derivation.params["a"] = 1  # type: ignore[index]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a b", "-x", "x" * 129, "a\n"])
def test_names_are_plain_file_names(name: str) -> None:
    """A name that could leave the store or hide in it is refused."""
    with pytest.raises(InvalidDerivation):
        Derivation(name, "fetch", 1)
    with pytest.raises(InvalidDerivation):
        Derivation("ok", "fetch", 1, {}, {name: step("x")})


def test_the_key_names_inputs_by_what_they_came_out_as() -> None:
    """Two ways to the same input content give the same key; every input must be given."""
    one, other = step("m", x=step("a")), step("m", x=step("b"))
    assert one.digest != other.digest
    assert one.resolved_key({"x": "1" * 64}) == other.resolved_key({"x": "1" * 64})
    assert one.resolved_key({"x": "1" * 64}) != one.resolved_key({"x": "2" * 64})
    for wrong in ({}, {"y": "1"}, {"x": "1", "y": "2"}):
        with pytest.raises(InvalidDerivation):
            one.resolved_key(wrong)


@given(graphs())
def test_topological_puts_inputs_first_and_each_once(goal: Derivation) -> None:
    """Every derivation of the graph is there once, after all of its inputs."""
    order = topological(goal)
    place = {d.digest: i for i, d in enumerate(order)}
    assert len(place) == len(order)
    assert order[-1] == goal
    for derivation in order:
        for needed in derivation.inputs.values():
            assert place[needed.digest] < place[derivation.digest]


@given(graphs())
def test_a_graph_survives_its_data(goal: Derivation) -> None:
    """A graph written as data and read back is the same graph."""
    data = graph_to_json(goal)
    assert graph_from_json(data) == goal
    assert graph_to_json(graph_from_json(data)) == data


def test_long_chains_are_fine() -> None:
    """A chain longer than the recursion limit is ordered, written and read."""
    goal = step("s0")
    for number in range(1, 3000):
        goal = step(f"s{number}", x=goal)
    assert len(topological(goal)) == 3000
    assert graph_from_json(graph_to_json(goal)) == goal


def _damaged() -> list[Any]:
    good = graph_to_json(step("b", x=step("a")))
    goal = good["goal"]

    def change(edit: Any) -> Any:
        data = copy.deepcopy(good)
        edit(data)
        return data

    return [
        None,
        {},
        change(lambda d: d.update(extra=1)),
        change(lambda d: d.update(goal="0" * 64)),
        change(lambda d: d.update(goal=7)),
        change(lambda d: d["derivations"][goal].update(name="c")),
        change(lambda d: d["derivations"][goal].update(extra=1)),
        change(lambda d: d["derivations"][goal].pop("params")),
        change(lambda d: d["derivations"][goal].update(params=[1])),
        change(lambda d: d["derivations"][goal].update(inputs={"x": goal})),
        change(lambda d: d["derivations"][goal].update(inputs={"x": 1})),
        change(lambda d: d["derivations"][goal].update(inputs={})),
        change(lambda d: d["derivations"].update({"0" * 64: d["derivations"][goal]})),
        change(lambda d: d["derivations"].update({goal: None})),
    ]


@pytest.mark.parametrize("data", _damaged(), ids=lambda d: repr(d)[:30])
def test_damaged_graphs_are_refused(data: Any) -> None:
    """Unknown fields, gaps, cycles and digests that do not fit are refused."""
    with pytest.raises(InvalidDerivation):
        graph_from_json(data)
