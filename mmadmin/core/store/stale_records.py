"""Records of steps that are no longer of use.

The record of a step outlives its object, so that what was made from it is found again without
making it again (early cutoff). It is of use while something that was made from that content is
here, or has a record that is of use. Each record names its inputs; if one that is of use does not
(an earlier version wrote it), no record is stale. A derivation is deleted with the last record that
leads to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from mmadmin.core.errors import InvalidDerivation, StoreCorrupt
from mmadmin.core.store.layout import HEX_LENGTH
from mmadmin.core.store.rows import inputs_from_text
from mmadmin.core.store.writer import Writer


@dataclass(frozen=True, slots=True)
class _Record:
    key: str
    object: str
    inputs: tuple[str, ...] | None


def stale_records(store: Writer, kept: AbstractSet[str], before: float) -> list[str]:
    """Keys of the records that are of no use when only the objects `kept` are here.

    Records written at `before` (Unix seconds) or later are left, and all of them while something is
    being built or moved here: it may still need them.
    """
    if store.leases():
        return []
    with store.index.snapshot() as index:
        rows = index.execute("SELECT resolved_key, object, inputs FROM realisation").fetchall()
    records = [_Record(key, name, inputs_from_text(inputs)) for key, name, inputs in rows]
    if all(record.object in kept for record in records):
        return []
    useful = _useful(records, kept)
    if useful is None:
        return []
    return sorted(
        record.key
        for record in records
        if record.key not in useful and _written(store, record.key) < before
    )


def _useful(records: Iterable[_Record], kept: AbstractSet[str]) -> set[str] | None:
    """Keys of records that lead to what is kept; None where that is not known.

    Content is what counts, by hash: a step is found by what its inputs hold, whatever made them.
    """
    made: dict[str, list[_Record]] = defaultdict(list)
    for record in records:
        made[record.object[:HEX_LENGTH]].append(record)
    useful: set[str] = set()
    todo = [record for same in made.values() for record in same if record.object in kept]
    while todo:
        record = todo.pop()
        if record.key in useful:
            continue
        useful.add(record.key)
        if record.inputs is None:
            return None
        for name in record.inputs:
            todo.extend(made.get(name[:HEX_LENGTH], ()))
    return useful


def _written(store: Writer, key: str) -> float:
    try:
        return store.layout.realisation(key).stat().st_mtime
    except FileNotFoundError:  # a killed collection got so far
        return 0


def unused_derivations(store: Writer, stale: Iterable[str], before: float) -> list[str]:
    """Digests of derivations that only stale records lead to; raises `StoreCorrupt`.

    Those written at `before` or later are left. Empty when no record is stale.
    """
    stale = set(stale)
    if not stale:
        return []
    with store.index.snapshot() as index:
        rows = index.execute("SELECT resolved_key, derivation FROM realisation").fetchall()
    todo = [digest for key, digest in rows if key not in stale]
    reached: set[str] = set()
    while todo:
        digest = todo.pop()
        if digest not in reached:
            reached.add(digest)
            todo.extend(_inputs_of(store, digest))
    files = store.layout.derivations.glob("*.json")
    return sorted(
        path.stem for path in files if path.stem not in reached and path.stat().st_mtime < before
    )


def _inputs_of(store: Writer, digest: str) -> list[str]:
    try:
        row = store.derivation(digest)
        return list(row["inputs"].values()) if row is not None else []
    except (InvalidDerivation, TypeError, KeyError, AttributeError) as error:
        raise StoreCorrupt(
            f"the derivation {store.layout.derivation(digest)} is damaged",
            remedy="move it away: it only tells how something was built",
        ) from error


def delete_records(store: Writer, keys: Iterable[str], derivations: Iterable[str]) -> None:
    """Delete records; the caller holds builds off. If it is killed, the next call does the rest."""
    derivations = list(derivations)
    for digest in derivations:
        store.layout.derivation(digest).unlink(missing_ok=True)
    gone = [(key,) for key in keys]
    for (key,) in gone:
        store.layout.realisation(key).unlink(missing_ok=True)
        store.after("realisation removed")
    with store.index.write() as index:
        index.executemany("DELETE FROM realisation WHERE resolved_key = ?", gone)
        index.executemany("DELETE FROM derivation WHERE digest = ?", [(d,) for d in derivations])
    store.after("records deleted")
