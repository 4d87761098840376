"""Plans: topological, minimal, with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmadmin.core.build.builder import realise
from mmadmin.core.build.derivation import Derivation, topological
from mmadmin.core.build.planner import plan
from mmadmin.core.errors import InvalidDerivation
from mmadmin.core.store import Store
from tests.core.workshop import Shop, Watch, pin, step, tools_for


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", floor_bytes=0)


def forget(store: Store, name: str) -> None:
    """Take an object away as the collector does: row first, then what the row named."""
    with store.index.write() as index:
        for table, column in (("object", "name"), ("entry", "object"), ("reference", "object")):
            index.execute(f"DELETE FROM {table} WHERE {column} = ?", (name,))
    store.layout.sidecar(name).unlink()
    store.remove(store.object_path(name))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Derivation, set[str]]:
    """A random graph, some of it pinned, and the names of steps whose objects are taken away."""
    made: list[Derivation] = []
    for number in range(draw(st.integers(1, 8))):
        chosen = draw(st.sets(st.integers(0, len(made) - 1), max_size=3)) if made else set()
        if not chosen and draw(st.booleans()):
            made.append(pin(f"s{number}", f"content {number}"))
        else:
            made.append(step(f"s{number}", **{f"i{i}": made[i] for i in sorted(chosen)}))
    return made[-1], draw(st.sets(st.sampled_from([d.name for d in made])))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cases())
def test_plans_are_topological_minimal_and_right(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Derivation, set[str]]
) -> None:
    """What is gone is built again only if the goal needs it; the plan is what then happens."""
    goal, gone = case
    shop, store = Shop(), Store(tmp_path_factory.mktemp("s") / "store", floor_bytes=0)
    realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    for found in list(store.objects()):
        if found.name[65:] in gone:
            forget(store, found.name)

    planned = plan(goal, store, shop.recipe_of)

    place = {step.digest: i for i, step in enumerate(planned.steps)}
    needed = {goal.digest}
    for derivation in reversed(topological(goal)):
        if derivation.digest in needed and derivation.name in gone:
            needed |= {d.digest for d in derivation.inputs.values()}
    for derivation in topological(goal):
        assert (derivation.digest in place) == (
            derivation.name not in gone or derivation.digest in needed
        )
        for below in derivation.inputs.values():
            if derivation.digest in place and below.digest in place:
                assert place[below.digest] < place[derivation.digest]
    work = {s.derivation.name for s in planned.work}
    assert work == {d.name for d in topological(goal) if d.digest in needed and d.name in gone}
    assert all(step.why for step in planned.steps)

    watch = Watch()
    realise(goal, store, tools_for, watch, recipe_of=shop.recipe_of)
    assert set(watch.names("built")) == work
    assert not plan(goal, store, shop.recipe_of).work


def test_an_empty_store_builds_everything(store: Store) -> None:
    """Pinned content is fetched, the rest built, each with its reason."""
    shop = Shop()
    source = pin("source", "hello")
    goal = step("goal", x=step("middle", s=source))
    planned = plan(goal, store, shop.recipe_of)
    assert [(s.derivation.name, s.action, s.certain) for s in planned.steps] == [
        ("source", "fetch", True),
        ("middle", "build", True),
        ("goal", "build", False),
    ]
    assert planned.fetch_bytes == 5
    assert "1 of 1 pinned files" in planned.steps[0].why
    assert planned.steps[1].why == "never built here"
    assert "write middle" in planned.steps[2].why


def test_a_merged_copy_is_counted(store: Store) -> None:
    """Shards that are fetched and merged need room twice; merged already, no more of it."""
    shop = Shop()
    shards = pin("shards", "hello")
    goal = step("goal", x=step("merged", shards=shards))
    assert plan(goal, store, shop.recipe_of).written_bytes == 10
    realise(shards, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert plan(goal, store, shop.recipe_of).written_bytes == 5
    realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert plan(goal, store, shop.recipe_of).written_bytes == 0


def test_sources_of_a_cached_result_are_not_fetched(store: Store) -> None:
    """A pinned source's content is known without having it, so what was built from it is found."""
    shop = Shop()
    source = pin("source", "hello")
    goal = step("goal", s=source)
    realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    (name,) = [o.name for o in store.objects() if o.name.endswith("-source")]
    forget(store, name)
    planned = plan(goal, store, shop.recipe_of)
    assert [(s.derivation.name, s.action) for s in planned.steps] == [("goal", "cached")]


def test_a_lost_reference_makes_a_cached_system_unusable(store: Store) -> None:
    """A system whose model is gone is not cached: it and the model are built again."""
    shop = Shop()
    model = step("model")
    system = step("system", recipe="links", model=model)
    realise(system, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    (name,) = [o.name for o in store.objects() if o.name.endswith("-model")]
    forget(store, name)
    planned = plan(system, store, shop.recipe_of)
    assert [(s.derivation.name, s.action) for s in planned.steps] == [
        ("model", "build"),
        ("system", "build"),
    ]
    assert "no longer in the store" in planned.steps[0].why
    assert name in planned.steps[1].why
    watch = Watch()
    realise(system, store, tools_for, watch, recipe_of=shop.recipe_of)
    assert watch.names("built") == ["model"]


def test_reasons_say_what_changed_since_the_last_build(store: Store) -> None:
    """A param with both values, an input that came out otherwise, a new input."""
    shop = Shop()

    def made(text: str, **more: Any) -> Derivation:
        params = {"text": text, **more.pop("params", {})}
        return Derivation("it", "write", 1, params, more)

    def why(goal: Derivation) -> str:
        return next(
            s.why for s in plan(goal, store, shop.recipe_of).steps if s.derivation.name == "it"
        )

    one, two, same = step("one"), step("two"), step("mid", drop=True, x=step("one"))
    for goal in (one, two, same, step("mid", drop=True, x=two)):
        realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert why(made("a", x=one)) == "never built here"
    realise(made("a", x=one), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert why(made("b", x=one)) == "changed: text (a → b)"
    assert why(made("a", x=two)) == "changed: input x"
    assert why(made("a", x=one, y=two)) == "changed: input y (new)"
    assert why(made("a")) == "changed: input x (gone)"
    assert (
        why(made("a", x=one, params={"big": {"k": 1}, "type": "Q8_0"}))
        == "changed: big, type (none → Q8_0)"
    )
    store.reindex()
    assert why(made("b", x=two)) == "changed: text (a → b), input x"


def test_as_json_is_what_people_and_programs_read(store: Store) -> None:
    """The plan as data: counts, bytes, and a row a step."""
    shop = Shop()
    goal = step("goal", s=pin("source", "hello"))
    data = plan(goal, store, shop.recipe_of).as_json()
    assert (data["goal"], data["build"], data["fetch"], data["cached"], data["fetch_bytes"]) == (
        goal.digest,
        1,
        1,
        0,
        5,
    )
    assert data["steps"][1]["inputs"] == [goal.inputs["s"].digest]
    assert data["steps"][0]["output"].endswith("-source")


def test_bad_params_and_other_versions_are_refused(store: Store) -> None:
    """A recipe's own check speaks before anything is built; versions must fit."""
    shop = Shop()
    with pytest.raises(InvalidDerivation, match="text is missing"):
        plan(Derivation("x", "write", 1), store, shop.recipe_of)
    with pytest.raises(InvalidDerivation, match="version 2"):
        plan(Derivation("x", "write", 2, {"text": "x"}), store, shop.recipe_of)


def test_a_thousand_cached_nodes_are_found_quickly(store: Store) -> None:
    """Planning over a wide graph costs no more than a few statements a node."""
    shop = Shop()
    inputs = {f"i{n}": pin(f"s{n}", "same") for n in range(40)}
    goal = step("goal", **inputs)
    realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    statements = 0

    def count(_: str) -> None:
        nonlocal statements
        statements += 1

    with store.index.read() as index:
        index.set_trace_callback(count)
    planned = plan(goal, store, shop.recipe_of)
    assert planned.count("cached") == 41
    assert statements <= 4 * 41
