"""Repairing damaged objects: only damaged files are fetched again, from any source that has them.

Damaged bytes are moved to `quarantine/`; everything else is corrected in place.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmadmin.core.callbacks import Report, silent
from mmadmin.core.errors import MmError, StoreCorrupt
from mmadmin.core.store.files import EPOCH, fsync_path, link_or_copy, take_blob
from mmadmin.core.store.ingest import hash_file
from mmadmin.core.store.locks import file_lock
from mmadmin.core.store.records import StoreObject
from mmadmin.core.store.staging import Staging
from mmadmin.core.store.store import Store
from mmadmin.core.store.tree import Entry
from mmadmin.core.store.verify import Verdict, recorded, stat_problems


class BlobSource(Protocol):
    """Somewhere to get good bytes from."""

    @property
    def label(self) -> str:
        """What a person calls it."""
        ...

    def get(self, want: Entry, owner: str, to: Path) -> bool:
        """Write the bytes of `want`, a file of the object `owner`, to the new path `to`.

        False when it does not have them. What it wrote is checked by the caller. May raise an
        `MmError`, which is reported and passed over.
        """
        ...


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair did."""

    repaired: tuple[str, ...]
    """Names of objects that are repaired."""
    blobs: tuple[tuple[str, str], ...]
    """(sha256, where its bytes came from)."""
    failed: tuple[tuple[str, str], ...]
    """(object name, why it could not be repaired)."""

    def as_json(self) -> dict[str, Any]:
        """The result as data."""
        return {
            "repaired": list(self.repaired),
            "blobs": [{"sha256": sha256, "source": source} for sha256, source in self.blobs],
            "failed": [{"name": name, "reason": reason} for name, reason in self.failed],
        }


def repair(
    store: Store,
    damaged: Iterable[Verdict],
    sources: Sequence[BlobSource] = (),
    *,
    report: Report = silent,
) -> Repaired:
    """Repair objects: only damaged files are fetched again, the rest is corrected in place."""
    repaired: list[str] = []
    blobs: list[tuple[str, str]] = []
    failed: dict[str, str] = {}
    left = list(damaged)
    with store.lease("repair") as lease:
        while left:
            failed = {}
            for verdict in left:
                found = recorded(store, verdict.name)
                with (
                    store.lock(f"object-{found.hash}", owner="repair"),
                    store.staging(lease) as staging,
                ):
                    work = _Repair(store, staging, found, sources, report, blobs)
                    problem = work.run({p.path for p in verdict.problems})
                if problem:
                    failed[found.name] = problem
                else:
                    repaired.append(found.name)
                report(f"{found.name}: {problem or 'repaired'}")
            if len(failed) == len(left):
                break
            left = [one for one in left if one.name in failed]  # its inputs may be repaired by now
    return Repaired(tuple(repaired), tuple(blobs), tuple(failed.items()))


@dataclass(slots=True)
class _Repair:
    store: Store
    staging: Staging
    found: StoreObject
    sources: Sequence[BlobSource]
    report: Report
    blobs: list[tuple[str, str]]

    def run(self, wrong: set[str]) -> str:
        """Correct what is wrong, at the paths `wrong`; why it failed, or "" when it is whole."""
        try:
            good = {
                entry.path: self._good_blob(entry)
                for entry in self.found.files
                if entry.kind == "file" and (entry.path in wrong or not self.found.path.is_dir())
            }
            with file_lock(self.store.layout.lock("gc"), shared=True):
                self._rebuild_tree(good)
                self.store.write_record(self.found)
        except MmError as error:
            return error.message
        left = stat_problems(self.store, self.found)
        return left[0].message if left else ""

    def _good_blob(self, entry: Entry) -> Path:
        """The blob's path once its bytes are right, whatever that takes."""
        store = self.store
        blob = store.blob_path(entry.sha256, executable=entry.executable)
        mine = self.found.path / entry.path
        for path in (blob, mine, store.blob_path(entry.sha256, executable=not entry.executable)):
            if _is_good(path, entry):
                return self._install(path, blob, entry)
        self._quarantine(blob, entry)
        for source in self.sources:
            fresh = self.staging.scratch / uuid.uuid4().hex
            try:
                if not source.get(entry, self.found.name, fresh):
                    continue
            except MmError as error:
                self.report(f"{source.label}: {error.message}")
                continue
            if _is_good(fresh, entry):
                self.blobs.append((entry.sha256, source.label))
                self.report(f"{entry.path} of {self.found.name}: restored from {source.label}")
                return self._install(fresh, blob, entry)
            self.report(f"{source.label} gave different bytes for {entry.path}")
        raise StoreCorrupt(
            f"no source has the right bytes of {entry.path} ({entry.sha256[:12]}…)",
            remedy="pull it from another store, or build the generation again",
        )

    def _install(self, path: Path, blob: Path, entry: Entry) -> Path:
        """Make `blob` the good bytes, with the right mode and time."""
        if path != blob:
            fresh = self.staging.scratch / uuid.uuid4().hex
            same_mode = path.parent == self.staging.scratch or path == self.found.path / entry.path
            if same_mode:
                link_or_copy(path, fresh)
            else:
                _copy(path, fresh)
            fresh.chmod(0o555 if entry.executable else 0o444)
            os.utime(fresh, EPOCH)
            fsync_path(fresh)
            blob.parent.mkdir(exist_ok=True)
            fresh.replace(blob)
            fsync_path(blob.parent)
        else:
            blob.chmod(0o555 if entry.executable else 0o444)
            os.utime(blob, EPOCH)
        return blob

    def _quarantine(self, blob: Path, entry: Entry) -> None:
        if blob.exists():
            folder = self.store.layout.quarantine
            folder.mkdir(exist_ok=True)
            blob.rename(folder / f"{entry.sha256}-{uuid.uuid4().hex[:8]}")

    def _rebuild_tree(self, good: dict[str, Path]) -> None:
        """Assemble a new folder beside the old one and swap them."""
        out = self.staging.out
        for entry in self.found.files:
            target = out / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if entry.kind == "dir":
                target.mkdir(exist_ok=True)
            elif entry.kind == "link":
                target.symlink_to(entry.target)
                os.utime(target, EPOCH, follow_symlinks=False)
            else:
                blob = good.get(entry.path) or self.store.blob_path(
                    entry.sha256, executable=entry.executable
                )
                if not take_blob(blob, entry.size, target):
                    raise StoreCorrupt(f"the blob of {entry.path} vanished", remedy="repair again")
        for entry in sorted(self.found.files, reverse=True):
            if entry.kind == "dir":
                (out / entry.path).chmod(0o555)
                os.utime(out / entry.path, EPOCH)
                fsync_path(out / entry.path)
        fsync_path(out)
        if self.found.path.exists() or self.found.path.is_symlink():
            self.store.discard(self.found.path)
        out.rename(self.found.path)
        self.found.path.chmod(0o555)
        os.utime(self.found.path, EPOCH)
        fsync_path(self.found.path)
        fsync_path(self.found.path.parent)


def _is_good(path: Path, entry: Entry) -> bool:
    try:
        if path.stat().st_size != entry.size:
            return False
        return hash_file(path)[0] == entry.sha256
    except OSError:
        return False


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        while block := read.read(1 << 20):
            write.write(block)
