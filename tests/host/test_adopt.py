"""Models of other caches come in by link, verified."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from mmadmin.core.build.builder import realise
from mmadmin.core.errors import DigestMismatch, InvalidModel
from mmadmin.core.store import Store
from mmadmin.host.adopt import adopt, find_in_hub_cache, find_in_ollama, hub_cache, ollama_store
from tests.core.workshop import Shop, Watch, damage, tools_for
from tests.core.workshop import pin as pinned


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store, on the caches' file system."""
    return Store(tmp_path / "store", floor_bytes=0)


def model(seed: int) -> bytes:
    """The bytes of a tiny GGUF."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"mm-adopt-{os.getpid()}-{seed}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", np.full((4, 8), seed, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    path.unlink()
    return data


def hub(root: Path, files: dict[str, bytes], commit: str = "c" * 40) -> Path:
    """A hub cache as huggingface_hub lays it out; returns the blobs' folder."""
    repo = root / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    for name, data in files.items():
        blob = repo / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        link = repo / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return repo / "blobs"


def test_a_hub_cache_is_adopted_without_a_copy(store: Store, tmp_path: Path) -> None:
    """The object's file is the cache's own inode; a pinned fetch of it then downloads nothing."""
    data = model(1)
    blobs = hub(tmp_path / "hub", {"q/m-Q8_0.gguf": data, "README.md": b"text"})
    (found,) = find_in_hub_cache(tmp_path / "hub")
    assert (found.label, found.name) == ("org/name@cccccccccccc q/m-Q8_0.gguf", "m-Q8_0.gguf")
    sealed = adopt(store, found)
    assert (sealed.path / "m-Q8_0.gguf").samefile(next(iter(blobs.glob(sealed.files[0].sha256))))
    assert adopt(store, found) == sealed
    assert damage(store) == []
    assert [root.kind for root in store.roots()] == ["adopted"]

    shop = Shop()
    goal = pinned("other-name", "x")
    params = {"sha256": sealed.files[0].sha256, "size": len(data), "serve": "never"}
    goal = type(goal)("other-name", "pinned", 1, params)
    realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert shop.ran == []


def test_shard_sets_are_one_object(store: Store, tmp_path: Path) -> None:
    """All shards of a set, under the names by which they find each other."""
    hub(
        tmp_path / "hub",
        {f"m-0000{n}-of-00002.gguf": model(n) for n in (1, 2)}
        | {
            "single.gguf": model(3),
            "lone-00002-of-00003.gguf": model(4),
            "odd-00000-of-00001.gguf": model(5),
        },
    )
    by_name = {found.name: found for found in find_in_hub_cache(tmp_path / "hub")}
    assert set(by_name) == {"m", "single.gguf"}
    sealed = adopt(store, by_name["m"])
    assert [e.path for e in sealed.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


def test_an_ollama_store_is_adopted(store: Store, tmp_path: Path) -> None:
    """The model layer of a manifest, under the model's name and tag."""
    data = model(1)
    digest = hashlib.sha256(data).hexdigest()
    blobs, manifests = (
        tmp_path / "o/blobs",
        tmp_path / "o/manifests/registry.ollama.ai/library/smol",
    )
    for folder in (blobs, manifests):
        folder.mkdir(parents=True)
    (blobs / f"sha256-{digest}").write_bytes(data)
    layers = [
        {
            "mediaType": "application/vnd.ollama.image.model",
            "digest": f"sha256:{digest}",
            "size": len(data),
        },
        {
            "mediaType": "application/vnd.ollama.image.license",
            "digest": "sha256:" + "0" * 64,
            "size": 1,
        },
    ]
    (manifests / "135m").write_text(json.dumps({"layers": layers}))
    (manifests / "broken").write_text("{")
    (found,) = find_in_ollama(tmp_path / "o")
    assert found.label == "ollama smol:135m"
    sealed = adopt(store, found)
    assert (sealed.path / "smol-135m.gguf").read_bytes() == data
    assert damage(store) == []


def test_what_is_damaged_is_refused(store: Store, tmp_path: Path) -> None:
    """Other bytes than the name says, or no sound GGUF: nothing comes in."""
    blobs = hub(tmp_path / "hub", {"m.gguf": model(1)})
    (found,) = find_in_hub_cache(tmp_path / "hub")
    (blob,) = blobs.iterdir()
    blob.write_bytes(model(2))
    with pytest.raises(DigestMismatch, match="its cache says"):
        adopt(store, found)
    blob.write_bytes(b"GGUF but cut")
    with pytest.raises(InvalidModel):
        adopt(store, found)
    blob.unlink()
    assert find_in_hub_cache(tmp_path / "hub") == []
    assert list(store.objects()) == []
    assert find_in_ollama(tmp_path / "none") == []


def test_another_file_system_is_copied(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where linking is not possible, the bytes are copied and hashed on the way."""
    data = model(1)
    hub(tmp_path / "hub", {"m.gguf": data})
    (found,) = find_in_hub_cache(tmp_path / "hub")
    real = os.link

    def link(source: Path, target: Path) -> None:
        if "hub" in str(source):
            raise OSError(18, "cross-device link")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    sealed = adopt(store, found)
    assert not (sealed.path / "m.gguf").samefile(next(iter(found.files.values())))
    assert damage(store) == []


def test_where_the_caches_are() -> None:
    """The environment variables of both programs are followed."""
    assert hub_cache({"HF_HUB_CACHE": "/a"}) == Path("/a")
    assert hub_cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert ollama_store({"OLLAMA_MODELS": "/d"}) == Path("/d")
