"""Other stores' builds are reused by signature, and nothing they hand out is believed unchecked."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.build.builder import realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.planner import plan
from mmadmin.core.canonical import canonical
from mmadmin.core.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    SourceUnavailable,
    StoreCorrupt,
    Untrusted,
)
from mmadmin.core.store import Store
from mmadmin.core.store.attestations import Attestation, SigningKey, Trust, attestation_from_bytes
from mmadmin.core.store.binary_cache import (
    WritableBinaryCache,
    attestation_path,
    bytes_path,
    record_path,
)
from mmadmin.core.store.push import push
from mmadmin.core.store.substitute import Substituter, substituters_from_json
from mmadmin.core.store.verify import verify
from tests.core.store.test_verify import flip
from tests.core.workshop import Shop, Watch, add, damage, pin, step, tools_for
from tests.support.caches import Watched, folder_cache

ALICE, BOB, EVE = (SigningKey.generate(name) for name in ("alice", "bob", "eve"))
TRUST = Trust.of([ALICE.public_text()])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that has built something."""
    return Store(tmp_path / "one", floor_bytes=0)


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """An empty store that wants it."""
    return Store(tmp_path / "two", floor_bytes=0)


@pytest.fixture
def cache(tmp_path: Path) -> Watched:
    """A folder to push to; `tests/host/test_caches.py` puts caches of other kinds in its place."""
    return folder_cache(tmp_path / "cache")


def goal() -> Derivation:
    """A system that names a model, which was built from a source that is not needed any more."""
    return step("system", recipe="links", model=step("model", s=pin("source", "weights")))


def fill(store: Store, cache: WritableBinaryCache, *signers: SigningKey) -> Shop:
    """Build the goal and push it, once for each signer."""
    shop = Shop()
    done = realise(goal(), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    for signer in signers:
        push(store, [done.object], cache, signer=signer)
    return shop


def attestations_in(cache: Watched) -> list[Attestation]:
    """Every attestation of the cache."""
    return [
        attestation_from_bytes(cache.read(path) or b"", Path(path).stem)
        for path in cache.files.paths("realisations")
    ]


def test_what_was_pushed_is_not_built_again(store: Store, other: Store, cache: Watched) -> None:
    """Another store gets the goal and what it needs; sources are not even fetched."""
    fill(store, cache, ALICE)
    shop, watch = Shop(), Watch()
    substituter = Substituter(other, [cache], TRUST)
    planned = plan(goal(), other, shop.recipe_of, substituter)
    assert [(s.derivation.name, s.action) for s in planned.steps] == [("system", "substitute")]
    done = realise(
        goal(), other, tools_for, watch, recipe_of=shop.recipe_of, substituter=substituter
    )
    assert shop.ran == []
    assert watch.events == [("started", "system"), ("built", "system"), ("cached", "model")]
    assert {o.name for o in other.objects()} == set(store.closure(done.object))
    assert other.closure(done.object) == store.closure(done.object)
    assert done.sandbox == "substituted"
    assert damage(other) == []
    assert list(other.layout.downloads.iterdir()) == []
    again = plan(goal(), other, shop.recipe_of)  # without asking anybody
    assert [(s.derivation.name, s.action) for s in again.steps] == [
        ("model", "cached"),
        ("system", "cached"),
    ]


def test_a_damaged_object_is_pulled_again(store: Store, other: Store, cache: Watched) -> None:
    """By a build and by hand: what was found damaged here is replaced by what the cache has."""
    fill(store, cache, ALICE)
    substituter = Substituter(other, [cache], TRUST)

    def build() -> str:
        shop = Shop()
        done = realise(
            goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter
        )
        assert shop.ran == []
        return done.object

    def spoil() -> str:
        (model,) = [name for name in other.names() if name.endswith("-model")]
        flip(other.object_path(model) / "text")
        assert len(verify(other, contents=True).damaged) == 1
        return model

    build()
    spoil()
    build()
    assert damage(other) == []
    model = spoil()
    with other.lease("t") as lease:
        assert substituter.pull(model, lease)
    assert damage(other) == []


def test_pushing_puts_attestations_last_and_sends_nothing_twice(
    store: Store, cache: Watched
) -> None:
    """Blobs, then records, then attestations; an interrupted push goes on, a second one sends no bytes."""
    fill(store, cache, ALICE)
    kinds = [path.partition("/")[0] for path in cache.sent]
    assert kinds == sorted(kinds, key=["blobs", "objects", "realisations"].index)
    (system,) = [o.name for o in store.objects() if o.name.endswith("-system")]
    assert push(store, [system], cache, signer=ALICE).blobs == 0
    first = next(path for path in cache.sent if path.startswith("blobs"))
    cache.files.remove(first)
    assert push(store, [system], cache, signer=ALICE).blobs == 1
    with pytest.raises(NotFound):
        push(store, [f"{'0' * 64}-gone"], cache)


def test_what_a_killed_push_left_in_a_folder_is_given_up(store: Store, tmp_path: Path) -> None:
    """After a day; a younger one may belong to a push that runs."""
    cache = folder_cache(tmp_path / "cache")
    found = add(store, "x", {"f": b"content"})
    folder = tmp_path / "cache" / bytes_path(found.files[0].sha256).rpartition("/")[0]
    folder.mkdir(parents=True)
    old, new = folder / ".old.new", folder / ".new.new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    push(store, [found.name], cache)
    assert (old.exists(), new.exists()) == (False, True)


def test_without_a_signer_content_is_pushed_but_no_attestations(
    store: Store, other: Store, cache: Watched
) -> None:
    """Objects can be pulled by name, as their name is their hash; no step is claimed."""
    fill(store, cache)
    (system,) = [o.name for o in store.objects() if o.name.endswith("-system")]
    push(store, [system], cache)
    assert cache.files.paths("realisations") == []
    substituter = Substituter(other, [cache], TRUST)
    with other.lease("t") as lease:
        assert substituter.pull(system, lease)
        assert not substituter.pull(f"{'0' * 64}-gone", lease)
    assert other.closure(system) == store.closure(system)
    assert damage(other) == []


@pytest.mark.parametrize(
    ("signers", "trust"),
    [
        ([EVE], TRUST),
        ([ALICE], Trust.of([ALICE.public_text(), BOB.public_text()], need=2)),
        ([ALICE], Trust.of([ALICE.public_text()], revoked=["alice"])),
        ([ALICE, EVE], Trust.of([ALICE.public_text(), BOB.public_text()], need=2)),
        ([ALICE], Trust.of([])),
    ],
    ids=["stranger", "one of two", "revoked", "a stranger does not count", "nobody is trusted"],
)
def test_attestations_without_enough_trusted_signatures_are_refused(
    store: Store, other: Store, cache: Watched, signers: list[SigningKey], trust: Trust
) -> None:
    """The step is built here instead, and the reason is said."""
    fill(store, cache, *signers)
    shop = Shop()
    said: list[str] = []
    substituter = Substituter(other, [cache], trust, report=said.append)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert "model" in shop.ran
    assert any("trusted signatures that are needed" in line for line in said)


def test_enough_of_several_signatures_will_do(store: Store, other: Store, cache: Watched) -> None:
    """Two of three; the same key under two names counts once."""
    fill(store, cache, ALICE, BOB)
    two_of_three = Trust.of([k.public_text() for k in (ALICE, BOB, EVE)], need=2)
    shop = Shop()
    substituter = Substituter(other, [cache], two_of_three)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert shop.ran == []
    attestation = attestations_in(cache)[0]
    twin = SigningKey.from_text(ALICE.secret_text().replace("alice", "twin"))
    doubled = twin.sign(ALICE.sign(replace(attestation, signatures={})))
    assert Trust.of([ALICE.public_text(), twin.public_text()]).signers(doubled) == ["alice"]


def test_signatures_cannot_be_replayed(store: Store, other: Store, cache: Watched) -> None:
    """Neither an attestation moved to another step, nor a signature put under another attestation, counts."""
    fill(store, cache, ALICE)
    attestations = {attestation.object[65:]: attestation for attestation in attestations_in(cache)}
    model, system = attestations["model"], attestations["system"]
    cache.write(attestation_path(system.resolved_key), model.as_bytes())
    said: list[str] = []
    substituter = Substituter(other, [cache], TRUST, report=said.append)
    assert substituter.attestation(system.resolved_key) is None
    assert "attestation of another step" in said[0]

    forged = replace(model, resolved_key=system.resolved_key)
    cache.write(attestation_path(system.resolved_key), forged.as_bytes())
    assert Substituter(other, [cache], TRUST).attestation(system.resolved_key) is None
    for change in (
        {"object": f"{'0' * 64}-model", "closure": {f"{'0' * 64}-model": ()}},
        {"size": model.size + 1},
        {"closure": {**model.closure, model.object: (model.object,)}},
    ):
        with pytest.raises(Untrusted):
            TRUST.check(replace(model, **change))  # type: ignore[arg-type]
    TRUST.check(model)


@pytest.mark.parametrize("size", ["the same", "shorter", "longer"])
def test_swapped_bytes_are_refused_and_the_next_cache_is_asked(
    store: Store, other: Store, cache: Watched, tmp_path: Path, size: str
) -> None:
    """A cache that gives other bytes is said so; the bytes come from one that is right."""
    fill(store, cache, ALICE)
    right = folder_cache(tmp_path / "right")
    fill(store, right, ALICE)
    for blob in cache.files.paths("blobs"):
        data = store.blob_path(blob.rpartition("/")[2]).read_bytes()
        evil = {"the same": data[::-1], "shorter": data[1:], "longer": data + b"!"}
        cache.files.replace(blob, evil[size])
    said: list[str] = []
    shop = Shop()
    substituter = Substituter(other, [cache, right], TRUST, report=said.append)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert shop.ran == []
    assert any("gave bytes with sha256" in line or "has another file" in line for line in said)
    assert damage(other) == []


def test_a_swapped_record_is_refused(store: Store, other: Store, cache: Watched) -> None:
    """A record that describes another object than its name is not believed."""
    fill(store, cache, ALICE)
    attestations = {attestation.object[65:]: attestation for attestation in attestations_in(cache)}
    model = attestations["model"].object
    evil = add(store, "model", {"text": b"evil"})
    record = json.loads((store.layout.sidecar(evil.name)).read_text())
    cache.write(record_path(model), json.dumps({**record, "name": model}).encode())
    said: list[str] = []
    with other.lease("t") as lease:
        assert not Substituter(other, [cache], TRUST, report=said.append).pull(model, lease)
    assert "does not describe the object of its name" in said[0]


def test_a_missing_blob_is_a_miss(store: Store, other: Store, cache: Watched) -> None:
    """What cannot be got whole is built; nothing half stays."""
    fill(store, cache, ALICE)
    attestations = {attestation.object[65:]: attestation for attestation in attestations_in(cache)}
    (entry,) = [
        e for o in store.objects() if o.name == attestations["model"].object for e in o.files
    ]
    cache.files.remove(bytes_path(entry.sha256))
    shop, watch = Shop(), Watch()
    substituter = Substituter(other, [cache], TRUST)
    realise(goal(), other, tools_for, watch, recipe_of=shop.recipe_of, substituter=substituter)
    assert sorted(shop.ran) == ["model", "system", "weights"]
    assert damage(other) == []
    assert list(other.layout.staging.iterdir()) == []


@pytest.mark.parametrize("what", ["bytes", "record"])
def test_a_cache_that_is_all_wrong_costs_only_the_building(
    store: Store, other: Store, cache: Watched, what: str
) -> None:
    """Where no other cache has it, what cannot be had whole is built here, and so is what needs it."""
    fill(store, cache, ALICE)
    for path in cache.files.paths("blobs" if what == "bytes" else "objects"):
        if what == "bytes":
            cache.files.replace(path, b"evil")
        elif path.endswith("-model.json"):
            cache.files.remove(path)
    shop = Shop()
    substituter = Substituter(other, [cache], TRUST)
    done = realise(
        goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter
    )
    assert "model" in shop.ran
    assert other.closure(done.object) == store.closure(done.object)
    assert damage(other) == []
    assert list(other.layout.downloads.iterdir()) == []


def test_an_untrusted_attestation_does_not_stand_in_the_way(
    store: Store, other: Store, cache: Watched, tmp_path: Path
) -> None:
    """What the first cache attestations without trust, the next may attestation with it."""
    fill(store, cache, EVE)
    second = folder_cache(tmp_path / "second")
    fill(store, second, ALICE)
    shop = Shop()
    substituter = Substituter(other, [cache, second], TRUST)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert shop.ran == []


def test_a_cache_that_is_down_is_asked_once_and_no_other_for_it(
    store: Store, other: Store, cache: Watched
) -> None:
    """Also where both are called the same."""
    fill(store, cache, ALICE)
    asked: list[str] = []

    class Down:
        label = cache.label

        def read(self, path: str) -> bytes | None:
            asked.append(path)
            raise SourceUnavailable("down")

        fetch = read

    shop = Shop()
    substituter = Substituter(other, [Down(), cache], TRUST)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert shop.ran == []
    assert len(asked) == 1


def test_another_key_under_a_trusted_name_does_not_count(store: Store, cache: Watched) -> None:
    """A name is only a name: the signature must be by the key that is trusted."""
    impostor = SigningKey.generate("alice")
    fill(store, cache, impostor)
    for attestation in attestations_in(cache):
        assert TRUST.signers(attestation) == []
        with pytest.raises(Untrusted):
            TRUST.check(attestation)


def test_two_wants_of_one_blob_are_one_transfer(store: Store, other: Store, cache: Watched) -> None:
    """Objects that share bytes, pulled at once, transfer them once."""
    one = add(store, "one", {"f": b"shared" * 1000})
    two = add(store, "two", {"g": b"shared" * 1000, "h": b"shared" * 1000})
    push(store, [one.name, two.name], cache)
    results = []

    def pull(name: str) -> None:
        mine = Store(other.root, floor_bytes=0)
        with mine.lease("t") as lease:
            results.append(Substituter(mine, [cache], TRUST).pull(name, lease))
        mine.close()

    threads = [threading.Thread(target=pull, args=[name]) for name in (one.name, two.name) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert len(cache.fetched) == 1
    assert damage(other) == []


def test_executable_files_and_links_arrive_as_they_were(
    store: Store, other: Store, cache: Watched
) -> None:
    """One transfer serves both forms of the same bytes."""
    found = add(store, "x", {"bin/run*": b"#!", "copy": b"#!", "link": "bin/run", "d/e": b""})
    push(store, [found.name], cache)
    with other.lease("t") as lease:
        assert Substituter(other, [cache], TRUST).pull(found.name, lease)
    assert other.object(found.name)
    assert damage(other) == []


def test_caches_that_disagree_are_not_overwritten(
    store: Store, other: Store, cache: Watched
) -> None:
    """A step that came out otherwise elsewhere stops the push, in words."""
    fill(store, cache, ALICE)
    shop = Shop()
    shop.write.hook = lambda: None
    varied = Shop()
    varied.write.build = lambda params, inputs, out, tools: (
        (out / "text").write_text("otherwise") and None
    )  # type: ignore[method-assign]
    done = realise(goal(), other, tools_for, Watch(), recipe_of=varied.recipe_of)
    with pytest.raises(Conflict, match="not reproducible"):
        push(other, [done.object], cache, signer=BOB)


def test_keys_survive_their_text_and_hide_their_secret() -> None:
    """A key written and read is the same key; nothing prints it by accident."""
    again = SigningKey.from_text(ALICE.secret_text() + "\n")
    assert again.public_text() == ALICE.public_text()
    assert ALICE.secret_text().partition(":")[2] not in repr(ALICE)
    for text in (
        "",
        "alice",
        "alice:",
        "alice:AAAA",
        "a b:" + ALICE.secret_text()[6:],
        "alice:!!!",
    ):
        with pytest.raises(InvalidInput):
            SigningKey.from_text(text)
        with pytest.raises(InvalidInput):
            Trust.of([text])
    with pytest.raises(InvalidInput):
        Trust.of([ALICE.public_text(), ALICE.public_text()])
    with pytest.raises(InvalidInput):
        Trust.of([], need=0)


def test_substituters_are_configured_in_one_file() -> None:
    """Binary caches, trusted keys, how many are needed, and which are revoked."""
    caches, trust = substituters_from_json(
        json.dumps(
            {
                "caches": ["https://x/"],
                "trusted": [ALICE.public_text()],
                "need": 1,
                "revoked": ["bob"],
            }
        )
    )
    assert (caches, list(trust.keys), trust.need, trust.revoked) == (
        ["https://x/"],
        ["alice"],
        1,
        frozenset({"bob"}),
    )
    for text in ("", "[]", "{", '{"trusted": 7}'):
        with pytest.raises(StoreCorrupt):
            substituters_from_json(text)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"version":1}'])
def test_damaged_attestations_are_refused(data: bytes) -> None:
    """Bytes that are not an attestation are corrupt, not a traceback."""
    with pytest.raises(StoreCorrupt):
        attestation_from_bytes(data, "0" * 64)


def test_attestations_of_mmadmin_0_1_are_still_trusted() -> None:
    """The layout and what is signed have not changed since caches were first pushed to."""
    name = "a" * 64 + "-model"
    data = canonical(
        {
            "version": 1,
            "resolved_key": "1" * 64,
            "derivation": "2" * 64,
            "object": name,
            "size": 7,
            "closure": {name: []},
            "signatures": {
                "team": "SM3oaBniCcYpo5abnUkAju2YlbcWd0+0p37buCsvDc+d/prieyooU1B71r7JbH32"
                "si9K2A78bqdI6YO5NVpRBw=="
            },
        }
    )
    found = attestation_from_bytes(data, "1" * 64)
    Trust.of(["team:A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg="]).check(found)
    assert found.as_bytes() == data
