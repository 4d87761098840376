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
from mmadmin.core.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    SourceUnavailable,
    StoreCorrupt,
    Untrusted,
)
from mmadmin.core.store import Store
from mmadmin.core.store.claims import Claim, SigningKey, Trust, claim_from_bytes
from mmadmin.core.store.depot import WritableDepot, bytes_path, claim_path, record_path
from mmadmin.core.store.push import push
from mmadmin.core.store.substitute import Substituter, trust_from_json
from tests.core.workshop import Shop, Watch, add, damage, pin, step, tools_for
from tests.support.depots import Watched, folder_depot

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
def depot(tmp_path: Path) -> Watched:
    """A folder to push to; `tests/host/test_depots.py` puts depots of other kinds in its place."""
    return folder_depot(tmp_path / "depot")


def goal() -> Derivation:
    """A system that names a model, which was built from a source that is not needed any more."""
    return step("system", recipe="links", model=step("model", s=pin("source", "weights")))


def fill(store: Store, depot: WritableDepot, *signers: SigningKey) -> Shop:
    """Build the goal and push it, once for each signer."""
    shop = Shop()
    done = realise(goal(), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    for signer in signers:
        push(store, [done.object], depot, signer=signer)
    return shop


def claims_in(depot: Watched) -> list[Claim]:
    """Every claim of the depot."""
    return [
        claim_from_bytes(depot.read(path) or b"", Path(path).stem)
        for path in depot.hands.paths("realisations")
    ]


def test_what_was_pushed_is_not_built_again(store: Store, other: Store, depot: Watched) -> None:
    """Another store gets the goal and what it needs; sources are not even fetched."""
    fill(store, depot, ALICE)
    shop, watch = Shop(), Watch()
    substituter = Substituter(other, [depot], TRUST)
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


def test_pushing_puts_claims_last_and_sends_nothing_twice(store: Store, depot: Watched) -> None:
    """Blobs, then records, then claims; an interrupted push goes on, a second one sends no bytes."""
    fill(store, depot, ALICE)
    kinds = [path.partition("/")[0] for path in depot.sent]
    assert kinds == sorted(kinds, key=["blobs", "objects", "realisations"].index)
    (system,) = [o.name for o in store.objects() if o.name.endswith("-system")]
    assert push(store, [system], depot, signer=ALICE).blobs == 0
    first = next(path for path in depot.sent if path.startswith("blobs"))
    depot.hands.remove(first)
    assert push(store, [system], depot, signer=ALICE).blobs == 1
    with pytest.raises(NotFound):
        push(store, [f"{'0' * 64}-gone"], depot)


def test_what_a_killed_push_left_in_a_folder_is_given_up(store: Store, tmp_path: Path) -> None:
    """After a day; a younger one may belong to a push that runs."""
    depot = folder_depot(tmp_path / "depot")
    found = add(store, "x", {"f": b"content"})
    folder = tmp_path / "depot" / bytes_path(found.files[0].sha256).rpartition("/")[0]
    folder.mkdir(parents=True)
    old, new = folder / ".old.new", folder / ".new.new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    push(store, [found.name], depot)
    assert (old.exists(), new.exists()) == (False, True)


def test_without_a_signer_content_is_pushed_but_no_claims(
    store: Store, other: Store, depot: Watched
) -> None:
    """Objects can be pulled by name, as their name is their hash; no step is claimed."""
    fill(store, depot)
    (system,) = [o.name for o in store.objects() if o.name.endswith("-system")]
    push(store, [system], depot)
    assert depot.hands.paths("realisations") == []
    substituter = Substituter(other, [depot], TRUST)
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
def test_claims_without_enough_trusted_signatures_are_refused(
    store: Store, other: Store, depot: Watched, signers: list[SigningKey], trust: Trust
) -> None:
    """The step is built here instead, and the reason is said."""
    fill(store, depot, *signers)
    shop = Shop()
    said: list[str] = []
    substituter = Substituter(other, [depot], trust, report=said.append)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert "model" in shop.ran
    assert any("trusted signatures that are needed" in line for line in said)


def test_enough_of_several_signatures_will_do(store: Store, other: Store, depot: Watched) -> None:
    """Two of three; the same key under two names counts once."""
    fill(store, depot, ALICE, BOB)
    two_of_three = Trust.of([k.public_text() for k in (ALICE, BOB, EVE)], need=2)
    shop = Shop()
    substituter = Substituter(other, [depot], two_of_three)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert shop.ran == []
    claim = claims_in(depot)[0]
    twin = SigningKey.from_text(ALICE.secret_text().replace("alice", "twin"))
    doubled = twin.sign(ALICE.sign(replace(claim, signatures={})))
    assert Trust.of([ALICE.public_text(), twin.public_text()]).signers(doubled) == ["alice"]


def test_signatures_cannot_be_replayed(store: Store, other: Store, depot: Watched) -> None:
    """Neither a claim moved to another step, nor a signature put under another claim, counts."""
    fill(store, depot, ALICE)
    claims = {claim.object[65:]: claim for claim in claims_in(depot)}
    model, system = claims["model"], claims["system"]
    depot.write(claim_path(system.resolved_key), model.as_bytes())
    said: list[str] = []
    substituter = Substituter(other, [depot], TRUST, report=said.append)
    assert substituter.claim(system.resolved_key) is None
    assert "claim of another step" in said[0]

    forged = replace(model, resolved_key=system.resolved_key)
    depot.write(claim_path(system.resolved_key), forged.as_bytes())
    assert Substituter(other, [depot], TRUST).claim(system.resolved_key) is None
    for change in (
        {"object": f"{'0' * 64}-model", "closure": {f"{'0' * 64}-model": ()}},
        {"size": model.size + 1},
        {"closure": {**model.closure, model.object: (model.object,)}},
    ):
        with pytest.raises(Untrusted):
            TRUST.check(replace(model, **change))  # type: ignore[arg-type]
    TRUST.check(model)


@pytest.mark.parametrize("size", ["the same", "shorter", "longer"])
def test_swapped_bytes_are_refused_and_the_next_depot_is_asked(
    store: Store, other: Store, depot: Watched, tmp_path: Path, size: str
) -> None:
    """A depot that gives other bytes is said so; the bytes come from one that is right."""
    fill(store, depot, ALICE)
    right = folder_depot(tmp_path / "right")
    fill(store, right, ALICE)
    for blob in depot.hands.paths("blobs"):
        data = store.blob_path(blob.rpartition("/")[2]).read_bytes()
        evil = {"the same": data[::-1], "shorter": data[1:], "longer": data + b"!"}
        depot.hands.replace(blob, evil[size])
    said: list[str] = []
    shop = Shop()
    substituter = Substituter(other, [depot, right], TRUST, report=said.append)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert shop.ran == []
    assert any("gave bytes with sha256" in line or "has another file" in line for line in said)
    assert damage(other) == []


def test_a_swapped_record_is_refused(store: Store, other: Store, depot: Watched) -> None:
    """A record that describes another object than its name is not believed."""
    fill(store, depot, ALICE)
    claims = {claim.object[65:]: claim for claim in claims_in(depot)}
    model = claims["model"].object
    evil = add(store, "model", {"text": b"evil"})
    record = json.loads((store.layout.sidecar(evil.name)).read_text())
    depot.write(record_path(model), json.dumps({**record, "name": model}).encode())
    said: list[str] = []
    with other.lease("t") as lease:
        assert not Substituter(other, [depot], TRUST, report=said.append).pull(model, lease)
    assert "does not describe the object of its name" in said[0]


def test_a_missing_blob_is_a_miss(store: Store, other: Store, depot: Watched) -> None:
    """What cannot be got whole is built; nothing half stays."""
    fill(store, depot, ALICE)
    claims = {claim.object[65:]: claim for claim in claims_in(depot)}
    (entry,) = [e for o in store.objects() if o.name == claims["model"].object for e in o.files]
    depot.hands.remove(bytes_path(entry.sha256))
    shop, watch = Shop(), Watch()
    substituter = Substituter(other, [depot], TRUST)
    realise(goal(), other, tools_for, watch, recipe_of=shop.recipe_of, substituter=substituter)
    assert sorted(shop.ran) == ["model", "system", "weights"]
    assert damage(other) == []
    assert list(other.layout.staging.iterdir()) == []


@pytest.mark.parametrize("what", ["bytes", "record"])
def test_a_depot_that_is_all_wrong_costs_only_the_building(
    store: Store, other: Store, depot: Watched, what: str
) -> None:
    """Where no other depot has it, what cannot be had whole is built here, and so is what needs it."""
    fill(store, depot, ALICE)
    for path in depot.hands.paths("blobs" if what == "bytes" else "objects"):
        if what == "bytes":
            depot.hands.replace(path, b"evil")
        elif path.endswith("-model.json"):
            depot.hands.remove(path)
    shop = Shop()
    substituter = Substituter(other, [depot], TRUST)
    done = realise(
        goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter
    )
    assert "model" in shop.ran
    assert other.closure(done.object) == store.closure(done.object)
    assert damage(other) == []
    assert list(other.layout.downloads.iterdir()) == []


def test_a_stranger_s_claim_does_not_stand_in_the_way(
    store: Store, other: Store, depot: Watched, tmp_path: Path
) -> None:
    """What the first depot claims without trust, the next may claim with it."""
    fill(store, depot, EVE)
    second = folder_depot(tmp_path / "second")
    fill(store, second, ALICE)
    shop = Shop()
    substituter = Substituter(other, [depot, second], TRUST)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert shop.ran == []


def test_a_depot_that_is_down_is_asked_once_and_no_other_for_it(
    store: Store, other: Store, depot: Watched
) -> None:
    """Also where both are called the same."""
    fill(store, depot, ALICE)
    asked: list[str] = []

    class Down:
        label = depot.label

        def read(self, path: str) -> bytes | None:
            asked.append(path)
            raise SourceUnavailable("down")

        fetch = read

    shop = Shop()
    substituter = Substituter(other, [Down(), depot], TRUST)
    realise(goal(), other, tools_for, Watch(), recipe_of=shop.recipe_of, substituter=substituter)
    assert shop.ran == []
    assert len(asked) == 1


def test_another_key_under_a_trusted_name_does_not_count(store: Store, depot: Watched) -> None:
    """A name is only a name: the signature must be by the key that is trusted."""
    impostor = SigningKey.generate("alice")
    fill(store, depot, impostor)
    for claim in claims_in(depot):
        assert TRUST.signers(claim) == []
        with pytest.raises(Untrusted):
            TRUST.check(claim)


def test_two_wants_of_one_blob_are_one_transfer(store: Store, other: Store, depot: Watched) -> None:
    """Objects that share bytes, pulled at once, transfer them once."""
    one = add(store, "one", {"f": b"shared" * 1000})
    two = add(store, "two", {"g": b"shared" * 1000, "h": b"shared" * 1000})
    push(store, [one.name, two.name], depot)
    results = []

    def pull(name: str) -> None:
        mine = Store(other.root, floor_bytes=0)
        with mine.lease("t") as lease:
            results.append(Substituter(mine, [depot], TRUST).pull(name, lease))
        mine.close()

    threads = [threading.Thread(target=pull, args=[name]) for name in (one.name, two.name) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert len(depot.fetched) == 1
    assert damage(other) == []


def test_executable_files_and_links_arrive_as_they_were(
    store: Store, other: Store, depot: Watched
) -> None:
    """One transfer serves both forms of the same bytes."""
    found = add(store, "x", {"bin/run*": b"#!", "copy": b"#!", "link": "bin/run", "d/e": b""})
    push(store, [found.name], depot)
    with other.lease("t") as lease:
        assert Substituter(other, [depot], TRUST).pull(found.name, lease)
    assert other.object(found.name)
    assert damage(other) == []


def test_depots_that_disagree_are_not_overwritten(
    store: Store, other: Store, depot: Watched
) -> None:
    """A step that came out otherwise elsewhere stops the push, in words."""
    fill(store, depot, ALICE)
    shop = Shop()
    shop.write.hook = lambda: None
    varied = Shop()
    varied.write.build = lambda params, inputs, out, tools: (
        (out / "text").write_text("otherwise") and None
    )  # type: ignore[method-assign]
    done = realise(goal(), other, tools_for, Watch(), recipe_of=varied.recipe_of)
    with pytest.raises(Conflict, match="not reproducible"):
        push(other, [done.object], depot, signer=BOB)


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
    """Depots, trusted keys, how many are needed, and which are revoked."""
    depots, trust = trust_from_json(
        json.dumps(
            {
                "depots": ["https://x/"],
                "trusted": [ALICE.public_text()],
                "need": 1,
                "revoked": ["bob"],
            }
        )
    )
    assert (depots, list(trust.keys), trust.need, trust.revoked) == (
        ["https://x/"],
        ["alice"],
        1,
        frozenset({"bob"}),
    )
    for text in ("", "[]", "{", '{"trusted": 7}'):
        with pytest.raises(StoreCorrupt):
            trust_from_json(text)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"version":1}'])
def test_damaged_claims_are_refused(data: bytes) -> None:
    """Bytes that are no claim are corrupt, not a traceback."""
    with pytest.raises(StoreCorrupt):
        claim_from_bytes(data, "0" * 64)
