"""Models that are on this machine already: GGUFs of the hub's cache and of Ollama's store.

They come into the store without a download, and without a copy where the file system allows: the
store then links the very same bytes. Before that every file is read once: its digest must be the
one that its cache names it by, and its header must be that of a sound GGUF.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.callbacks import Progress, silent
from mmadmin.core.errors import DigestMismatch, InvalidModel
from mmadmin.core.formats.gguf.header import read_header
from mmadmin.core.formats.gguf.shards import parse_name, set_names
from mmadmin.core.store import Staging, Store, StoreObject, hash_file
from mmadmin.core.store.files import link
from mmadmin.core.store.layout import is_sha256

OLLAMA_MODEL = "application/vnd.ollama.image.model"
UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")


@dataclass(frozen=True, slots=True)
class Found:
    """A model that lies in a cache: one file, or the files of a shard set."""

    label: str
    """Where it is from: `org/name@commit file`, or `ollama name:tag`."""
    name: str
    """What the object will be called."""
    files: Mapping[str, Path]
    """Its bytes, by file name."""
    digests: Mapping[str, str]
    """The sha256 that the cache says they have, by file name."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(path.stat().st_size for path in self.files.values())


def hub_cache(env: Mapping[str, str] | None = None) -> Path:
    """Where huggingface_hub keeps its cache (`HF_HUB_CACHE`, `HF_HOME`)."""
    env = os.environ if env is None else env
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"])
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(home) if env.get("HF_HOME") else Path(home) / "huggingface") / "hub"


def ollama_store(env: Mapping[str, str] | None = None) -> Path:
    """Where Ollama keeps its models (`OLLAMA_MODELS`)."""
    env = os.environ if env is None else env
    return Path(env.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")


def find_in_hub_cache(cache: Path) -> list[Found]:
    """Every GGUF, and every shard set, of each snapshot in a hub cache."""
    found = []
    for snapshot in sorted(cache.glob("models--*/snapshots/*")):
        repo = snapshot.parent.parent.name.removeprefix("models--").replace("--", "/")
        sets: dict[str, dict[str, Path]] = defaultdict(dict)
        for path in sorted(snapshot.rglob("*.gguf")):
            blob = path.resolve()
            if not blob.is_file() or not is_sha256(blob.name):
                continue  # an unfinished download, or a file that is not kept by its sha256
            relative = path.relative_to(snapshot).as_posix()
            sets[_set_of(relative)][path.name] = blob
        for prefix, files in sets.items():
            if not _is_whole(files):
                continue
            label = f"{repo}@{snapshot.name[:12]} {prefix}"
            digests = {name: blob.name for name, blob in files.items()}
            found.append(Found(label, _object_name(prefix), files, digests))
    return found


def _is_whole(files: Mapping[str, Path]) -> bool:
    """False for a shard set that was not downloaded to its end, or is numbered as none can be."""
    try:
        return set(files) == set(set_names(next(iter(files))))
    except InvalidModel:
        return False


def _set_of(relative: str) -> str:
    """What the files of one model have in common: the path, without a shard's number."""
    try:
        shard = parse_name(relative)
    except InvalidModel:  # numbered as no shard can be: left to be refused on its own
        return relative
    return shard.stem if shard else relative


def find_in_ollama(models: Path) -> list[Found]:
    """Every model of an Ollama store."""
    found = []
    for manifest in sorted(path for path in (models / "manifests").rglob("*") if path.is_file()):
        for digest in _model_layers(manifest):
            blob = models / "blobs" / f"sha256-{digest}"
            if not blob.is_file():
                continue
            label = f"{manifest.parent.name}:{manifest.name}"
            file = _object_name(f"{manifest.parent.name}-{manifest.name}") + ".gguf"
            found.append(Found(f"ollama {label}", file, {file: blob}, {file: digest}))
    return found


def _model_layers(manifest: Path) -> Iterator[str]:
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        for layer in layers:
            if layer["mediaType"] == OLLAMA_MODEL:
                digest = str(layer["digest"]).removeprefix("sha256:")
                if is_sha256(digest):
                    yield digest
    except (ValueError, KeyError, TypeError):
        return  # no manifest of this form


def _object_name(text: str) -> str:
    """A name as derivations and objects have them."""
    return UNSAFE.sub("-", text.rpartition("/")[2]).strip("-.")[:120] or "model"


def adopt(store: Store, found: Found, *, progress: Progress = silent) -> StoreObject:
    """Take a model into the store, verified; kept by a root of kind `adopted`.

    Linked where both are on one file system: its cache's copy becomes read-only. Idempotent.
    Raises `DigestMismatch` and `InvalidModel`, naming the file; the cache is left as it is.
    """
    with store.lease(f"adoption of {found.name}") as lease, store.staging(lease) as staging:
        done = 0
        for name, path in found.files.items():
            read_header(path)
            _take(store, staging, name, path, found.digests[name])
            done += path.stat().st_size
            progress(done, found.size_bytes)
        sealed = store.seal(staging, found.name)
        store.add_root("adopted", found.label, sealed.name, f"adopted from {found.label}")
    return sealed


def _take(store: Store, staging: Staging, name: str, path: Path, sha256: str) -> None:
    if Path(name).name != name:
        raise InvalidModel(f"{name!r} is not a valid file name")
    target = staging.out / name
    size = path.stat().st_size
    if staging.take(sha256, size, target):
        return
    if link(path, target):
        actual, _ = hash_file(target)
    else:
        actual = store.ingest(path, staging, name)
    if actual != sha256:
        raise DigestMismatch(
            f"{path} has sha256 {actual}, its cache says {sha256}",
            remedy="the cache's file is damaged: remove it there, and fetch it again",
            expected=sha256,
            actual=actual,
        )
    staging.hashed(target, sha256)
