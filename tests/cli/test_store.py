"""`mm store` over a real store: what it prints, and its exit codes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mmadmin.cli.store import app
from mmadmin.cli.store_names import bytes_of, resolve_name, seconds_of
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.errors import MmError, NotFound
from mmadmin.core.store import Realisation, Store, StoreObject
from mmadmin.host.store_server import serve
from tests.core.store.test_verify import flip
from tests.core.workshop import add, damage
from tests.host.test_adopt import hub
from tests.host.test_adopt import model as model_bytes


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of an installation that has no panel."""
    monkeypatch.setenv("MM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DATABASE_URL", raising=False)
    return Store(tmp_path / "home" / "store")


@pytest.fixture
def model(store: Store) -> StoreObject:
    """A model, a system that needs it and is kept, and something that nobody needs."""
    found = add(store, "model", {"m.gguf": b"weights" * 1000})
    system = add(store, "system", {"manifest.json": b"{}"}, refs=[found.name])
    store.add_root("generation", "smol/1", system.name, "live")
    add(store, "loose", {"f": b"l" * 100_000})
    return found


def test_a_name_may_be_shortened(store: Store, model: StoreObject) -> None:
    """The beginning, the own name, or as narrow tables show it: each leads to the one object."""
    for short in (model.name[:10], "model", f"{model.name[:12]}…-model", f"{model.name[:4]}…"):
        assert resolve_name(store, short) == model.name
    with pytest.raises(MmError, match="no object is called"):
        resolve_name(store, f"{model.name[:12]}…-loose")
    longer = add(store, "model-Q8_0", {"m.gguf": b"other weights"})
    assert resolve_name(store, "model") == model.name, "an own name goes before a beginning"
    assert resolve_name(store, "model-") == longer.name
    reported = add(store, "model", {"report.json": b"{}"})
    step = Derivation("model", "verify-gguf", 1, {"file": "m.gguf"}, {})
    made = Realisation("1" * 64, step.digest, reported.name, inputs=())
    store.record(made, step)
    assert resolve_name(store, "model") == model.name, "and not the report about it"
    store.add_root("generation", "smol/2", longer.name, "generation smol/2")
    assert resolve_name(store, "smol/2") == longer.name
    with pytest.raises(NotFound, match="keeps nothing for the generation smol/3"):
        resolve_name(store, "smol/3")
    with pytest.raises(MmError, match="2 objects are called 'mod'") as caught:
        resolve_name(store, "mod")
    assert f"{model.name[:12]}…-model (6.8 KiB)" in caught.value.remedy
    assert set(caught.value.details["candidates"]) == {model.name, longer.name}


def mm(*words: str, status: int = 0) -> str:
    """What `mm store …` prints."""
    done = CliRunner().invoke(app, list(words))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.output


def mm_json(*words: str, status: int = 0) -> Any:
    """What `mm store … --json` prints."""
    return json.loads(mm(*words, "--json", status=status))


def test_looking(store: Store, model: StoreObject) -> None:
    """Lists, paths, roots, reasons and closures, for people and for programs."""
    assert [row["name"][65:] for row in mm_json("ls")] == ["loose", "model", "system"]
    assert mm("path", "model").strip() == str(model.path)
    assert mm_json("path", model.name[:12])["name"] == model.name
    assert [(r["kind"], r["key"]) for r in mm_json("roots")] == [("generation", "smol/1")]
    (need,) = mm_json("why", "model")
    assert [name[65:] for name in need["path"]] == ["system", "model"]
    assert "generation smol/1" in mm("why", "model")
    assert "unused" in mm("why", "loose")
    assert {row["name"][65:]: row["own"] for row in mm_json("closure", "system")} == {
        "model": 7000,
        "system": 2,
    }
    assert "7.0 KiB" not in mm("closure", "system")
    with pytest.raises(MmError, match="no object is called"):
        mm("path", "nothing")


def test_collecting(store: Store, model: StoreObject) -> None:
    """The dry run says what would go; the real one frees just that."""
    would = mm_json("gc", "--dry-run")
    assert len(list(store.objects())) == 3
    assert mm_json("gc", "--older-than", "1h")["objects"] == []
    done = mm_json("gc", "--max-free", "1G")
    assert done["objects"] == would["objects"]
    assert done["freed_bytes"] == would["freed_bytes"] >= 100_000
    assert [o.name[65:] for o in store.objects()] == sorted(
        ["model", "system"],
        key=lambda n: next(o.name for o in store.objects() if o.name.endswith(n)),
    )
    assert "nothing to collect" in mm("gc")


def test_collecting_expired_files_and_records(store: Store, model: StoreObject) -> None:
    """Both are counted, as text and as data; the age of expired files is the caller's."""
    (store.layout.logs / "x.log").write_bytes(b"x")
    store.record(
        Realisation("1" * 64, "2" * 64, f"{'3' * 64}-gone", inputs=()), object_elsewhere=True
    )
    assert "no expired files, 1 step record)" in mm("gc", "--dry-run", "--expire-after", "1h")
    would = mm_json("gc", "--dry-run", "--expire-after", "0s")
    assert (would["expired"], would["realisations"]) == (1, 1)
    assert mm_json("gc", "--expire-after", "0s")["expired"] == 1
    assert store.realisation_record("1" * 64) is None


def test_verify_and_repair_from_a_cache(store: Store, model: StoreObject, tmp_path: Path) -> None:
    """Damage is found by reading, exits with 1, and is repaired from the configured cache."""
    mm("push", str(tmp_path / "cache"), "system")
    (tmp_path / "home/substituters.json").write_text(
        json.dumps({"caches": [str(tmp_path / "cache")]})
    )
    flip(model.path / "m.gguf")
    assert mm_json("verify")["corrupt"] == 0
    assert mm_json("verify", "--contents", status=1)["corrupt"] == 1
    assert "m.gguf has the content" in mm("verify", "model", "--contents", status=1)
    done = mm_json("repair")
    assert done["repaired"] == [model.name]
    assert done["blobs"][0]["source"] == str(tmp_path / "cache")
    assert mm_json("verify", "--contents")["corrupt"] == 0
    assert damage(store) == []


def test_what_cannot_be_repaired_is_a_failure(store: Store, model: StoreObject) -> None:
    """Without a cache and without the step that made it, repair says so and exits with 1."""
    flip(model.path / "m.gguf")
    done = mm_json("repair", status=1)
    assert "no source has the right bytes" in done["failed"][0]["reason"]


def test_reindex_also_when_the_index_is_no_database(
    store: Store, model: StoreObject, tmp_path: Path
) -> None:
    """The disk is the truth: a damaged index is put aside and made anew."""
    store.close()
    for path in store.root.glob("index.sqlite3-*"):
        path.unlink()
    (store.root / "index.sqlite3").write_bytes(b"damaged" * 1000)
    assert mm_json("reindex") == {"objects": 3}
    assert (store.root / "damaged-index.sqlite3").exists()
    assert mm_json("reindex") == {"objects": 3}


def test_keys_are_made_once_and_private(store: Store, tmp_path: Path) -> None:
    """The public half is printed; the secret is in a file of mode 0600."""
    with pytest.raises(MmError, match="no key yet"):
        mm("key")
    public = mm("key", "gpu-1").strip()
    assert public.startswith("gpu-1:")
    assert mm("key").strip() == public == mm_json("key")["public"]
    secret = tmp_path / "home/secrets/store_key"
    assert secret.stat().st_mode & 0o777 == 0o600
    with pytest.raises(MmError, match="called gpu-1"):
        mm("key", "gpu-2")


def test_pull_from_a_served_store(
    store: Store, model: StoreObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another installation gets an object with all it needs over HTTP."""
    (system,) = [o.name for o in store.objects() if o.name.endswith("-system")]
    server = serve(store.root, ("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("MM_HOME", str(tmp_path / "other"))
    try:
        with pytest.raises(MmError, match="no binary cache is configured"):
            mm("pull", system)
        found = mm_json("pull", system, "--from", f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    other = Store(tmp_path / "other/store")
    assert Path(found["path"]).is_dir()
    assert other.closure(system) == store.closure(system)
    assert damage(other) == []
    assert [r["kind"] for r in mm_json("roots")] == ["pulled"]


def test_keeping_and_releasing_by_hand(store: Store, model: StoreObject) -> None:
    """A pin keeps an object until it is released; generations are not released here."""
    mm("pin", "loose", "--reason", "asked")
    assert mm_json("gc")["objects"] == []
    assert "asked" in mm("why", "loose")
    with pytest.raises(MmError, match="no roots of kind pin"):
        mm("release", "pin", "nothing")
    with pytest.raises(MmError, match="kept by their deployment"):
        mm("release", "generation", "smol/1")
    assert mm_json("release", "pin", "loose")["kind"] == "pin"
    assert len(mm_json("gc")["objects"]) == 1


def test_adopting(store: Store, tmp_path: Path) -> None:
    """What caches hold is listed, and taken over by part of its label."""
    hub(tmp_path / "hub", {"m.gguf": model_bytes(1), "n.gguf": model_bytes(2)})
    caches = ("--hub-cache", str(tmp_path / "hub"), "--ollama", str(tmp_path / "none"))
    assert [row["object"] for row in mm_json("adopt", *caches)] == ["", ""]
    (row,) = mm_json("adopt", "m.gguf", *caches)
    assert [o.name for o in store.objects()] == [row["object"]]
    text = mm("adopt", "--all", *caches)
    assert "m.gguf" in text
    assert "read-only now" in text
    assert len(list(store.objects())) == 2
    with pytest.raises(MmError, match="no cache has"):
        mm("adopt", "nothing", *caches)


def test_spans_and_sizes() -> None:
    """How people write them, and what is refused."""
    assert [seconds_of(t) for t in ("90", "30m", "12h", "7d", "2w")] == [
        90,
        1800,
        43200,
        604800,
        1209600,
    ]
    assert [bytes_of(t) for t in ("5", "1K", "20G", "20GiB", "1t")] == [
        5,
        1024,
        20 << 30,
        20 << 30,
        1 << 40,
    ]
    assert "not a time span" in mm("gc", "--older-than", "soon", status=2)
    assert "not a size" in mm("gc", "--max-free", "-1", status=2)
