"""The index's rows: how objects, realisations and derivations are written, and asked for."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmadmin.core.store.records import Realisation, StoreObject
from mmadmin.core.store.tree import Entry

REALISATION = (
    "SELECT resolved_key, derivation, object, sandbox, host, built_ms, built_at, log, inputs"
    " FROM realisation"
)
NEEDED = (
    "WITH RECURSIVE needed(name) AS (VALUES (?) UNION"
    " SELECT target FROM reference JOIN needed ON reference.object = needed.name)"
)
CLOSURE = NEEDED + " SELECT name FROM needed ORDER BY name"  # noqa: S608 (constants)
"""An object and all that it needs."""
LOST = NEEDED + (  # noqa: S608 (constants)
    " SELECT needed.name FROM needed LEFT JOIN object ON object.name = needed.name"
    " WHERE object.name IS NULL LIMIT 1"
)
"""One of them that is not here."""


def insert_object(index: sqlite3.Connection, found: StoreObject) -> None:
    """Write an object, its entries and references; references only grow."""
    index.execute(
        "INSERT OR REPLACE INTO object VALUES (?, ?, ?, ?)",
        (found.name, found.hash, found.size, found.sealed_at),
    )
    index.executemany(
        "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (found.name, e.path, e.kind, int(e.executable), e.size, e.sha256, e.target)
            for e in found.files
        ],
    )
    index.executemany(
        "INSERT OR IGNORE INTO reference VALUES (?, ?)", [(found.name, ref) for ref in found.refs]
    )


def insert_realisation(index: sqlite3.Connection, realisation: Realisation) -> None:
    """Write what a derivation came out as; the last word on a key counts."""
    index.execute(
        "INSERT OR REPLACE INTO realisation VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*list(realisation.as_json().values())[:-1], inputs_to_text(realisation.inputs)),
    )


def inputs_to_text(inputs: tuple[str, ...] | None) -> str | None:
    """A realisation's inputs as the index has them."""
    return None if inputs is None else "\n".join(inputs)


def inputs_from_text(text: str | None) -> tuple[str, ...] | None:
    """What `inputs_to_text` wrote."""
    return None if text is None else tuple(text.split("\n")) if text else ()


def load_realisation(row: Sequence[Any]) -> Realisation:
    """The record of a row of `REALISATION`."""
    return replace(Realisation(*row[:-1]), inputs=inputs_from_text(row[-1]))


def insert_derivation(index: sqlite3.Connection, digest: str, row: Any) -> None:
    """Write a derivation's recipe and name, by which earlier builds are found."""
    if isinstance(row, dict):
        values = (digest, row.get("recipe", ""), row.get("name", ""))
        index.execute("INSERT OR REPLACE INTO derivation VALUES (?, ?, ?)", values)


def load_object(index: sqlite3.Connection, name: str, path: Path) -> StoreObject | None:
    """What the index says about an object that lies, or should lie, at `path`."""
    row = index.execute(
        "SELECT hash, size, sealed_at FROM object WHERE name = ?", (name,)
    ).fetchone()
    if row is None:
        return None
    entries = tuple(
        Entry(at, kind, bool(executable), size, sha256, target)
        for at, kind, executable, size, sha256, target in index.execute(
            "SELECT path, kind, executable, size, sha256, target FROM entry"
            " WHERE object = ? ORDER BY path",
            (name,),
        )
    )
    refs = tuple(
        ref
        for (ref,) in index.execute(
            "SELECT target FROM reference WHERE object = ? ORDER BY target", (name,)
        )
    )
    return StoreObject(name, row[0], row[1], entries, refs, path, row[2])


def remove_objects(index: sqlite3.Connection, names: Iterable[str]) -> None:
    """Remove objects with their entries and references."""
    wanted = [(name,) for name in names]
    for table, column in (("object", "name"), ("entry", "object"), ("reference", "object")):
        index.executemany(
            f"DELETE FROM {table} WHERE {column} = ?",  # noqa: S608 (constants)
            wanted,
        )
