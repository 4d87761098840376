"""Rebuild checks compare and never repair; rebuilds give damaged files back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mmadmin.core.build.builder import GoalRoot, realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.planner import plan
from mmadmin.core.build.rebuild import Rebuild, check, load_graph
from mmadmin.core.build.recipe import Params
from mmadmin.core.errors import NotFound
from mmadmin.core.store import Store
from mmadmin.core.store.files import unlink_tree
from mmadmin.core.store.gc import collect
from mmadmin.core.store.repair import repair
from mmadmin.core.store.verify import verify
from tests.core.store.test_verify import flip
from tests.core.workshop import Shop, Watch, Write, damage, pin, step, tools_for


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", floor_bytes=0)


class Varying(Write):
    """Writes something else each time: `make(out, turn)` fills the output."""

    def __init__(self, make: Callable[[Path, int], None]) -> None:
        super().__init__()
        self.make = make
        self.turn = 0

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Any) -> None:
        """Write this turn's output."""
        self.turn += 1
        self.make(out, self.turn)


def shop_with(recipe: Write) -> Shop:
    """A shop whose `write` is this recipe."""
    shop = Shop()
    shop._recipes["write"] = recipe
    return shop


def write_model(path: Path, seed: int, note: str = "") -> None:
    """A small GGUF with two tensors, of which `b` depends on the seed."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.note", note)
    writer.add_tensor("a", np.ones((4, 8), dtype=np.float32))
    writer.add_tensor("b", np.full((4, 8), seed, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_same_bytes_are_a_match(store: Store) -> None:
    """Nothing changes in the store, and nothing is kept of the rebuild."""
    shop = Shop()
    goal = step("b", x=step("a"))
    realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    before = list(store.objects())
    found = check(goal, store, tools_for, recipe_of=shop.recipe_of)
    assert found.outcome == "match"
    assert shop.ran == ["a", "b", "b"]
    assert list(store.objects()) == before
    assert list(store.layout.staging.iterdir()) == []


def test_a_check_repairs_nothing(store: Store) -> None:
    """It compares with what the store knows; a damaged file stays so, and is for verify to find."""
    shop = Shop()
    goal = step("b", x=step("a"))
    done = realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    path = store.object_path(done.object) / "text"
    damaged = path.read_bytes()[::-1]
    path.chmod(0o644)
    path.write_bytes(damaged)
    assert check(goal, store, tools_for, recipe_of=shop.recipe_of).outcome == "match"
    assert path.read_bytes() == damaged
    assert [found.name for found in verify(store, contents=True).damaged] == [done.object]


def test_other_bytes_are_a_mismatch_with_the_files_named(store: Store) -> None:
    """Every kind of difference is said; both sides stay, and the record is not touched."""

    def make(out: Path, turn: int) -> None:
        (out / "same").write_text("same")
        (out / "bytes").write_text(f"0123456789{turn}")
        (out / "mode").write_text("x")
        (out / "mode").chmod(0o755 if turn > 1 else 0o644)
        (out / "link").symlink_to("same" if turn > 1 else "bytes")
        (out / ("new" if turn > 1 else "old")).write_text("")

    shop = shop_with(Varying(make))
    goal = step("x")
    done = realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    found = check(goal, store, tools_for, recipe_of=shop.recipe_of)
    assert found.outcome == "mismatch"
    assert {d.path: d.message for d in found.differences} == {
        "bytes": "11 → 11 bytes, first differs at byte 10",
        "mode": "has another executable bit",
        "link": "pointed to bytes, points to same",
        "new": "is only in the rebuild",
        "old": "is missing in the rebuild",
    }
    assert store.realisation(done.resolved_key) == done
    assert store.has_object(found.object)
    assert store.has_object(found.rebuilt)
    assert [(r.kind, r.object) for r in store.roots()] == [("check", found.rebuilt)]
    assert found.as_json()["outcome"] == "mismatch"


def test_gguf_files_name_their_tensors(store: Store) -> None:
    """Of a model, the tensors that differ; or that only metadata does."""
    tensors = shop_with(Varying(lambda out, turn: write_model(out / "m.gguf", turn)))
    realise(step("x"), store, tools_for, Watch(), recipe_of=tensors.recipe_of)
    (difference,) = check(step("x"), store, tools_for, recipe_of=tensors.recipe_of).differences
    assert (difference.message, difference.tensors) == ("1 of 2 tensors differ", ("b",))

    notes = shop_with(Varying(lambda out, turn: write_model(out / "m.gguf", 1, f"turn {turn}")))
    realise(step("y"), store, tools_for, Watch(), recipe_of=notes.recipe_of)
    (difference,) = check(step("y"), store, tools_for, recipe_of=notes.recipe_of).differences
    assert (difference.message, difference.tensors) == ("only metadata differs", ())


def test_what_cannot_be_decided_is_inconclusive(store: Store) -> None:
    """No promise of equal bytes, an input that is gone, content that is pinned."""
    recipe = Varying(lambda out, turn: (out / "f").write_text(str(turn)) and None)
    recipe.determinism = "none"
    shop = shop_with(recipe)
    realise(step("x"), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    found = check(step("x"), store, tools_for, recipe_of=shop.recipe_of)
    assert (found.outcome, len(found.differences)) == ("inconclusive", 1)

    plain = Shop()
    source, goal = pin("source", "hello"), step("goal", s=pin("source", "hello"))
    realise(goal, store, tools_for, Watch(), recipe_of=plain.recipe_of)
    assert check(source, store, tools_for, recipe_of=plain.recipe_of).outcome == "inconclusive"
    name = next(o.name for o in store.objects() if o.name.endswith("-source"))
    with store.index.write() as index:
        index.execute("DELETE FROM object WHERE name = ?", (name,))
    found = check(goal, store, tools_for, recipe_of=plain.recipe_of)
    assert found.outcome == "inconclusive"
    assert "pinned source" in found.message
    with pytest.raises(NotFound):
        check(step("never-built"), store, tools_for, recipe_of=plain.recipe_of)


def test_the_graph_is_in_the_store(store: Store) -> None:
    """What was built can be built again from the store's own records."""
    shop = Shop()
    goal = step("b", x=step("a", s=pin("source", "hello")))
    done = realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert load_graph(store, done.derivation) == goal
    with pytest.raises(NotFound):
        load_graph(store, "0" * 64)


def test_a_damaged_file_comes_back_by_running_its_step_again(store: Store) -> None:
    """Fetched or built: the step runs once more, and only the damaged file is replaced."""
    shop = Shop()
    goal = step("b", s=pin("source", "hello"))
    realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    for found in list(store.objects()):
        flip(found.path / "text")
    damaged = verify(store, contents=True).damaged
    assert len(damaged) == 2
    order = sorted(damaged, key=lambda verdict: verdict.name.endswith("-b"))
    done = repair(store, order, [Rebuild(store, tools_for, recipe_of=shop.recipe_of)])
    assert done.failed == ()
    assert {source for _, source in done.blobs} == {"a rebuild"}
    assert damage(store) == []
    assert shop.ran == ["b", "b", "hello", "hello"]


@pytest.fixture
def goal() -> Derivation:
    """A system that names a model, which is built from a pinned source."""
    return step("system", recipe="links", model=step("model", s=pin("source", "weights")))


def collected(store: Store, goal: Derivation, shop: Shop) -> tuple[str, str]:
    """Build the goal and collect its source; the names of system and model."""
    done = realise(
        goal, store, tools_for, Watch(), recipe_of=shop.recipe_of, root=GoalRoot("g", "1", "")
    )
    collect(store, look=lambda *_: [])
    assert [name[65:] for name in store.names() if name.endswith("source")] == []
    (model,) = [name for name in store.names() if name.endswith("-model")]
    return done.object, model


def test_repair_fetches_collected_sources_again(store: Store, goal: Derivation) -> None:
    """What a damaged object was built from need not be in the store any more."""
    shop = Shop()
    _, model = collected(store, goal, shop)
    flip(store.object_path(model) / "text")
    done = repair(
        store,
        verify(store, contents=True).damaged,
        [Rebuild(store, tools_for, recipe_of=shop.recipe_of)],
    )
    assert done.failed == ()
    assert done.repaired == (model,)
    assert shop.pinned.ran == ["weights", "weights"]
    assert damage(store) == []


def test_a_lost_folder_whose_sources_were_collected_is_repaired(
    store: Store, goal: Derivation
) -> None:
    """The row of an object without a folder stands in nobody's way."""
    shop = Shop()
    _, model = collected(store, goal, shop)
    unlink_tree(store.object_path(model))
    store.blob_path(store.recorded(model).files[0].sha256).unlink()  # type: ignore[union-attr]
    done = repair(
        store, verify(store).damaged, [Rebuild(store, tools_for, recipe_of=shop.recipe_of)]
    )
    assert done.failed == ()
    assert damage(store) == []


def test_damage_in_an_input_is_repaired_before_what_is_built_from_it(store: Store) -> None:
    """The order in which damaged objects are listed does not matter."""
    shop = Shop()
    for seed in range(4):  # names begin with a hash: some seeds have the input first, some last
        goal = step(f"top{seed}", s=pin(f"source{seed}", f"weights{seed}"))
        realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    for found in store.objects():
        flip(found.path / "text")
    done = repair(
        store,
        verify(store, contents=True).damaged,
        [Rebuild(store, tools_for, recipe_of=shop.recipe_of)],
    )
    assert done.failed == ()
    assert damage(store) == []


@pytest.mark.parametrize("how", ["content", "blob", "folder", "mode"])
def test_a_damaged_object_is_built_again_not_called_cached(
    store: Store, goal: Derivation, how: str
) -> None:
    """A build heals what it needs, whatever is wrong with it, and says what it did."""
    shop = Shop()
    system, model = collected(store, goal, shop)
    text = store.object_path(model) / "text"
    if how == "content":
        flip(text)
        verify(store, contents=True)
    elif how == "blob":
        store.blob_path(store.recorded(model).files[0].sha256).unlink()  # type: ignore[union-attr]
    elif how == "folder":
        unlink_tree(store.object_path(model))
    else:
        text.chmod(0o644)
    watch = Watch()
    done = realise(goal, store, tools_for, watch, recipe_of=shop.recipe_of)
    assert done.object == system
    assert watch.names("built") == ["source", "model"]
    assert watch.names("cached") == ["system"]
    assert verify(store, contents=True).damaged == ()
    assert damage(store) == []


def test_damaged_pinned_content_is_fetched_again(store: Store) -> None:
    """Neither its object nor its blob is taken for what was pinned."""
    shop, pinned = Shop(), pin("source", "weights")
    done = realise(pinned, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    flip(store.object_path(done.object) / "text")
    verify(store, contents=True)
    assert plan(pin("other", "weights"), store, shop.recipe_of).fetch_bytes == 7
    realise(pinned, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert shop.pinned.ran == ["weights", "weights"]
    assert damage(store) == []
