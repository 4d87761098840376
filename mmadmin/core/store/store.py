"""One host's store: blobs by digest, objects as trees of hard links, and the commit of both.

An object is complete or absent, whatever kills the process: its files are flushed before they
are linked, its folder appears by one rename, and it counts only once its row is in the index. A
path without a row is garbage; a row without a path is corrupt.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import FixedFile
from mmadmin.core.callbacks import Progress, Report, silent
from mmadmin.core.canonical import canonical
from mmadmin.core.errors import DiskFull, NotFound, StoreCorrupt
from mmadmin.core.store import tree
from mmadmin.core.store.commit import Commit, hash_tree
from mmadmin.core.store.disk import disk_full
from mmadmin.core.store.files import take_blob, write_file
from mmadmin.core.store.gc import make_room
from mmadmin.core.store.ingest import copy_hashing
from mmadmin.core.store.locks import Lease, file_lock
from mmadmin.core.store.records import Realisation, Root, StoreObject
from mmadmin.core.store.rows import insert_derivation, insert_realisation
from mmadmin.core.store.staging import Staging
from mmadmin.core.store.tree import Entry
from mmadmin.core.store.writer import StepHook, Writer

FLOOR_BYTES = 1 << 30
"""What must stay free on the store's disk, unless the caller says otherwise."""


class Store(Writer):
    """One host's store. Cheap to open; safe for many processes and threads at once."""

    def __init__(
        self, root: Path, *, floor_bytes: int = FLOOR_BYTES, after: StepHook = silent
    ) -> None:
        super().__init__(root, floor_bytes=floor_bytes, after=after)

    # --- room and attempts ---------------------------------------------------------------------

    @contextmanager
    def reserve(
        self,
        size_bytes: int,
        *,
        owner: str = "",
        covers: Path | None = None,
        wait_s: float = 0,
        on_wait: Report = silent,
    ) -> Iterator[None]:
        """Reserve disk room (see `Disk.reserve`); raises `DiskFull`.

        Where room is short, garbage is collected first: just as much as is missing.
        """
        owner = owner or f"process {os.getpid()}"
        with ExitStack() as stack:
            try:
                stack.enter_context(self.disk.reserve(size_bytes, owner=owner, covers=covers))
            except DiskFull as refusal:
                on_wait(refusal.message)
                make_room(self, refusal)
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
        staging = Staging(self, self.reserve, folder, lease, inherit)
        staging.out.mkdir(parents=True)
        staging.scratch.mkdir()
        try:
            yield staging
        finally:
            self.remove(folder)
            staging.close()

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
        object_elsewhere: bool = False,
    ) -> None:
        """Write down that a derivation produced an object that is here.

        `object_elsewhere`: the object need not be here; a trusted store attests it.
        """
        with file_lock(self.layout.lock("gc"), shared=True):
            if not object_elsewhere and not self.has_object(realisation.object):
                raise NotFound(f"the store has no object {realisation.object}")
            self.write_realisation(realisation, derivation)
            self.after("recorded")
            with self.index.write() as index:
                insert_realisation(index, realisation)
                if derivation is not None:
                    insert_derivation(index, derivation.digest, derivation.as_json())

    # --- roots ---------------------------------------------------------------------------------

    def add_root(self, kind: str, key: str, object_name: str, reason: str) -> None:
        """Keep an object, and say why; an earlier root of that kind and key is replaced."""
        root = Root(kind, key, object_name, reason)
        path = self.layout.root_file(kind, key)
        path.parent.mkdir(exist_ok=True)
        with file_lock(self.layout.lock("gc"), shared=True):
            if not self.has_object(object_name):
                raise NotFound(f"the store has no object {object_name}")
            try:
                write_file(path, canonical(root.as_json()))
            except OSError as error:
                raise disk_full(error, doing=f"keeping {object_name}") or error from error

    def remove_root(self, kind: str, key: str) -> bool:
        """Stop keeping it; False when there was no such root."""
        try:
            self.layout.root_file(kind, key).unlink()
        except FileNotFoundError:
            return False
        return True

    # --- private -------------------------------------------------------------------------------

    def _keep_files(self, staging: Staging, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            if entry.kind == "file":
                self.keep_blob(staging.out / entry.path, entry.sha256)


def _mismatch(entries: tuple[Entry, ...]) -> Exception:
    return StoreCorrupt("the content is not what its pin says", files=[e.path for e in entries])
