"""Pushing objects to a binary cache: bytes, then records, then attestations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mmadmin.core.callbacks import Progress, Report, silent
from mmadmin.core.canonical import canonical
from mmadmin.core.errors import Conflict, NotFound
from mmadmin.core.store.attestations import Attestation, SigningKey, attestation_from_bytes
from mmadmin.core.store.binary_cache import (
    WritableBinaryCache,
    attestation_path,
    bytes_path,
    record_path,
)
from mmadmin.core.store.records import Realisation, StoreObject
from mmadmin.core.store.store import Store
from mmadmin.core.store.transfers import ALONE_BYTES, Meter, several_at_once
from mmadmin.core.store.tree import Entry


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did."""

    objects: int
    attestations: int
    blobs: int
    sent_bytes: int


def push(
    store: Store,
    names: Iterable[str],
    cache: WritableBinaryCache,
    *,
    signer: SigningKey | None = None,
    progress: Progress = silent,
    report: Report = silent,
) -> Pushed:
    """Push objects with everything they need: blobs, then records, then attestations.

    What is there already is not sent again, so an interrupted push resumes. Attestations
    of the steps that led there go along, so that another store can follow them; without a
    `signer` no attestations are made.
    """
    wanted = sorted({name for given in names for name in store.closure(given)})
    with store.lease("push") as lease:
        if gone := store.protect(lease, wanted):
            raise NotFound(f"the store has no object {gone[0]}")
        objects = [_object(store, name) for name in wanted]
        blobs = _lacking(objects, cache)
        _send(store, blobs, cache, progress, report)
        for found in objects:
            record = canonical(store.record_of(found))
            if not cache.has(record_path(found.name), len(record)):
                cache.write(record_path(found.name), record)
        attestations = _push_attestations(store, wanted, cache, signer) if signer else 0
    return Pushed(len(objects), attestations, len(blobs), sum(blob.entry.size for blob in blobs))


@dataclass(frozen=True, slots=True)
class _Blob:
    """A file that has to be sent, and an object that has it."""

    entry: Entry
    owner: StoreObject


def _lacking(objects: Iterable[StoreObject], cache: WritableBinaryCache) -> list[_Blob]:
    """The distinct files that the cache does not have, the largest first."""
    blobs = {e.sha256: _Blob(e, found) for found in objects for e in _distinct(found)}
    paths = [bytes_path(sha256) for sha256 in blobs]
    sizes = [blob.entry.size for blob in blobs.values()]
    with several_at_once() as at_once:
        there = list(at_once.map(cache.has, paths, sizes))
    lacking = [blob for blob, has in zip(blobs.values(), there, strict=True) if not has]
    return sorted(lacking, key=lambda blob: -blob.entry.size)


def _send(
    store: Store,
    blobs: Iterable[_Blob],
    cache: WritableBinaryCache,
    progress: Progress,
    report: Report,
) -> None:
    """Large files one after another, small ones several at once."""
    blobs = list(blobs)
    meter = Meter(progress, sum(blob.entry.size for blob in blobs))

    def send(blob: _Blob) -> None:
        entry = blob.entry
        report(f"{entry.path} of {blob.owner.name}")
        file = store.blob_path(entry.sha256, executable=entry.executable)
        source = file if file.exists() else blob.owner.path / entry.path
        with meter.one() as of_this:
            cache.put(bytes_path(entry.sha256), source, entry.sha256, of_this)

    for blob in blobs:
        if blob.entry.size > ALONE_BYTES:
            send(blob)
    with several_at_once() as at_once:
        for _ in at_once.map(send, [b for b in blobs if b.entry.size <= ALONE_BYTES]):
            pass


def _push_attestations(
    store: Store, names: Iterable[str], cache: WritableBinaryCache, signer: SigningKey
) -> int:
    done: set[str] = set()
    todo = [record for name in names for record in store.realisations_of(name)]
    while todo:
        record = todo.pop()
        if record.resolved_key in done:
            continue
        done.add(record.resolved_key)
        todo.extend(_steps_below(store, record))
        attestation = signer.sign(attestation_of(store, record))
        data = cache.read(attestation_path(record.resolved_key))
        if data is not None:
            there = attestation_from_bytes(data, record.resolved_key)
            if not there.same_statement(attestation):
                raise Conflict(
                    f"{cache.label} attests {there.object[:12]} as the output of "
                    f"{record.object[65:]}, here it is {record.object[:12]}",
                    remedy="the step is not reproducible: compare with `mm build --check`",
                )
            attestation = replace(
                attestation, signatures={**there.signatures, **attestation.signatures}
            )
        cache.write(attestation_path(record.resolved_key), attestation.as_bytes())
    return len(done)


def _steps_below(store: Store, record: Realisation) -> list[Realisation]:
    """Records of the steps that a realised step was built from."""
    row = store.derivation(record.derivation)
    inputs = row.get("inputs") if isinstance(row, dict) else None
    found = []
    for digest in inputs.values() if isinstance(inputs, dict) else ():
        found.extend(store.realisations_by(str(digest)))
    return found


def attestation_of(store: Store, record: Realisation) -> Attestation:
    """The attestation that a record makes, not signed yet."""
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
    return Attestation(record.resolved_key, record.derivation, record.object, size, closure)


def _object(store: Store, name: str) -> StoreObject:
    found = store.object(name)
    if found is None:
        raise NotFound(f"the store has no object {name}")
    return found


def _distinct(found: StoreObject) -> list[Entry]:
    return list({e.sha256: e for e in found.files if e.kind == "file"}.values())
