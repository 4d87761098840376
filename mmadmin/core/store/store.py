"""One host's store: blobs by digest, objects as trees of hard links, and the commit of both.

An object is complete or absent, whatever kills the process: its files are flushed before they
are linked, its folder appears by one rename, and it counts only once its row is in the index. A
path without a row is garbage; a row without a path is corrupt.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import FixedFile
from mmadmin.core.canonical import canonical, parse
from mmadmin.core.errors import DiskFull, InvalidDerivation, NotFound, StoreCorrupt
from mmadmin.core.store import tree
from mmadmin.core.store.commit import Commit, hash_tree
from mmadmin.core.store.disk import Disk, disk_full
from mmadmin.core.store.files import fsync_path, stamp, take_blob, unlink_tree, write_file
from mmadmin.core.store.index import TABLES
from mmadmin.core.store.ingest import Progress, copy_hashing, silent
from mmadmin.core.store.locks import (
    REPORT_EVERY_S,
    Lease,
    WaitHook,
    file_lock,
    lease_in,
    no_wait,
    sweep_leases,
)
from mmadmin.core.store.reader import Reader
from mmadmin.core.store.records import (
    Realisation,
    Root,
    StoreObject,
    read_realisation,
    read_record,
)
from mmadmin.core.store.rows import (
    insert_derivation,
    insert_object,
    insert_realisation,
)
from mmadmin.core.store.staging import Staging
from mmadmin.core.store.tree import Entry

FLOOR_BYTES = 1 << 30
"""What must stay free on the store's disk, unless the caller says otherwise."""

StepHook = Callable[[str], None]
"""Called after each step of a commit, by name."""


def no_step(step: str) -> None:
    """Go on."""


RoomHook = Callable[["Store", DiskFull], None]
"""Called when a promise of room is refused, before it is asked for once more."""


def collect_for(store: Store, refusal: DiskFull) -> None:
    """Collect what nobody needs, just as much as the refused promise lacked."""
    from mmadmin.core.store.gc import make_room  # noqa: PLC0415 (it builds on this module)

    make_room(store, refusal)


class Store(Reader):
    """One host's store. Cheap to open; safe for many processes and threads at once."""

    def __init__(
        self,
        root: Path,
        *,
        floor_bytes: int = FLOOR_BYTES,
        after: StepHook = no_step,
        make_room: RoomHook = collect_for,
    ) -> None:
        super().__init__(root)
        self.layout.create()
        self.after = after
        self.make_room = make_room
        self.disk = Disk(self.root, self.layout.reservations, self.layout.lock("disk"), floor_bytes)
        self.index.prepare(self._fill)

    def close(self) -> None:
        """Close this thread's connection to the index."""
        self.index.close()

    def free_bytes(self) -> int:
        """Free bytes on the store's file system."""
        return self.disk.free_bytes()

    def usable_bytes(self) -> int:
        """The same, less what must stay free."""
        return max(0, self.free_bytes() - self.disk.floor_bytes)

    # --- claiming ------------------------------------------------------------------------------

    @contextmanager
    def lease(self, owner: str) -> Iterator[Lease]:
        """A claim of this process: what it protects is not collected while the process lives.

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
            return [name for name in names if not self.has_object(name)]

    @contextmanager
    def lock(
        self,
        key: str,
        *,
        on_wait: WaitHook = no_wait,
        tell_every_s: float = REPORT_EVERY_S,
        owner: str = "",
    ) -> Iterator[int]:
        """Hold the named lock (see `file_lock`); yields a descriptor for children to inherit."""
        path = self.layout.lock(key)
        with file_lock(path, on_wait=on_wait, tell_every_s=tell_every_s, owner=owner) as fd:
            yield fd

    @contextmanager
    def reserve(
        self,
        size_bytes: int,
        *,
        owner: str = "",
        covers: Path | None = None,
        wait_s: float = 0,
        on_wait: WaitHook = no_wait,
    ) -> Iterator[None]:
        """Hold a promise of disk room (see `Disk.reserve`); raises `DiskFull`.

        Where room is short, what nobody needs is collected first, just as much as is short.
        """
        owner = owner or f"process {os.getpid()}"
        with ExitStack() as stack:
            try:
                stack.enter_context(self.disk.reserve(size_bytes, owner=owner, covers=covers))
            except DiskFull as refusal:
                on_wait(refusal.message)
                self.make_room(self, refusal)
                stack.enter_context(
                    self.disk.reserve(
                        size_bytes, owner=owner, covers=covers, wait_s=wait_s, on_wait=on_wait
                    )
                )
            self.after("reserved")
            yield

    @contextmanager
    def staging(self, lease: Lease, *, inherit: tuple[int, ...] = ()) -> Iterator[Staging]:
        """A private attempt folder with an empty `out` and `scratch`; removed at the end."""
        folder = self.layout.staging / f"{lease.id}-{uuid.uuid4().hex[:8]}"
        staging = Staging(self, folder, lease, inherit)
        staging.out.mkdir(parents=True)
        staging.scratch.mkdir()
        try:
            yield staging
        finally:
            self.remove(folder)
            staging.close()

    def sweep(self) -> None:
        """Clear away what dead processes left behind."""
        sweep_leases(self.layout.leases)
        living = {lease.id for lease in self.leases()}
        for folder in self.layout.staging.iterdir():
            if folder.name.rpartition("-")[0] not in living and _older_than_a_moment(folder):
                self.remove(folder)
        self.disk.reservations()

    # --- bringing in ---------------------------------------------------------------------------

    def ingest(
        self, source: Path, staging: Staging, path: str, *, progress: Progress = silent
    ) -> str:
        """Copy a file into the attempt's `out`, hashing it on the way; its sha256.

        Reserves the room first; a partial copy is removed. Raises `DiskFull`.
        """
        target = staging.out / tree.check_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        info = source.stat()
        with self.reserve(min(info.st_size, info.st_blocks * 512), owner=staging.lease.owner):
            try:
                sha256, _ = copy_hashing(source, target, progress=progress)
            except OSError as error:
                target.unlink(missing_ok=True)
                raise disk_full(error, doing=f"copying {path}") or error from error
        staging.hashed(target, sha256)
        return sha256

    def keep_blob(
        self, path: Path, sha256: str, *, executable: bool = False, stay: bool = False
    ) -> None:
        """Move a file's bytes into the store under their true digest, for whoever wants them.

        With `stay` the file is linked instead, so that no collection can come in between.
        """
        path.chmod(0o555 if executable else 0o444)
        stamp(path)
        fsync_path(path)
        with file_lock(self.layout.lock("gc"), shared=True):
            blob = self.layout.blob(sha256, executable=executable)
            blob.parent.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                os.link(path, blob)
                fsync_path(blob.parent)
            if not stay:
                path.unlink()

    def assemble(
        self,
        files: Sequence[FixedFile],
        staging: Staging,
    ) -> bool:
        """Fill the attempt's `out` from blobs that are here; False when one is missing."""
        linked: list[Path] = []
        for file in files:
            blob = self.layout.blob(file.sha256, executable=file.executable)
            target = staging.out / tree.check_path(file.path)
            if not take_blob(blob, file.size, target):
                for path in linked:
                    path.unlink()
                return False
            linked.append(target)
            staging.hashed(target, file.sha256)
        return True

    def seal(
        self,
        staging: Staging,
        name: str,
        *,
        refs: Iterable[str] = (),
        known: Mapping[str, str] | None = None,
        expect: str | None = None,
        realise: Callable[[str], Realisation] | None = None,
        derivation: Derivation | None = None,
        on_mismatch: Callable[[tuple[Entry, ...]], Exception] | None = None,
        progress: Progress = silent,
    ) -> StoreObject:
        """Commit the attempt's `out` as an object; the same content twice is one object.

        `known` and `staging.hashed` spare reading; `expect` is the object's name where it is
        pinned: when it comes out otherwise the files are kept as blobs and `on_mismatch` makes
        the error. `realise` makes the realisation's record from the object's name; it goes into
        the same index transaction. The object stays protected by the attempt's lease.
        """
        try:
            entries = hash_tree(staging, known or {}, progress)
            self.after("hashed")
            full = tree.object_name(entries, name)
            if expect is not None and full != expect:
                self._keep_files(staging, entries)
                raise (on_mismatch or _mismatch)(entries)
            needs = tuple(sorted(set(refs)))
            return Commit(self, staging, full, entries, needs, realise, derivation).run()
        except OSError as error:
            raise disk_full(error, doing=f"sealing {name}") or error from error

    def record(
        self,
        realisation: Realisation,
        derivation: Derivation | None = None,
        *,
        only_claimed: bool = False,
    ) -> None:
        """Write down that a derivation produced an object that is here.

        `only_claimed`: the object need not be here; a trusted store says so.
        """
        with file_lock(self.layout.lock("gc"), shared=True):
            if not only_claimed and not self.has_object(realisation.object):
                raise NotFound(f"the store has no object {realisation.object}")
            self.write_realisation(realisation, derivation)
            self.after("recorded")
            with self.index.write() as index:
                insert_realisation(index, realisation)
                if derivation is not None:
                    insert_derivation(index, derivation.digest, derivation.as_json())

    def copy_object_from(
        self, other: Store, name: str, lease: Lease, *, progress: Progress = silent
    ) -> StoreObject:
        """Take an object of another store of this machine: linked where the file system allows.

        Copied bytes are checked against the record. References must be here already.
        """
        found = other.object(name)
        if found is None:
            raise NotFound(f"{other.root} has no object {name}")
        missing = [ref for ref in found.refs if ref != name and not self.has_object(ref)]
        if missing:
            raise NotFound(f"{name} needs {missing[0]}, which is not here yet")
        if (here := self.object(name)) is not None and not self.protect(lease, [name]):
            return here
        with self.staging(lease) as staging:
            for entry in found.files:
                self._copy_entry(found.path, entry, staging, progress)
            return self.seal(staging, name[len(found.hash) + 1 :], refs=found.refs, expect=name)

    # --- roots ---------------------------------------------------------------------------------

    def add_root(self, kind: str, key: str, object_name: str, reason: str) -> None:
        """Keep an object, and say why; an earlier root of that kind and key is replaced."""
        root = Root(kind, key, object_name, reason)
        path = self.layout.root_file(kind, key)
        path.parent.mkdir(exist_ok=True)
        with file_lock(self.layout.lock("gc"), shared=True):
            if not self.has_object(object_name):
                raise NotFound(f"the store has no object {object_name}")
            write_file(path, canonical(root.as_json()))

    def remove_root(self, kind: str, key: str) -> bool:
        """Stop keeping it; False when there was no such root."""
        try:
            self.layout.root_file(kind, key).unlink()
        except FileNotFoundError:
            return False
        return True

    # --- the index -----------------------------------------------------------------------------

    def reindex(self) -> int:
        """Rebuild the index from the sidecars; the number of objects. Refuses damaged sidecars."""
        with file_lock(self.layout.lock("gc")), self.index.write() as index:
            for table in TABLES:
                index.execute(f"DELETE FROM {table}")  # noqa: S608 (a constant)
            self._fill(index)
        return len(self.names())

    # --- private -------------------------------------------------------------------------------

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

    def _keep_files(self, staging: Staging, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            if entry.kind == "file":
                self.keep_blob(staging.out / entry.path, entry.sha256)

    def _copy_entry(self, source: Path, entry: Entry, staging: Staging, progress: Progress) -> None:
        target = staging.out / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if entry.kind == "dir":
            target.mkdir(exist_ok=True)
        elif entry.kind == "link":
            target.symlink_to(entry.target)
        else:
            try:
                os.link(source / entry.path, target)
            except OSError:  # another file system: copy, and check
                self.ingest(source / entry.path, staging, entry.path, progress=progress)
                if entry.executable:
                    target.chmod(0o555)
                return
            staging.hashed(target, entry.sha256)

    def write_realisation(self, realisation: Realisation, derivation: Derivation | None) -> None:
        """Write the files that say how an object came about; the index is the caller's."""
        if derivation is not None:
            path = self.layout.derivation(derivation.digest)
            if not path.exists():
                write_file(path, canonical(derivation.as_json()))
        write_file(
            self.layout.realisation(realisation.resolved_key), canonical(realisation.as_json())
        )

    def rewrite_record(self, found: StoreObject) -> None:
        """Write the record beside an object anew."""
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


def _mismatch(entries: tuple[Entry, ...]) -> Exception:
    return StoreCorrupt("the content is not what its pin says", files=[e.path for e in entries])


def _older_than_a_moment(folder: Path) -> bool:
    """False for a folder that a lease we did not see yet may just have made."""
    try:
        return time.time() - folder.stat().st_ctime > 1
    except FileNotFoundError:
        return False
