"""Forgetting what steps came out as, once nothing that is kept leads there.

The record of a step outlives its object, so that what was made from it is found again without
making it again (early cutoff). It is of use as long as something was made from that content which
is here, or whose own record is of use. Each record says what it was made from; where one that is
of use does not (an earlier version wrote it), nothing is forgotten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from mmadmin.core.store.layout import HEX_LENGTH
from mmadmin.core.store.rows import inputs_from_text
from mmadmin.core.store.store import Store


@dataclass(frozen=True, slots=True)
class _Record:
    key: str
    object: str
    inputs: tuple[str, ...] | None


def useless(store: Store, kept: AbstractSet[str], before: float) -> list[str]:
    """Keys of the records that are of no use when only the objects `kept` are here.

    Left are records that were written at `before` (Unix seconds) or later, and all of them while
    something is being built or moved here: it may be on its way along them.
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
    """Keys of records that lead to what is kept; None where that cannot be told.

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


def _written(store: Store, key: str) -> float:
    try:
        return store.layout.realisation(key).stat().st_mtime
    except FileNotFoundError:  # a killed collection got so far
        return 0


def forget(store: Store, keys: Iterable[str]) -> None:
    """Remove records; the caller holds builds off. If it is killed, the next one does the rest."""
    gone = [(key,) for key in keys]
    for (key,) in gone:
        store.layout.realisation(key).unlink(missing_ok=True)
        store.after("realisation removed")
    with store.index.write() as index:
        index.executemany("DELETE FROM realisation WHERE resolved_key = ?", gone)
    store.after("realisations forgotten")
