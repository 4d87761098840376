"""A system carried to another store is the same system there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmadmin.core.build.builder import realise
from mmadmin.core.build.planner import plan
from mmadmin.core.canonical import canonical
from mmadmin.core.errors import InvalidInput, NotFound, StoreCorrupt
from mmadmin.core.store import Store
from mmadmin.core.store.bundle import export_bundle, import_bundle, read_bundle
from mmadmin.core.store.gc import collect
from tests.core.store.test_substitute import goal
from tests.core.workshop import Shop, Watch, add, damage, tools_for


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that has it."""
    return Store(tmp_path / "one", floor_bytes=0)


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """The store that gets it."""
    return Store(tmp_path / "two", floor_bytes=0)


def test_it_arrives_with_its_history(store: Store, other: Store, tmp_path: Path) -> None:
    """Same hashes, nothing to build, its derivations and the caller's own data along with it."""
    shop = Shop()
    done = realise(goal(), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    sent = export_bundle(store, done.object, tmp_path / "b", extra={"lock": {"files": [1]}})
    assert (sent.objects, sent.attestations) == (2, 0)
    assert export_bundle(store, done.object, tmp_path / "b", extra={"lock": {}}).blobs == 0

    bundle = import_bundle(other, tmp_path / "b")
    assert (bundle.object, bundle.extra) == (done.object, {"lock": {}})
    assert other.closure(done.object) == store.closure(done.object)
    assert damage(other) == []
    steps = plan(goal(), other, shop.recipe_of).steps
    assert [(s.derivation.name, s.action) for s in steps] == [
        ("model", "cached"),
        ("system", "cached"),
    ]
    assert other.derivation(done.derivation) == store.derivation(done.derivation)
    collect(other, look=lambda *_: [])
    assert len(list(other.objects())) == 2
    assert import_bundle(other, tmp_path / "b") == bundle


def test_an_object_without_history_travels_too(store: Store, other: Store, tmp_path: Path) -> None:
    """What no step here produced is carried by its content alone."""
    found = add(store, "x", {"run*": b"#!", "l": "run"})
    export_bundle(store, found.name, tmp_path / "b")
    bundle = import_bundle(other, tmp_path / "b")
    assert (bundle.records, bundle.graph) == ((), None)
    assert damage(other) == []


def test_what_is_known_here_is_not_overruled(store: Store, other: Store, tmp_path: Path) -> None:
    """An import tells what steps came out as where that is not known, and nowhere else."""
    done = realise(goal(), store, tools_for, Watch(), recipe_of=Shop().recipe_of)
    realise(goal(), other, tools_for, Watch(), recipe_of=Shop().recipe_of)
    export_bundle(store, done.object, tmp_path / "b")
    file = tmp_path / "b/bundle.json"
    value = json.loads(file.read_text())
    keys = [record["resolved_key"] for record in value["records"]]
    before = [other.realisation_record(key) for key in keys]
    for record in value["records"]:
        record["object"] = f"{'0' * 64}-forged"
    file.write_bytes(canonical(value))
    import_bundle(other, tmp_path / "b")
    assert [other.realisation_record(key) for key in keys] == before
    assert None not in before


def test_what_is_not_whole_is_refused(store: Store, other: Store, tmp_path: Path) -> None:
    """No bundle, a damaged one, other bytes, other records: each in words, nothing taken over."""
    with pytest.raises(NotFound):
        import_bundle(other, tmp_path / "nothing")
    found = add(store, "x", {"f": b"content"})
    export_bundle(store, found.name, tmp_path / "b")
    file = tmp_path / "b/bundle.json"
    good = json.loads(file.read_text())
    for bad in (
        "{",
        "[]",
        json.dumps({**good, "version": 2}),
        json.dumps({**good, "object": "../x"}),
        json.dumps({**good, "records": 1}),
    ):
        file.write_text(bad)
        with pytest.raises(InvalidInput):
            read_bundle(tmp_path / "b")
    file.write_text(json.dumps({**good, "records": [{"resolved_key": 1}]}))
    with pytest.raises(StoreCorrupt):
        read_bundle(tmp_path / "b")
    file.write_text(json.dumps(good))
    (blob,) = (tmp_path / "b").glob("blobs/sha256/*/*")
    blob.write_bytes(b"changed")
    with pytest.raises(StoreCorrupt, match="does not hold all"):
        import_bundle(other, tmp_path / "b")
    assert list(other.objects()) == []
