"""What steps came out as is remembered for as long as it leads to something that is kept."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmadmin.core.build.builder import GoalRoot, realise
from mmadmin.core.build.derivation import Derivation, topological
from mmadmin.core.build.planner import Outputs, plan
from mmadmin.core.canonical import canonical
from mmadmin.core.errors import StoreCorrupt
from mmadmin.core.store import Realisation, Store
from mmadmin.core.store import gc as collector
from mmadmin.core.store.binary_cache import FolderCache
from mmadmin.core.store.gc import collect
from mmadmin.core.store.push import push
from mmadmin.core.store.records import realisation_from_json
from mmadmin.core.store.runtime import InUse
from mmadmin.core.store.substitute import Substituter
from tests.core.store.test_substitute import ALICE, TRUST
from tests.core.workshop import Shop, Watch, damage, in_child, killer, pin, step, tools_for


def nobody(objects: Path, blobs: Path) -> Iterable[InUse]:
    """No process uses anything."""
    return []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", floor_bytes=0)


def build(store: Store, goal: Derivation, *, root: str = "") -> Realisation:
    """Realise a goal, and keep it if it is to be a root."""
    return realise(
        goal,
        store,
        tools_for,
        Watch(),
        recipe_of=Shop().recipe_of,
        root=GoalRoot("g", root, "") if root else None,
    )


def remembered(store: Store) -> set[str]:
    """Names of the objects that steps are known to have come out as; index and disk agree."""
    on_disk = {path.stem for path in (store.layout.derivations / "realised").glob("*.json")}
    with store.index.read() as index:
        rows = index.execute("SELECT resolved_key, object FROM realisation").fetchall()
    assert on_disk == {key for key, _ in rows}
    return {name[65:] for _, name in rows}


def actions(store: Store, goal: Derivation) -> list[tuple[str, str]]:
    """What would be done for a goal."""
    steps = plan(goal, store, Shop().recipe_of).steps
    return [(one.derivation.name, one.action) for one in steps]


def test_records_that_lead_to_nothing_are_deleted(store: Store) -> None:
    """With the last object that was made from it, the record of a step goes, all the way down."""
    build(store, step("kept", a=step("a", s=step("s"))), root="1")
    build(store, step("gone", b=step("b", s=step("s"))))
    would = collect(store, dry_run=True, look=nobody)
    assert would.realisations == 2
    assert remembered(store) == {"kept", "gone", "a", "b", "s"}
    done = collect(store, look=nobody)
    assert done.realisations == 2
    assert remembered(store) == {"kept", "a", "s"}
    assert actions(store, step("kept", a=step("a", s=step("s")))) == [("kept", "cached")]
    store.remove_root("g", "1")
    assert collect(store, look=nobody).realisations == 3
    assert remembered(store) == set()


def test_derivations_go_with_the_last_record_that_leads_to_them(store: Store) -> None:
    """What tells how a kept object was made stays, all the way down; the rest goes with its record."""
    kept = step("kept", a=step("a", s=step("s")))
    gone = step("gone", a=step("a", s=step("s")), b=step("b"))
    build(store, kept, root="1")
    build(store, gone)
    collect(store, look=nobody)
    left = {path.stem for path in store.layout.derivations.glob("*.json")}
    assert left == {d.digest for d in topological(kept)}
    store.reindex()
    assert store.last_built("write", "b") is None
    assert store.last_built("write", "a") == kept.inputs["a"].as_json()
    store.remove_root("g", "1")
    collect(store, look=nobody)
    assert list(store.layout.derivations.glob("*.json")) == []


def test_a_damaged_derivation_stops_it(store: Store) -> None:
    """Nothing is freed until it is moved away."""
    kept = step("kept", a=step("a"))
    build(store, kept, root="1")
    build(store, step("gone"))
    store.layout.derivation(kept.digest).write_text("{")
    with pytest.raises(StoreCorrupt, match="is damaged"):
        collect(store, look=nobody)
    assert {found.name[65:] for found in store.objects()} == {"kept", "a", "gone"}
    store.layout.derivation(kept.digest).unlink()
    collect(store, look=nobody)
    assert {found.name[65:] for found in store.objects()} == {"kept"}


def test_records_of_what_is_here_stay(store: Store) -> None:
    """An object that is kept by itself keeps its record, though nothing is made from it any more."""
    goal = step("goal", a=step("a"))
    build(store, goal)
    (a,) = [found for found in store.objects() if found.name.endswith("-a")]
    store.add_root("pin", "a", a.name, "")
    collect(store, look=nobody)
    assert remembered(store) == {"a"}
    assert actions(store, goal) == [("a", "cached"), ("goal", "build")]


def test_a_step_is_found_by_content_whatever_made_it(store: Store) -> None:
    """Another source that came out the same leads to the same kept object: both stay known."""
    first = step("goal", a=step("a", drop=True, s=step("s1")))
    second = step("goal", a=step("a", drop=True, s=step("s2")))
    kept = build(store, first, root="1")
    assert build(store, second).object == kept.object
    collect(store, look=nobody)
    assert remembered(store) == {"goal", "a", "s1", "s2"}
    assert actions(store, first) == actions(store, second) == [("goal", "cached")]


def test_recent_records_stay_with_older_than(store: Store) -> None:
    """What was recorded within the time is left, as what was made within it is."""
    build(store, step("goal", a=step("a")))
    for found in store.objects():
        with store.index.write() as index:
            index.execute("UPDATE object SET sealed_at = 1000 WHERE name = ?", (found.name,))
    assert collect(store, older_than_s=86400, look=nobody).realisations == 0
    assert remembered(store) == {"goal", "a"}
    assert collect(store, look=nobody).realisations == 2


def test_making_room_deletes_no_records(store: Store) -> None:
    """A collection that stops when it is enough leaves the records to the next whole one."""
    build(store, step("goal", a=step("a")))
    assert collect(store, max_free_bytes=1 << 40, look=nobody).realisations == 0
    assert list(store.objects()) == []
    assert remembered(store) == {"goal", "a"}


def test_no_record_is_deleted_during_a_build(store: Store) -> None:
    """A build that runs may be on its way along any record."""
    build(store, step("goal", a=step("a")))
    with store.lease("a build"):
        assert collect(store, look=nobody).realisations == 0
    assert collect(store, look=nobody).realisations == 2


def test_a_record_that_does_not_say_what_it_was_made_from(store: Store) -> None:
    """While one of an earlier version leads to something that is kept, all are left."""
    done = build(store, step("kept", a=step("a")), root="1")
    build(store, step("gone"))
    old = {key: value for key, value in done.as_json().items() if key != "inputs"}
    store.layout.realisation(done.resolved_key).write_bytes(canonical(old))
    store.reindex()
    assert store.realisation(done.resolved_key) == replace(done, inputs=None)
    assert collect(store, look=nobody).realisations == 0
    store.remove_root("g", "1")
    assert collect(store, look=nobody).realisations == 3


def test_what_a_step_was_made_from_is_written_down(store: Store, tmp_path: Path) -> None:
    """By whoever builds, and by whoever takes it over; pinned content is made from nothing."""
    goal = step("goal", drop=True, a=step("a", p=pin("p", "pinned")), b=step("b"))
    done = build(store, goal)
    made = {r.object[65:]: r for d in store.names() for r in store.realisations_of(d)}
    assert done.inputs == tuple(sorted([made["a"].object, made["b"].object]))
    assert (made["a"].inputs, made["p"].inputs) == ((made["p"].object,), ())
    cache = FolderCache(tmp_path / "cache")
    push(store, [done.object], cache, signer=ALICE)
    other = Store(tmp_path / "other", floor_bytes=0)
    substituter = Substituter(other, [cache], TRUST)
    pulled = realise(
        goal, other, tools_for, Watch(), recipe_of=Shop().recipe_of, substituter=substituter,
        root=GoalRoot("g", "1", ""),
    )  # fmt: skip
    assert pulled.inputs == done.inputs
    collect(other, look=nobody)
    assert actions(other, goal) == [("goal", "cached")]


@pytest.mark.parametrize("inputs", ["a", [7], ["../x"], {}])
def test_damaged_inputs_are_refused(store: Store, inputs: object) -> None:
    """A record whose inputs are no names of objects is corrupt."""
    record = build(store, step("goal")).as_json() | {"inputs": inputs}
    with pytest.raises(StoreCorrupt, match="damaged"):
        realisation_from_json(record, "there")


@pytest.mark.parametrize(
    ("when", "nth"),
    [("realisation removed", 1), ("realisation removed", 3), ("records deleted", 1)],
)
def test_killed_while_deleting_records(store: Store, when: str, nth: int) -> None:
    """A killed collection leaves a sound store; the next one finishes its work."""
    goal = step("kept", a=step("a"))
    build(store, goal, root="1")
    build(store, step("gone", b=step("b", c=step("c"))))

    def work() -> None:
        collect(Store(store.root, floor_bytes=0, after=killer(when, nth)), look=nobody)

    assert in_child(work) == -signal.SIGKILL
    assert damage(store) == []
    assert actions(store, goal) == [("kept", "cached")]
    collect(store, look=nobody)
    assert remembered(store) == {"kept", "a"}
    store.reindex()
    assert remembered(store) == {"kept", "a"}


# --- whatever the graph ------------------------------------------------------------------------

Graph = list[tuple[bool, tuple[int, ...]]]
"""For each step: whether it ignores its inputs, and their numbers, all lower than its own."""


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Graph, set[int], set[int]]:
    """Steps, which of them are built, and which of these are kept."""
    graph: Graph = []
    for number in range(draw(st.integers(1, 7))):
        inputs = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        graph.append((draw(st.booleans()), tuple(sorted(inputs))))
    built = draw(st.sets(st.integers(0, len(graph) - 1), min_size=1, max_size=4))
    return graph, built, draw(st.sets(st.sampled_from(sorted(built))))


def derivations(graph: Graph) -> list[Derivation]:
    """Steps of three names only, so that different graphs lead to the same content."""
    made: list[Derivation] = []
    for number, (drop, inputs) in enumerate(graph):
        made.append(step(f"n{number % 3}", drop=drop, **{f"i{i}": made[i] for i in inputs}))
    return made


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(worlds())
def test_records_that_are_of_use_are_never_deleted(
    tmp_path_factory: pytest.TempPathFactory, world: tuple[Graph, set[int], set[int]]
) -> None:
    """Beside a twin that deletes no record, no plan finds less of what is kept.

    And nothing is left that finds nothing: each record that stays names something that is here, or
    something that such a record was made from.
    """
    graph, built, kept = world
    made = derivations(graph)
    folder = tmp_path_factory.mktemp("records")
    store = Store(folder / "store", floor_bytes=0)
    for number in sorted(built):
        build(store, made[number], root=str(number) if number in kept else "")
    store.close()
    shutil.copytree(folder / "store", folder / "twin")
    twin = Store(folder / "twin", floor_bytes=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "stale_records", lambda *_: [])
        collect(twin, look=nobody)

    collect(store, look=nobody)

    assert {o.name for o in store.objects()} == {o.name for o in twin.objects()}
    for goal in made:
        known, known_twin = (Outputs(one, Shop().recipe_of).of(goal) for one in (store, twin))
        if known_twin.here:
            assert known == known_twin
            assert actions(store, goal) == actions(twin, goal)
    here = {found.hash for found in store.objects()}
    with store.index.read() as index:
        rows = index.execute("SELECT object, inputs FROM realisation").fetchall()
    of_use = here | {name[:64] for _, inputs in rows for name in (inputs or "").split()}
    assert {name[:64] for name, _ in rows} <= of_use
    store.close()
    twin.close()
