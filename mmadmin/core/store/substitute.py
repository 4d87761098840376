"""Reusing what other stores built: looking outputs up in binary caches, and pulling them.

What a cache does not have is a miss, never an error. Every byte is checked against the hash that it
was requested by; that a step produced an object is trusted by signature (`attestations`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmadmin.core.callbacks import Progress, Report, silent
from mmadmin.core.errors import (
    DigestMismatch,
    MmError,
    SourceUnavailable,
    StoreCorrupt,
)
from mmadmin.core.store.attestations import Attestation, Trust, attestation_from_bytes
from mmadmin.core.store.binary_cache import BinaryCache, attestation_path, bytes_path, record_path
from mmadmin.core.store.ingest import copy_hashing
from mmadmin.core.store.locks import Lease
from mmadmin.core.store.records import Realisation, StoreObject, object_from_record
from mmadmin.core.store.staging import Staging
from mmadmin.core.store.store import Store
from mmadmin.core.store.transfers import ALONE_BYTES, Meter, several_at_once
from mmadmin.core.store.tree import Entry
from mmadmin.core.store.verify import is_intact


@dataclass(slots=True)
class Substituter:
    """Looks up in caches, in their order, what steps produced; and pulls it."""

    store: Store
    caches: Sequence[BinaryCache]
    trust: Trust
    progress: Progress = silent
    report: Report = silent
    _attestations: dict[str, Attestation | None] = field(default_factory=dict)
    _down: set[int] = field(default_factory=set)
    """Indexes in `caches` of those that did not answer: they are not asked again."""

    def _asked(self) -> Iterator[BinaryCache]:
        return (cache for n, cache in enumerate(self.caches) if n not in self._down)

    def _note(self, cache: BinaryCache, error: MmError) -> None:
        self.report(f"{cache.label}: {error.message}")
        if isinstance(error, SourceUnavailable):
            self._down.update(n for n, one in enumerate(self.caches) if one is cache)

    def output(self, resolved_key: str) -> str | None:
        """The object that a step produced elsewhere, by enough trusted signatures; else None."""
        attestation = self.attestation(resolved_key)
        return attestation.object if attestation else None

    def attestation(self, resolved_key: str) -> Attestation | None:
        """The first trusted attestation; what is wrong with others is reported and skipped."""
        if resolved_key not in self._attestations:
            self._attestations[resolved_key] = self._find(resolved_key)
        return self._attestations[resolved_key]

    def _find(self, resolved_key: str) -> Attestation | None:
        for cache in self._asked():
            try:
                data = cache.read(attestation_path(resolved_key))
                if data is None:
                    continue
                attestation = attestation_from_bytes(data, resolved_key)
                self.trust.check(attestation)
            except MmError as error:
                self._note(cache, error)
                continue
            return attestation
        return None

    def pull_output(
        self, resolved_key: str, lease: Lease, inputs: tuple[str, ...] | None = None
    ) -> Realisation | None:
        """Pull what a step produced elsewhere, with everything it needs; None when that fails.

        `inputs` are the objects that the step is made from, for the record.
        """
        attestation = self.attestation(resolved_key)
        if attestation is None:
            return None
        for name in _needed_first(attestation):
            if not self._pull_one(name, attestation.closure[name], lease):
                return None
        record = Realisation(
            attestation.resolved_key,
            attestation.derivation,
            attestation.object,
            sandbox="substituted",
            inputs=inputs,
        )
        self.store.record(record)
        return record

    def pull(self, name: str, lease: Lease) -> bool:
        """Get an object by its name, with everything it needs; its content needs no signature."""
        found = self._record(name)
        refs = found.refs if found else ()
        return all(self.pull(ref, lease) for ref in refs if ref != name) and self._pull_one(
            name, refs, lease
        )

    def _record(self, name: str) -> StoreObject | None:
        """What an object holds: from here, or from the first cache with a right record."""
        here = self.store.object(name)
        if here is not None:
            return here
        for cache in self._asked():
            try:
                data = cache.read(record_path(name))
                if data is not None:
                    path = self.store.object_path(name)
                    return object_from_record(data, name, path, f"of {name} in {cache.label}")
            except MmError as error:
                self._note(cache, error)
        return None

    def _pull_one(self, name: str, refs: tuple[str, ...], lease: Lease) -> bool:
        if not self.store.protect(lease, [name]) and is_intact(self.store, name):
            return True
        found = self._record(name)
        if found is None:
            return False
        blobs = _distinct_forms(found)
        need = sum(e.size for e in blobs if not self._has(e))
        with self.store.staging(lease) as staging:
            staging.reserve(need)
            if not self._get_blobs([entry for entry in blobs if not self._has(entry)], need):
                return False
            self._fill(staging, found)
            self.store.seal(staging, name[65:], refs=refs, expect=name)
        return True

    def _has(self, entry: Entry) -> bool:
        return self.store.has_blob(entry.sha256, executable=entry.executable)

    def _get_blobs(self, blobs: Sequence[Entry], total: int) -> bool:
        """Have files' bytes in the store: large ones in turn, small ones several at once."""
        meter = Meter(self.progress, total)
        large = [entry for entry in blobs if entry.size > ALONE_BYTES]
        small = [entry for entry in blobs if entry.size <= ALONE_BYTES]
        if not all(self._get_blob(entry, meter) for entry in large):
            return False
        with several_at_once() as at_once:
            return all(at_once.map(lambda entry: self._get_blob(entry, meter), small))

    def _get_blob(self, entry: Entry, meter: Meter) -> bool:
        """Have a file's bytes in the store; of several who want them, the first transfers them."""
        with self.store.lock(f"blob-{entry.sha256}", owner=f"transfer of {entry.path}"):
            if self._has(entry):
                return True
            part = self.store.layout.downloads / f"{entry.sha256}.part"
            if self._has_other_form(entry, part):
                return True
            for cache in list(self._asked()):
                try:
                    if self._fetch(cache, entry, part, meter):
                        self.store.keep_blob(part, entry.sha256, executable=entry.executable)
                        return True
                except (SourceUnavailable, DigestMismatch) as error:
                    self._note(cache, error)
        return False

    def _has_other_form(self, entry: Entry, part: Path) -> bool:
        """Take the bytes from the file with the other executable bit, if it is here and sound."""
        other = self.store.blob_path(entry.sha256, executable=not entry.executable)
        if not other.is_file():
            return False
        fresh = part.with_name(f"{part.name}-{uuid.uuid4().hex}")
        right = copy_hashing(other, fresh)[0] == entry.sha256
        if right:
            self.store.keep_blob(fresh, entry.sha256, executable=entry.executable)
        fresh.unlink(missing_ok=True)
        return right

    def _fetch(self, cache: BinaryCache, entry: Entry, part: Path, meter: Meter) -> bool:
        begun = part.exists()
        with meter.one() as of_this:
            sha256 = cache.fetch(bytes_path(entry.sha256), part, entry.size, of_this)
        if sha256 is None:
            return False
        if sha256 != entry.sha256:
            part.unlink()
            if begun:  # the beginning may have been what was wrong
                return self._fetch(cache, entry, part, meter)
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


def _needed_first(attestation: Attestation) -> list[str]:
    """The objects of an attestation's closure, each after those that it needs."""
    order: list[str] = []
    todo = [(attestation.object, False)]
    seen = set()
    while todo:
        name, ready = todo.pop()
        if ready:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            todo.append((name, True))
            todo.extend((ref, False) for ref in attestation.closure[name])
    return order


def _distinct_forms(found: StoreObject) -> list[Entry]:
    forms = {(e.sha256, e.executable): e for e in found.files if e.kind == "file"}
    return list(forms.values())


def substituters_from_json(text: str) -> tuple[list[str], Trust]:
    """Addresses of binary caches and trust from the text of a `substituters.json`.

    `{"caches": [...], "trusted": ["name:base64", …], "need": 1, "revoked": ["name", …]}`; mmadmin
    0.1 called the caches "depots".
    """
    try:
        value = json.loads(text)
        caches = [str(one) for one in value.get("caches", value.get("depots", []))]
        trust = Trust.of(
            value.get("trusted", []),
            need=value.get("need", 1),
            revoked=value.get("revoked", []),
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise StoreCorrupt(f"substituters.json is damaged: {error}") from error
    return caches, trust
