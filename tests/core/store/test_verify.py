"""Damage is found, explained, and repaired file by file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mmadmin.core.errors import NotFound, SourceUnavailable, StoreCorrupt
from mmadmin.core.store import Entry, Store, StoreObject
from mmadmin.core.store.ingest import hash_file
from mmadmin.core.store.repair import repair
from mmadmin.core.store.verify import require_intact, verify
from tests.core.workshop import add, damage


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", floor_bytes=0)


@pytest.fixture
def model(store: Store) -> StoreObject:
    """An object with one of everything."""
    return add(
        store,
        "model",
        {"bin/run*": b"#!/bin/sh", "m.gguf": b"weights" * 100, "link": "m.gguf", "e/f": b""},
    )


class Shelf:
    """A source that has some bytes, right or wrong."""

    def __init__(self, label: str, content: bytes | None, error: Exception | None = None) -> None:
        self.label = label
        self.content = content
        self.error = error
        self.asked: list[str] = []

    def get(self, want: Entry, owner: str, to: Path) -> bool:
        """Hand it out."""
        self.asked.append(want.path)
        if self.error:
            raise self.error
        if self.content is None:
            return False
        to.write_bytes(self.content)
        return True


def flip(path: Path) -> None:
    """Change one byte behind the store's back, keeping size, mode and time."""
    info = path.stat()
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    path.chmod(info.st_mode & 0o7777)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_a_whole_store_is_ok(store: Store, model: StoreObject) -> None:
    """Nothing to say, with and without reading everything."""
    add(store, "other", {"f": b"x"}, refs=[model.name])
    for contents in (False, True):
        found = verify(store, contents=contents)
        assert [v.state for v in found.verdicts] == ["ok", "ok"]
        assert found.as_json()["damaged"] == []
    assert found.read_bytes == 700 + 9 + 1


DAMAGE: dict[str, tuple[Callable[[Store, Path], object], str, str]] = {
    "file gone": (lambda _, p: (p / "m.gguf").unlink(), "corrupt", "is gone"),
    "cut": (lambda _, p: (p / "m.gguf").write_bytes(b"short"), "corrupt", "has 5 bytes instead of 700"),
    "mode": (lambda _, p: (p / "m.gguf").chmod(0o644), "corrupt", "has mode 644 instead of 444"),
    "touched": (lambda _, p: os.utime(p / "m.gguf", (5, 5)), "corrupt", "was changed"),
    "extra": (lambda _, p: (p / "e/extra").write_bytes(b""), "corrupt", "does not belong there"),
    "link": (lambda _, p: ((p / "link").unlink(), (p / "link").symlink_to("e/f")), "corrupt", "points elsewhere"),
    "kind": (lambda _, p: ((p / "link").unlink(), (p / "link").mkdir()), "corrupt", "is not a link"),
    "folder gone": (lambda s, p: s.remove(p), "missing", "is gone"),
    "folder mode": (lambda _, p: p.chmod(0o755), "corrupt", "has mode 755"),
    "record gone": (lambda s, p: s.layout.sidecar(p.name).unlink(), "corrupt", "is gone"),
    "record cut": (lambda s, p: s.layout.sidecar(p.name).write_text("{"), "corrupt", "is damaged"),
    "record differs": (
        lambda s, p: s.layout.sidecar(p.name).write_text(s.layout.sidecar(p.name).read_text().replace('"size":709', '"size":7')),
        "corrupt",
        "disagrees",
    ),
    "blob gone": (lambda s, p: s.blob_path(hash_file(p / "m.gguf")[0]).unlink(), "corrupt", "has lost its blob"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_the_stat_check_finds_it_and_repair_mends_it(
    store: Store, model: StoreObject, case: str
) -> None:
    """Each kind of damage is named; the good bytes come from the store or from a source."""
    spoil, state, words = DAMAGE[case]
    other = add(store, "other", {"same.gguf": b"weights" * 100})
    spoil(store, model.path)
    (verdict,) = [v for v in verify(store).verdicts if v.name == model.name]
    assert verdict.state == state
    assert any(words in problem.message for problem in verdict.problems)
    with pytest.raises(StoreCorrupt):
        require_intact(store, model.name)

    shelf = Shelf("shelf", b"weights" * 100)
    done = repair(store, verify(store, contents=True).damaged, [shelf])
    assert done.failed == ()
    assert model.name in done.repaired
    assert shelf.asked == (["m.gguf"] if case == "cut" else [])
    assert damage(store) == []
    assert verify(store, contents=True).damaged == ()
    require_intact(store, model.name)
    assert store.object(other.name) == other


def test_only_reading_finds_a_flipped_bit(store: Store, model: StoreObject) -> None:
    """With contents, each distinct file is read once, and every object that has it is named."""
    add(store, "other", {"same": b"weights" * 100, "fine": b"fine"})
    flip(model.path / "m.gguf")
    assert verify(store).damaged == ()
    seen: list[tuple[int, int]] = []
    found = verify(store, contents=True, progress=lambda done, total: seen.append((done, total)))
    assert [v.name[65:] for v in found.damaged] == sorted(
        ["model", "other"], key=lambda n: next(v.name for v in found.damaged if v.name.endswith(n))
    )
    assert {p.path for v in found.damaged for p in v.problems} == {"m.gguf", "same"}
    assert "has the content" in found.damaged[0].problems[0].message
    assert found.read_bytes == 700 + 9 + 4
    assert seen[-1] == (713, 713)


def test_repair_gets_just_the_bad_file_from_the_first_source_that_is_right(
    store: Store, model: StoreObject
) -> None:
    """Wrong bytes, errors and misses are passed over; the damaged bytes are kept aside."""
    run = model.path / "bin/run"
    inode = run.stat().st_ino
    flip(model.path / "m.gguf")
    sources = [
        Shelf("empty", None),
        Shelf("liar", b"wrong"),
        Shelf("down", None, SourceUnavailable("no answer")),
        Shelf("right", b"weights" * 100),
        Shelf("never asked", b""),
    ]
    said: list[str] = []
    done = repair(store, verify(store, contents=True).damaged, sources, report=said.append)
    assert (done.failed, [source for _, source in done.blobs]) == ((), ["right"])
    assert [shelf.asked for shelf in sources] == [["m.gguf"]] * 4 + [[]]
    assert any("liar gave different bytes" in line for line in said)
    assert any("down: no answer" in line for line in said)
    assert damage(store) == []
    assert run.stat().st_ino == inode
    (kept,) = store.layout.quarantine.iterdir()
    assert kept.read_bytes()[1:] == (b"weights" * 100)[1:]


def test_without_a_source_it_says_so_and_changes_nothing_else(
    store: Store, model: StoreObject
) -> None:
    """What cannot be repaired is named, with the reason; the object stays in the index."""
    flip(model.path / "m.gguf")
    done = repair(store, verify(store, contents=True).damaged)
    assert done.repaired == ()
    assert "no source has the right bytes of m.gguf" in done.failed[0][1]
    assert store.recorded(model.name) == model
    assert (model.path / "m.gguf").exists()


def test_one_repair_heals_every_object_that_shares_the_file(
    store: Store, model: StoreObject
) -> None:
    """The bytes are got once."""
    add(store, "other", {"same": b"weights" * 100})
    flip(model.path / "m.gguf")
    shelf = Shelf("shelf", b"weights" * 100)
    done = repair(store, verify(store, contents=True).damaged, [shelf])
    assert len(done.repaired) == 2
    assert len(shelf.asked) == 1
    assert damage(store) == []


def test_a_closure_that_was_found_corrupt_stays_refused(store: Store, model: StoreObject) -> None:
    """Reading finds the damage once; from then on the quick check refuses it, until it is repaired."""
    system = add(store, "system", {"manifest": b"{}"}, refs=[model.name])
    flip(model.path / "m.gguf")
    require_intact(store, system.name)
    verify(store, contents=True)
    with pytest.raises(StoreCorrupt, match="repair") as refused:
        require_intact(store, system.name)
    assert refused.value.details["object"] == model.name
    repair(store, verify(store).damaged, [Shelf("shelf", b"weights" * 100)])
    require_intact(store, system.name)


def test_a_closure_must_be_intact(store: Store, model: StoreObject) -> None:
    """A generation whose engine or model lacks something is refused, with the way to mend it."""
    system = add(store, "system", {"manifest": b"{}"}, refs=[model.name])
    require_intact(store, system.name)
    with store.index.write() as index:
        index.execute("DELETE FROM object WHERE name = ?", (model.name,))
    with pytest.raises(StoreCorrupt, match="is not in the store, but"):
        require_intact(store, system.name)
    with pytest.raises(StoreCorrupt, match="is not in the store"):
        require_intact(store, f"{'0' * 64}-gone")
    with pytest.raises(NotFound):
        verify(store, [f"{'0' * 64}-gone"])
