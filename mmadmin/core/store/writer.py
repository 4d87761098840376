"""The small steps by which a store changes: leases, locks, records, blobs, the trash.

Each leaves old or new, never a part. What consists of several of them (a commit, a collection)
stands on this module, and the `Store` stands on those.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.callbacks import Report, silent
from mmadmin.core.canonical import canonical, parse
from mmadmin.core.errors import InvalidDerivation, StoreCorrupt
from mmadmin.core.store.disk import Disk
from mmadmin.core.store.files import (
    fsync_path,
    is_sealed,
    link_or_copy,
    sealed_mode,
    stamp,
    unlink_tree,
    write_file,
)
from mmadmin.core.store.index import TABLES
from mmadmin.core.store.locks import REPORT_EVERY_S, Lease, file_lock, lease_in, sweep_leases
from mmadmin.core.store.reader import Reader
from mmadmin.core.store.records import Realisation, StoreObject, read_realisation, read_record
from mmadmin.core.store.rows import insert_derivation, insert_object, insert_realisation

StepHook = Callable[[str], None]
"""Called after each step of a commit or a collection, by the step's name."""


class Writer(Reader):
    """A store as those see it who change it."""

    def __init__(self, root: Path, *, floor_bytes: int, after: StepHook) -> None:
        super().__init__(root)
        self.layout.create()
        self.after = after
        self.disk = Disk(self.root, self.layout.reservations, self.layout.lock("disk"), floor_bytes)
        self.index.prepare(self._fill)

    def free_bytes(self) -> int:
        """Free bytes on the store's file system."""
        return self.disk.free_bytes()

    def usable_bytes(self) -> int:
        """The same, less what must stay free."""
        return max(0, self.free_bytes() - self.disk.floor_bytes)

    # --- leases and locks ----------------------------------------------------------------------

    @contextmanager
    def lease(self, owner: str) -> Iterator[Lease]:
        """A lease of this process: what it protects is not collected while the process lives.

        Also clears away what dead processes left: leases, staging folders, reservations.
        """
        self.sweep()
        with lease_in(self.layout.leases, owner) as lease:
            self.after("leased")
            yield lease

    def protect(self, lease: Lease, names: Iterable[str]) -> list[str]:
        """Keep objects while the lease lasts; returns those that are not here (any more)."""
        names = list(names)
        with file_lock(self.layout.lock("gc"), shared=True):
            lease.add(names)
            return [name for name in names if not self._is_there(name)]

    def _is_there(self, name: str) -> bool:
        try:
            return self.has_object(name)
        except StoreCorrupt:  # a row without a path
            return False

    @contextmanager
    def lock(
        self,
        key: str,
        *,
        on_wait: Report = silent,
        report_every_s: float = REPORT_EVERY_S,
        owner: str = "",
    ) -> Iterator[int]:
        """Hold the named lock (see `file_lock`); yields a descriptor for children to inherit."""
        path = self.layout.lock(key)
        with file_lock(path, on_wait=on_wait, report_every_s=report_every_s, owner=owner) as fd:
            yield fd

    def sweep(self) -> None:
        """Clear away what dead processes left behind."""
        sweep_leases(self.layout.leases)
        living = {lease.id for lease in self.leases()}
        for folder in self.layout.staging.iterdir():
            if folder.name.rpartition("-")[0] not in living and _older_than_a_moment(folder):
                self.remove(folder)
        self.disk.reservations()

    # --- files ---------------------------------------------------------------------------------

    def keep_blob(
        self, path: Path, sha256: str, *, executable: bool = False, stay: bool = False
    ) -> None:
        """Move a file's bytes into the store under their true digest.

        With `stay` the file is linked instead, so that no collection can come in between.
        """
        path.chmod(sealed_mode(executable=executable))
        stamp(path)
        fsync_path(path)
        with file_lock(self.layout.lock("gc"), shared=True):
            blob = self.layout.blob(sha256, executable=executable)
            blob.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                if not is_sealed(blob.stat(), executable=executable):
                    blob.unlink()  # damaged: this one takes its place
            with suppress(FileExistsError):
                link_or_copy(path, blob)
                fsync_path(blob.parent)
            if not stay:
                path.unlink()

    def write_realisation(self, realisation: Realisation, derivation: Derivation | None) -> None:
        """Write the files that say how an object came about; the index is the caller's."""
        if derivation is not None:
            path = self.layout.derivation(derivation.digest)
            if not path.exists():
                write_file(path, canonical(derivation.as_json()))
        write_file(
            self.layout.realisation(realisation.resolved_key), canonical(realisation.as_json())
        )

    def write_record(self, found: StoreObject) -> None:
        """Write the record beside an object."""
        write_file(self.layout.sidecar(found.name), canonical(self.record_of(found)))

    def discard(self, path: Path) -> Path:
        """Take a path out of sight by one rename into the trash; returns where it went."""
        target = self.layout.trash / uuid.uuid4().hex
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)  # moving a folder writes its ".."
        path.rename(target)
        return target

    def remove(self, folder: Path) -> None:
        """Remove a folder for good; nothing to do when another process did."""
        try:
            target = self.discard(folder)
        except FileNotFoundError:
            return
        unlink_tree(target)

    # --- the index -----------------------------------------------------------------------------

    def reindex(self) -> int:
        """Rebuild the index from the sidecars; the number of objects. Refuses damaged sidecars."""
        with file_lock(self.layout.lock("gc")), self.index.write() as index:
            for table in TABLES:
                index.execute(f"DELETE FROM {table}")  # noqa: S608 (a constant)
            self._fill(index)
        return len(self.names())

    def _fill(self, index: sqlite3.Connection) -> None:
        """Write all that the disk says into an empty index."""
        for path in sorted(self.layout.objects.glob("*.json")):
            found = read_record(path, self.layout.object(path.name.removesuffix(".json")))
            if found.path.is_dir():
                insert_object(index, found)
        for path in sorted((self.layout.derivations / "realised").glob("*.json")):
            insert_realisation(index, read_realisation(path))
        for path in sorted(self.layout.derivations.glob("*.json")):
            try:
                insert_derivation(index, path.stem, parse(path.read_bytes()))
            except InvalidDerivation as error:
                raise StoreCorrupt(
                    f"the record {path} is damaged: {error.message}",
                    remedy="move it away: it only tells how something was built",
                ) from error


def _older_than_a_moment(folder: Path) -> bool:
    """False for a folder that a lease we did not see yet may just have made."""
    try:
        return time.time() - folder.stat().st_ctime > 1
    except FileNotFoundError:
        return False
