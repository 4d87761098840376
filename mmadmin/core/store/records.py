"""What the store knows, as values, and the records on the disk that say it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmadmin.core.canonical import parse
from mmadmin.core.errors import InvalidDerivation, InvalidInput, StoreCorrupt
from mmadmin.core.store import tree
from mmadmin.core.store.layout import check_object_name, is_sha256
from mmadmin.core.store.tree import Entry

SIDECAR_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoreObject:
    """A finished, immutable output."""

    name: str
    hash: str
    size: int
    """Bytes of all files."""
    files: tuple[Entry, ...]
    """Every path, sorted."""
    refs: tuple[str, ...]
    """Names of the objects that it needs at run time."""
    path: Path
    sealed_at: int
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Realisation:
    """The record that a derivation produced an object."""

    resolved_key: str
    derivation: str
    """Digest."""
    object: str
    """Name."""
    sandbox: str = "none"
    """What fenced the build in: bubblewrap, unshare, none; or fixed, for pinned content."""
    host: str = ""
    built_ms: int = 0
    built_at: int = 0
    """Unix seconds."""
    log: str = ""
    """File name under `logs/`."""
    inputs: tuple[str, ...] | None = None
    """Names of the objects that it was made from; None where that was not written down."""

    @property
    def built_s(self) -> float:
        """How long it took."""
        return self.built_ms / 1000

    def as_json(self) -> dict[str, Any]:
        """The record as data."""
        return {
            "resolved_key": self.resolved_key,
            "derivation": self.derivation,
            "object": self.object,
            "sandbox": self.sandbox,
            "host": self.host,
            "built_ms": self.built_ms,
            "built_at": self.built_at,
            "log": self.log,
            "inputs": None if self.inputs is None else list(self.inputs),
        }


@dataclass(frozen=True, slots=True)
class Root:
    """Something that must be kept, and why."""

    kind: str
    """generation, pin, …"""
    key: str
    object: str
    reason: str

    def as_json(self) -> dict[str, Any]:
        """The root as data."""
        return {"kind": self.kind, "key": self.key, "object": self.object, "reason": self.reason}


def record_of(found: StoreObject) -> dict[str, Any]:
    """What the record beside an object says."""
    return {
        "version": SIDECAR_VERSION,
        "name": found.name,
        "hash": found.hash,
        "size": found.size,
        "refs": list(found.refs),
        "files": [entry.as_json() for entry in found.files],
        "sealed_at": found.sealed_at,
    }


def object_from_record(data: bytes, name: str, path: Path, where: str) -> StoreObject:
    """The object that a record describes; `StoreCorrupt` unless it is that of its name.

    What an object holds is proven by its name; what it needs (`refs`) is not.
    """
    damaged = f"the record {where} is damaged"
    try:
        value = parse(data)
    except InvalidDerivation as error:
        raise StoreCorrupt(f"{damaged}: {error.message}") from error
    fields = {"version", "name", "hash", "size", "refs", "files", "sealed_at"}
    if not isinstance(value, dict) or set(value) != fields or value["name"] != name:
        raise StoreCorrupt(damaged)
    files, refs, sealed_at = value["files"], value["refs"], value["sealed_at"]
    if not isinstance(files, list) or not isinstance(refs, list) or not isinstance(sealed_at, int):
        raise StoreCorrupt(damaged)
    entries = tuple(tree.entry_from_json(entry) for entry in files)
    hashes = {tree.object_hash(entries), value["hash"], name[:64]}
    if len(hashes) != 1 or value["size"] != tree.total_size(entries):
        raise StoreCorrupt(f"the record {where} does not describe the object of its name")
    for ref in refs:
        if not isinstance(ref, str):
            raise StoreCorrupt(damaged)
        check_object_name(ref)
    return StoreObject(
        name,
        name[:64],
        tree.total_size(entries),
        entries,
        tuple(sorted(str(ref) for ref in refs)),
        path,
        sealed_at,
    )


def read_record(path: Path, folder: Path) -> StoreObject:
    """The object that the record at `path` describes; `folder` is where it lies."""
    name = path.name.removesuffix(".json")
    try:
        return object_from_record(path.read_bytes(), name, folder, str(path))
    except StoreCorrupt as error:
        error.remedy = (
            "while the index is whole, `mm store repair` rewrites it; else move it and the "
            "folder beside it away: the object is then built again"
        )
        raise


def read_realisation(path: Path) -> Realisation:
    """The realisation that a file holds."""
    try:
        value = parse(path.read_bytes())
    except InvalidDerivation as error:
        raise StoreCorrupt(f"the record {path} is damaged: {error.message}") from error
    found = realisation_from_json(value, str(path))
    if found.resolved_key != path.stem:
        raise StoreCorrupt(f"the record {path} is that of another step")
    return found


def realisation_from_json(value: Any, where: str) -> Realisation:
    """The record of `Realisation.as_json`; `StoreCorrupt` for anything else."""
    kinds = {
        "resolved_key": str,
        "derivation": str,
        "object": str,
        "sandbox": str,
        "host": str,
        "built_ms": int,
        "built_at": int,
        "log": str,
    }
    inputs = value.get("inputs") if isinstance(value, dict) else None
    if (
        not isinstance(value, dict)
        or set(value) - {"inputs"} != set(kinds)  # records of mmadmin 0.1.0 have no inputs
        or not isinstance(inputs, list | None)
        or not all(isinstance(value[name], kind) for name, kind in kinds.items())
        or not is_sha256(value["resolved_key"])
        or not is_sha256(value["derivation"])
    ):
        raise StoreCorrupt(f"a record in {where} is damaged")
    try:
        for name in (value["object"], *(inputs or ())):
            check_object_name(str(name))
    except InvalidInput as error:
        raise StoreCorrupt(f"a record in {where} is damaged: {error.message}") from error
    return Realisation(**{**value, "inputs": None if inputs is None else tuple(inputs)})


def read_root(path: Path) -> Root:
    """The root that a file holds."""
    try:
        value = parse(path.read_bytes())
    except InvalidDerivation as error:
        raise StoreCorrupt(f"the root {path} is damaged: {error.message}") from error
    if not isinstance(value, dict) or set(value) != {"kind", "key", "object", "reason"}:
        raise StoreCorrupt(f"the root {path} is damaged")
    return Root(*(str(value[name]) for name in ("kind", "key", "object", "reason")))
