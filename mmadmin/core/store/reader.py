"""Everything that only looks at a store: objects, realisations, closures, blobs, roots, leases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmadmin.core.build.recipe import FixedFile
from mmadmin.core.canonical import parse
from mmadmin.core.errors import NotFound, StoreCorrupt
from mmadmin.core.store import tree
from mmadmin.core.store.files import is_sealed
from mmadmin.core.store.index import Index
from mmadmin.core.store.layout import Layout
from mmadmin.core.store.locks import LeaseRecord, leases_in
from mmadmin.core.store.records import Realisation, Root, StoreObject, read_root, record_of
from mmadmin.core.store.rows import CLOSURE, LOST, REALISATION, load_object, load_realisation


class Reader:
    """A store as those see it who change nothing."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 (links in the way are the user's)
        self.layout = Layout(self.root)
        self.index = Index(self.layout.index)
        self._objects = str(self.layout.objects)

    def close(self) -> None:
        """Close this thread's connection to the index."""
        self.index.close()

    def object_path(self, name: str) -> Path:
        """Where an object is, or would be."""
        return self.layout.object(name)

    def has_object(self, name: str) -> bool:
        """True when the object is complete: a row and a path.

        A row without a path is `StoreCorrupt`.
        """
        if self.index.row("SELECT 1 FROM object WHERE name = ?", (name,)) is None:
            return False
        if not os.path.isdir(f"{self._objects}/{name}"):  # noqa: PTH112 (hot: a plan asks a lot)
            raise missing_path(name)
        return True

    def object(self, name: str) -> StoreObject | None:
        """The object, or None; `StoreCorrupt` for a row without a path."""
        if not self.has_object(name):
            return None
        with self.index.snapshot() as index:
            return load_object(index, name, self.layout.object(name))

    def objects(self) -> Iterator[StoreObject]:
        """Every object of the index, by name; paths are not looked at (see `verify`)."""
        for name in self.names():
            with self.index.snapshot() as index:
                found = load_object(index, name, self.layout.object(name))
            if found is not None:  # collected meanwhile
                yield found

    def names(self) -> list[str]:
        """Names of all objects of the index, sorted."""
        with self.index.read() as index:
            return [row[0] for row in index.execute("SELECT name FROM object ORDER BY name")]

    def recorded(self, name: str) -> StoreObject | None:
        """What the index says about an object, whether its folder is there or not."""
        with self.index.snapshot() as index:
            return load_object(index, name, self.layout.object(name))

    def record_of(self, found: StoreObject) -> dict[str, Any]:
        """What the record beside an object says."""
        return record_of(found)

    def realisation(self, resolved_key: str) -> Realisation | None:
        """What a derivation with this key produced, while the object is there."""
        found = self.realisation_record(resolved_key)
        return found if found is not None and self.has_object(found.object) else None

    def realisation_record(self, resolved_key: str) -> Realisation | None:
        """What a derivation with this key produced, even when the object was collected."""
        row = self.index.row(
            f"{REALISATION} WHERE resolved_key = ?",
            (resolved_key,),
        )
        return load_realisation(row) if row else None

    def realisations_of(self, object_name: str) -> list[Realisation]:
        """Every record that says how an object came about."""
        with self.index.read() as index:
            rows = index.execute(
                f"{REALISATION} WHERE object = ? ORDER BY built_at, resolved_key",
                (object_name,),
            ).fetchall()
        return [load_realisation(row) for row in rows]

    def realisations_by(self, derivation: str) -> list[Realisation]:
        """Every record of what a derivation (by digest) came out as here."""
        with self.index.read() as index:
            rows = index.execute(
                f"{REALISATION} WHERE derivation = ? ORDER BY built_at, resolved_key",
                (derivation,),
            ).fetchall()
        return [load_realisation(row) for row in rows]

    def last_built(self, recipe: str, name: str) -> Any | None:
        """The derivation (as data) of this recipe and name that was realised last, or None."""
        row = self.index.row(
            "SELECT derivation.digest FROM derivation"
            " JOIN realisation ON realisation.derivation = derivation.digest"
            " WHERE recipe = ? AND name = ? ORDER BY built_at DESC, digest LIMIT 1",
            (recipe, name),
        )
        return self.derivation(row[0]) if row else None

    def derivation(self, digest: str) -> Any | None:
        """The data of a derivation that was built here (`Derivation.as_json`), or None."""
        try:
            return parse(self.layout.derivation(digest).read_bytes())
        except FileNotFoundError:
            return None

    def fixed(self, files: Sequence[FixedFile], name: str) -> StoreObject | None:
        """The object with these pinned files, if it is here."""
        return self.object(tree.object_name(tree.fixed_entries(files), name))

    def closure(self, name: str) -> list[str]:
        """The object and everything that it needs, sorted; `NotFound` when it is not here."""
        with self.index.snapshot() as index:
            if index.execute("SELECT 1 FROM object WHERE name = ?", (name,)).fetchone() is None:
                raise NotFound(f"the store has no object {name}", remedy="see `mm store ls`")
            rows = index.execute(
                CLOSURE,
                (name,),
            ).fetchall()
        return [row[0] for row in rows]

    def object_size(self, name: str) -> int:
        """Bytes of an object's files; 0 when it is not here."""
        row = self.index.row("SELECT size FROM object WHERE name = ?", (name,))
        return row[0] if row else 0

    def lost_reference(self, name: str) -> str | None:
        """Something that a sealed object needs and that is not here, or None."""
        row = self.index.row(
            LOST,
            (name,),
        )
        return row[0] if row else None

    def has_blob(self, sha256: str, *, executable: bool = False) -> bool:
        """True when the bytes are here in that form, and not known to be damaged."""
        try:
            info = self.layout.blob(sha256, executable=executable).stat()
        except FileNotFoundError:
            return False
        return is_sealed(info, executable=executable)

    def blob_path(self, sha256: str, *, executable: bool = False) -> Path:
        """Where the bytes are, or would be."""
        return self.layout.blob(sha256, executable=executable)

    def roots(self) -> list[Root]:
        """What was asked to be kept, and why; `StoreCorrupt` for a record that cannot be read."""
        found = []
        for path in sorted(self.layout.roots.glob("*/*.json")):
            try:
                found.append(read_root(path))
            except FileNotFoundError:  # removed meanwhile
                continue
        return found

    def leases(self, *, strict: bool = False) -> list[LeaseRecord]:
        """Every living lease; `strict` raises `StoreCorrupt` for a damaged record."""
        return leases_in(self.layout.leases, strict=strict)


def missing_path(name: str) -> StoreCorrupt:
    """The error of a row without a path."""
    return StoreCorrupt(
        f"the store's index names {name}, but its folder is gone",
        remedy="repair it with `mm store repair`",
        object=name,
    )
