"""The commit of an attempt: what becomes an object, step by step.

Hash what is not known → object lock → look again → final modes and times, files flushed → blobs
linked, folders sealed → one rename → record → one index transaction. A process that is killed in
between leaves a path without a row, which is garbage.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.callbacks import Progress, silent
from mmadmin.core.store import tree
from mmadmin.core.store.files import (
    EPOCH,
    fsync_path,
    fsync_paths,
    is_sealed,
    link,
    link_or_copy,
    sealed_mode,
    stamp,
)
from mmadmin.core.store.ingest import hash_file
from mmadmin.core.store.locks import file_lock
from mmadmin.core.store.records import Realisation, StoreObject
from mmadmin.core.store.rows import insert_derivation, insert_object, insert_realisation
from mmadmin.core.store.staging import Staging
from mmadmin.core.store.tree import Entry
from mmadmin.core.store.verify import stat_problems
from mmadmin.core.store.writer import Writer


def hash_tree(
    staging: Staging, known: Mapping[str, str], progress: Progress = silent
) -> tuple[Entry, ...]:
    """The entries of an attempt's output; reads only files whose digest is not known."""
    entries = []
    for found in tree.scan(staging.out):
        if found.kind == "link":
            entries.append(Entry(found.path, "link", target=found.target))
        elif found.kind == "dir":
            entries.append(Entry(found.path, "dir"))
        else:
            path = staging.out / found.path
            sha256 = known.get(found.path) or staging.known(path, found.stat)
            size = found.stat.st_size
            if sha256 is None:
                sha256, size = hash_file(path, progress=progress)
            entries.append(Entry(found.path, executable=found.executable, size=size, sha256=sha256))
    return tuple(entries)


@dataclass(frozen=True, slots=True)
class Commit:
    """One object on its way into the store."""

    store: Writer
    staging: Staging
    name: str
    entries: tuple[Entry, ...]
    refs: tuple[str, ...]
    realise: Callable[[str], Realisation] | None = None
    derivation: Derivation | None = None

    def run(self) -> StoreObject:
        """Make it an object, or take the same one that is there."""
        store = self.store
        with store.lock(f"object-{self.name[:64]}", owner=self.staging.lease.owner):
            gone = store.protect(self.staging.lease, [self.name])
            here = None if gone else store.object(self.name)
            if here is not None and stat_problems(store, here):
                here = None  # damaged: ours takes its place
            if here is None:
                self._canonicalise()
                store.after("flushed")
            with file_lock(store.layout.lock("gc"), shared=True):
                store.after("committing")
                found = self._place() if here is None else self._with_more_refs(here)
                self._describe(found)
        store.after("unlocked")
        return found

    def _place(self) -> StoreObject:
        """Link the files, and let the folder appear by one rename."""
        store = self.store
        self._link_blobs()
        store.after("linked")
        target = store.object_path(self.name)
        if target.exists():  # damaged, or without a row: an earlier attempt was killed
            store.discard(target)
        self.staging.out.rename(target)
        store.after("renamed")
        target.chmod(0o555)
        os.utime(target, EPOCH)
        fsync_path(target)
        size = tree.total_size(self.entries)
        return StoreObject(
            self.name, self.name[:64], size, self.entries, self.refs, target, int(time.time())
        )

    def _with_more_refs(self, here: StoreObject) -> StoreObject:
        """What is there, needing also what this attempt says: the collector errs on keeping."""
        refs = tuple(sorted({*self.refs, *here.refs}))
        return replace(here, refs=refs)

    def _describe(self, found: StoreObject) -> None:
        """Record, realisation, and the one transaction from which on it counts."""
        store = self.store
        store.write_record(found)
        store.after("described")
        realisation = self.realise(self.name) if self.realise else None
        if realisation is not None:
            store.write_realisation(realisation, self.derivation)
            store.after("realised")
        with store.index.write() as index:
            insert_object(index, found)
            if realisation is not None:
                insert_realisation(index, realisation)
            if self.derivation is not None:
                insert_derivation(index, self.derivation.digest, self.derivation.as_json())
        store.after("indexed")

    def _canonicalise(self) -> None:
        """Final modes and times of files and links; the files are flushed."""
        files = []
        for entry in self.entries:
            path = self.staging.out / entry.path
            if entry.kind == "file":
                path.chmod(sealed_mode(executable=entry.executable))
                stamp(path)
                files.append(path)
            elif entry.kind == "link":
                os.utime(path, EPOCH, follow_symlinks=False)
        fsync_paths(files)

    def _link_blobs(self) -> None:
        """Give every file its blob, or take the blob that is there; then seal the folders."""
        folders = set()
        for entry in self.entries:
            if entry.kind != "file":
                continue
            path = self.staging.out / entry.path
            blob = self.store.layout.blob(entry.sha256, executable=entry.executable)
            blob.parent.mkdir(exist_ok=True)
            if _share(path, blob, entry, self.staging.scratch):
                folders.add(blob.parent)
            self.store.after("blob")
        fsync_paths(folders)
        sealed = [self.staging.out]
        for entry in sorted(self.entries, reverse=True):  # inside out
            if entry.kind == "dir":
                path = self.staging.out / entry.path
                path.chmod(0o555)
                os.utime(path, EPOCH)
                sealed.append(path)
        fsync_paths(sealed)


def _share(path: Path, blob: Path, entry: Entry, scratch: Path) -> bool:
    """One inode for the file and its blob; True when the blob is new."""
    try:
        link_or_copy(path, blob)
    except FileExistsError:
        pass
    else:
        return True
    there = blob.stat()
    if os.path.samestat(there, path.stat()):
        return False
    temporary = scratch / uuid.uuid4().hex
    sound = there.st_size == entry.size and is_sealed(there, executable=entry.executable)
    if not sound:  # a damaged blob: ours is right
        link_or_copy(path, temporary)
        temporary.replace(blob)
        return True
    if not link(blob, temporary):
        return False
    # the folder may be read-only for us only after it is sealed, which comes later
    temporary.replace(path)
    return False
