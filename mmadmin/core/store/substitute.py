"""Reusing what other stores built: push to a depot, pull from depots.

A depot is any place with the layout

    realisations/<resolved key>.json    signed claims (`claims.Claim`)
    objects/<hash>-<name>.json          what an object holds (the store's own record)
    blobs/sha256/ab/<hex>               bytes

so that a folder, or the same folder behind any static web server, is one. What is missing there
is a miss, never an error. Every byte is checked against the hash that it was asked by.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from mmadmin.core.canonical import canonical
from mmadmin.core.errors import (
    Conflict,
    DigestMismatch,
    MmError,
    NotFound,
    SourceUnavailable,
    StoreCorrupt,
)
from mmadmin.core.store.claims import Claim, SigningKey, Trust, claim_from_bytes
from mmadmin.core.store.ingest import Progress, copy_hashing, silent
from mmadmin.core.store.locks import Lease
from mmadmin.core.store.store import (
    Realisation,
    Staging,
    Store,
    StoreObject,
    fsync_path,
    object_from_record,
)
from mmadmin.core.store.tree import Entry

Say = Callable[[str], None]


def quiet(line: str) -> None:
    """Say nothing."""


def claim_path(resolved_key: str) -> str:
    """Where a depot has the claim of a step."""
    return f"realisations/{resolved_key}.json"


def record_path(name: str) -> str:
    """Where a depot has what an object holds."""
    return f"objects/{name}.json"


def bytes_path(sha256: str) -> str:
    """Where a depot has a file's bytes."""
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


class Depot(Protocol):
    """A place to pull from. Methods block; both raise `SourceUnavailable` when it is down."""

    @property
    def label(self) -> str:
        """What a person calls it."""
        ...

    def read(self, path: str) -> bytes | None:
        """A small file; None when it is not there."""
        ...

    def fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        """Complete `part`, which may hold a beginning already; its sha256, None when not there.

        The caller compares it. A part stays when it is interrupted, to be gone on with.
        """
        ...


class WritableDepot(Depot, Protocol):
    """A place to push to."""

    def has(self, path: str, size: int) -> bool:
        """True when a file of that size is there."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Put a small file there, at once: old or new, never a part."""
        ...

    def put(self, path: str, source: Path, progress: Progress) -> None:
        """Put a large file there; it appears when it is whole."""
        ...


class Folder:
    """A depot in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def label(self) -> str:
        """Its path."""
        return str(self.root)

    def read(self, path: str) -> bytes | None:
        """A small file; None when it is not there."""
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceUnavailable(f"{self.root / path}: {error.strerror}") from error

    def fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        """Copy a file; a part of an earlier attempt is begun anew, as copying is cheap."""
        del size
        part.unlink(missing_ok=True)
        try:
            return copy_hashing(self.root / path, part, progress=progress)[0]
        except (FileNotFoundError, NotADirectoryError):
            return None

    def has(self, path: str, size: int) -> bool:
        """True when a file of that size is there."""
        try:
            return (self.root / path).stat().st_size == size
        except FileNotFoundError:
            return False

    def write(self, path: str, data: bytes) -> None:
        """Put a small file there by one rename."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{uuid.uuid4().hex}.new")
        temporary.write_bytes(data)
        fsync_path(temporary)
        temporary.rename(target)

    def put(self, path: str, source: Path, progress: Progress) -> None:
        """Put a large file there by copy and rename."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{uuid.uuid4().hex}.new")
        try:
            copy_hashing(source, temporary, progress=progress)
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)


class DepotSource:
    """Gets damaged files back from a depot; a `verify.BlobSource`."""

    def __init__(self, depot: Depot, progress: Progress = silent) -> None:
        self.depot = depot
        self.progress = progress

    @property
    def label(self) -> str:
        """The depot."""
        return self.depot.label

    def get(self, want: Entry, owner: str, to: Path) -> bool:
        """Fetch the bytes; the caller checks them."""
        del owner
        return self.depot.fetch(bytes_path(want.sha256), to, want.size, self.progress) is not None


# --- push --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did."""

    objects: int
    claims: int
    blobs: int
    sent_bytes: int


def push(
    store: Store,
    names: Iterable[str],
    depot: WritableDepot,
    *,
    signer: SigningKey | None = None,
    progress: Progress = silent,
    say: Say = quiet,
) -> Pushed:
    """Put objects with all they need into a depot: blobs, then records, then claims.

    What is there already is not sent again, so an interrupted push goes on where it was. Claims
    of the steps that led there go along, so that another store can follow them; without a
    `signer` no claims are made.
    """
    wanted = sorted({name for given in names for name in store.closure(given)})
    blobs = sent = 0
    with store.lease("push") as lease:
        if gone := store.protect(lease, wanted):
            raise NotFound(f"the store has no object {gone[0]}")
        objects = [_object(store, name) for name in wanted]
        for found in objects:
            for entry in _distinct(found):
                if not depot.has(bytes_path(entry.sha256), entry.size):
                    say(f"{entry.path} of {found.name}")
                    blob = store.blob_path(entry.sha256, executable=entry.executable)
                    source = blob if blob.exists() else found.path / entry.path
                    depot.put(bytes_path(entry.sha256), source, progress)
                    blobs += 1
                    sent += entry.size
        for found in objects:
            record = canonical(store.record_of(found))
            if not depot.has(record_path(found.name), len(record)):
                depot.write(record_path(found.name), record)
        claims = _push_claims(store, wanted, depot, signer) if signer else 0
    return Pushed(len(objects), claims, blobs, sent)


def _push_claims(
    store: Store, names: Iterable[str], depot: WritableDepot, signer: SigningKey
) -> int:
    done: set[str] = set()
    todo = [record for name in names for record in store.realisations_of(name)]
    while todo:
        record = todo.pop()
        if record.resolved_key in done:
            continue
        done.add(record.resolved_key)
        todo.extend(_steps_below(store, record))
        claim = signer.sign(claim_of(store, record))
        data = depot.read(claim_path(record.resolved_key))
        if data is not None:
            there = claim_from_bytes(data, record.resolved_key)
            if not there.says_same(claim):
                raise Conflict(
                    f"{depot.label} says that {record.object[65:]} came out as "
                    f"{there.object[:12]}, here it came out as {record.object[:12]}",
                    remedy="the step is not reproducible: compare with `mm build --check`",
                )
            claim = replace(claim, signatures={**there.signatures, **claim.signatures})
        depot.write(claim_path(record.resolved_key), claim.as_bytes())
    return len(done)


def _steps_below(store: Store, record: Realisation) -> list[Realisation]:
    """Records of the steps that a realised step was built from."""
    row = store.derivation(record.derivation)
    inputs = row.get("inputs") if isinstance(row, dict) else None
    found = []
    for digest in inputs.values() if isinstance(inputs, dict) else ():
        found.extend(store.realisations_by(str(digest)))
    return found


def claim_of(store: Store, record: Realisation) -> Claim:
    """The claim that a record makes, not signed yet."""
    closure: dict[str, tuple[str, ...]] = {}
    size = 0
    todo = [record.object]
    while todo:
        name = todo.pop()
        found = store.recorded(name)
        refs = found.refs if found else ()
        if name not in closure:
            closure[name] = refs
            todo.extend(refs)
        if name == record.object and found:
            size = found.size
    return Claim(record.resolved_key, record.derivation, record.object, size, closure)


def _object(store: Store, name: str) -> StoreObject:
    found = store.object(name)
    if found is None:
        raise NotFound(f"the store has no object {name}")
    return found


def _distinct(found: StoreObject) -> list[Entry]:
    return list({e.sha256: e for e in found.files if e.kind == "file"}.values())


# --- pull --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Substituter:
    """Answers from depots, in their order, what steps came out as; and gets it."""

    store: Store
    depots: Sequence[Depot]
    trust: Trust
    progress: Progress = silent
    say: Say = quiet
    _claims: dict[str, Claim | None] = field(default_factory=dict)
    _down: set[str] = field(default_factory=set)
    """Labels of depots that did not answer: not asked again by this one."""

    def _asked(self) -> Iterator[Depot]:
        return (depot for depot in self.depots if depot.label not in self._down)

    def _note(self, depot: Depot, error: MmError) -> None:
        self.say(f"{depot.label}: {error.message}")
        if isinstance(error, SourceUnavailable):
            self._down.add(depot.label)

    def output(self, resolved_key: str) -> str | None:
        """The object that a step produced elsewhere, by enough trusted signatures; else None."""
        claim = self.claim(resolved_key)
        return claim.object if claim else None

    def claim(self, resolved_key: str) -> Claim | None:
        """The first trusted claim; what is wrong with others is said and passed over."""
        if resolved_key not in self._claims:
            self._claims[resolved_key] = self._find_claim(resolved_key)
        return self._claims[resolved_key]

    def _find_claim(self, resolved_key: str) -> Claim | None:
        for depot in self._asked():
            try:
                data = depot.read(claim_path(resolved_key))
                if data is None:
                    continue
                claim = claim_from_bytes(data, resolved_key)
                self.trust.check(claim)
            except MmError as error:
                self._note(depot, error)
                continue
            return claim
        return None

    def pull_claimed(self, resolved_key: str, lease: Lease) -> Realisation | None:
        """Get what a step produced elsewhere, with all it needs; None when that cannot be had."""
        claim = self.claim(resolved_key)
        if claim is None:
            return None
        for name in _needed_first(claim):
            if not self._pull_one(name, claim.closure[name], lease):
                return None
        record = Realisation(
            claim.resolved_key, claim.derivation, claim.object, sandbox="substituted"
        )
        self.store.record(record)
        return record

    def pull(self, name: str, lease: Lease) -> bool:
        """Get an object by its name, with all it needs: what it holds needs no one's word."""
        found = self._record(name)
        refs = found.refs if found else ()
        return all(self.pull(ref, lease) for ref in refs if ref != name) and self._pull_one(
            name, refs, lease
        )

    def _record(self, name: str) -> StoreObject | None:
        """What an object holds: from here, or from the first depot with a right record."""
        here = self.store.object(name)
        if here is not None:
            return here
        for depot in self._asked():
            try:
                data = depot.read(record_path(name))
                if data is not None:
                    path = self.store.object_path(name)
                    return object_from_record(data, name, path, f"of {name} in {depot.label}")
            except MmError as error:
                self._note(depot, error)
        return None

    def _pull_one(self, name: str, refs: tuple[str, ...], lease: Lease) -> bool:
        if not self.store.protect(lease, [name]):
            return True
        found = self._record(name)
        if found is None:
            return False
        blobs = _distinct_forms(found)
        need = sum(e.size for e in blobs if not self._has(e))
        with self.store.staging(lease) as staging:
            staging.reserve(need)
            for entry in blobs:
                if not self._get_blob(entry):
                    return False
            self._fill(staging, found)
            self.store.seal(staging, name[65:], refs=refs, expect=name)
        return True

    def _has(self, entry: Entry) -> bool:
        return self.store.has_blob(entry.sha256, executable=entry.executable)

    def _get_blob(self, entry: Entry) -> bool:
        """Have a file's bytes in the store: whoever wants them first transfers them."""
        with self.store.lock(f"blob-{entry.sha256}", owner=f"transfer of {entry.path}"):
            if self._has(entry):
                return True
            part = self.store.layout.downloads / f"{entry.sha256}.part"
            for depot in self._asked():
                try:
                    if self._fetch(depot, entry, part):
                        self.store.keep_blob(part, entry.sha256, executable=entry.executable)
                        return True
                except (SourceUnavailable, DigestMismatch) as error:
                    self._note(depot, error)
        return False

    def _fetch(self, depot: Depot, entry: Entry, part: Path) -> bool:
        sha256 = depot.fetch(bytes_path(entry.sha256), part, entry.size, self.progress)
        if sha256 is None:
            return False
        if sha256 != entry.sha256:
            part.unlink()
            raise DigestMismatch(
                f"gave bytes with sha256 {sha256[:12]}… for {entry.sha256[:12]}…",
                expected=entry.sha256,
                actual=sha256,
            )
        return True

    def _fill(self, staging: Staging, found: StoreObject) -> None:
        for entry in found.files:
            target = staging.out / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if entry.kind == "dir":
                target.mkdir(exist_ok=True)
            elif entry.kind == "link":
                target.symlink_to(entry.target)
            elif not staging.take(entry.sha256, entry.size, target, executable=entry.executable):
                raise StoreCorrupt(f"the blob of {entry.path} vanished", remedy="try again")


def _needed_first(claim: Claim) -> list[str]:
    """The objects of a claim's closure, each after those that it needs."""
    order: list[str] = []
    todo = [(claim.object, False)]
    seen = set()
    while todo:
        name, ready = todo.pop()
        if ready:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            todo.append((name, True))
            todo.extend((ref, False) for ref in claim.closure[name])
    return order


def _distinct_forms(found: StoreObject) -> list[Entry]:
    forms = {(e.sha256, e.executable): e for e in found.files if e.kind == "file"}
    return list(forms.values())


def trust_from_json(text: str) -> tuple[list[str], Trust]:
    """Depot addresses and trust from the text of a `substituters.json`.

    `{"depots": [...], "trusted": ["name:base64", …], "need": 1, "revoked": ["name", …]}`.
    """
    try:
        value = json.loads(text)
        depots = [str(depot) for depot in value.get("depots", [])]
        trust = Trust.of(
            value.get("trusted", []),
            need=value.get("need", 1),
            revoked=value.get("revoked", []),
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise StoreCorrupt(f"substituters.json is damaged: {error}") from error
    return depots, trust
