"""Garbage collection: freeing what no root needs.

Roots are what was asked to be kept (generations, pins), what living leases protect, and what
running processes use. Everything that a root needs is marked in one transaction; the rest is moved
to `trash/` while builds are held off for that moment, and unlinked afterwards, beside them. A
record that cannot be trusted stops the collection before anything is freed.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmadmin.core.callbacks import Report, silent
from mmadmin.core.errors import DiskFull, StoreCorrupt
from mmadmin.core.store.disk import BLOCK_BYTES
from mmadmin.core.store.expired_files import (
    find_expired,
    last_links,
    remove_expired,
    remove_free_locks,
)
from mmadmin.core.store.files import HALF_WRITTEN, unlink_tree
from mmadmin.core.store.graph import BlobKey, Graph, Look, all_roots, read_graph
from mmadmin.core.store.layout import is_sha256
from mmadmin.core.store.locks import file_lock
from mmadmin.core.store.records import Root
from mmadmin.core.store.rows import remove_objects
from mmadmin.core.store.runtime import in_use
from mmadmin.core.store.stale_records import delete_records, stale_records, unused_derivations
from mmadmin.core.store.writer import Writer


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection freed, or would free."""

    dry_run: bool
    objects: tuple[str, ...]
    """Names, in the order in which they went."""
    blobs: int
    freed_bytes: int
    """Of the disk; a file that something else still links frees nothing."""
    kept_objects: int
    roots: tuple[Root, ...]
    seconds: float
    expired: int = 0
    """Old build logs, quarantined files and abandoned downloads that were removed."""
    realisations: int = 0
    """Records of steps that were removed, because nothing that is kept was made from them."""

    def as_json(self) -> dict[str, Any]:
        """The report as data."""
        return {
            "dry_run": self.dry_run,
            "objects": list(self.objects),
            "blobs": self.blobs,
            "freed_bytes": self.freed_bytes,
            "kept_objects": self.kept_objects,
            "roots": [root.as_json() for root in self.roots],
            "seconds": round(self.seconds, 3),
            "expired": self.expired,
            "realisations": self.realisations,
        }


def mark(store: Writer, graph: Graph, roots: Iterable[Root]) -> set[str]:
    """The names of everything that the roots need; `StoreCorrupt` when a record is not sound.

    A root or a kept object that names something which is not here, and a kept object whose record
    is damaged or disagrees with the index, stop the collection.
    """
    for root in roots:
        if root.object not in graph.sealed_at:
            raise StoreCorrupt(
                f"the {root.kind} root {root.key} keeps {root.object}, which is not in the store",
                remedy="rebuild it, or remove the root, before anything is collected",
                object=root.object,
            )
    live = graph.closure(root.object for root in roots)
    for name in sorted(live):
        if name not in graph.sealed_at:
            raise StoreCorrupt(
                f"something that is kept needs {name}, which is not in the store",
                remedy="repair it with `mm store repair` before anything is collected",
                object=name,
            )
        _check_record(store, name, graph.references.get(name, ()))
    return live


def _check_record(store: Writer, name: str, references: Iterable[str]) -> None:
    """The record beside a kept object must say what the index says."""
    try:
        with open(store.layout.sidecar(name), "rb") as file:  # noqa: PTH123 (ten thousand of them)
            record = json.load(file)
        sound = record["name"] == name and sorted(record["refs"]) == sorted(references)
        sound = sound and os.path.isdir(store.layout.object(name))  # noqa: PTH112 (the same)
    except (OSError, ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise StoreCorrupt(
            f"the record of {name} is missing, damaged, or disagrees with the index",
            remedy="repair it with `mm store repair` before anything is collected",
            object=name,
        )


def collect(
    store: Writer,
    *,
    dry_run: bool = False,
    older_than_s: float = 0,
    max_free_bytes: int | None = None,
    look: Look = in_use,
    on_wait: Report = silent,
    now: float | None = None,
    expire_after_s: float | None = None,
) -> Collected:
    """Free what no root needs; one collection at a time, beside builds.

    `older_than_s` leaves what was sealed more recently, with all that it needs. `max_free_bytes`
    stops once so much is freed: oldest first, and never something that a left object needs. Build
    logs, quarantined files and unfinished downloads are removed when they were not touched for
    `expire_after_s` (by default `expired_files.DEFAULTS_S`). Raises `StoreCorrupt` before anything
    is freed when a record is not sound.
    """
    begin = time.monotonic()
    clock = time.time() if now is None else now
    recent = clock - older_than_s if older_than_s else math.inf
    expired = find_expired(store, clock, expire_after_s)
    if dry_run:
        graph, roots, dead = _dead(store, look, recent)
        chosen = _choose(store, graph, dead, max_free_bytes)
        blobs = _loose_blobs(store, without=set(chosen), recent=recent)
        stale = _stale(store, graph, chosen, max_free_bytes, recent)
        freed = _would_free(store, chosen, blobs) + sum(map(last_links, expired))
    else:
        with file_lock(store.layout.lock("collector"), on_wait=on_wait):
            store.sweep()
            _empty_trash(store)
            expired, freed = remove_expired(store, expired)
            with file_lock(store.layout.lock("gc"), on_wait=on_wait):
                graph, roots, dead = _dead(store, look, recent)
                chosen = _choose(store, graph, dead, max_free_bytes)
                blobs = _loose_blobs(store, without=set(chosen), recent=recent)
                stale = _stale(store, graph, chosen, max_free_bytes, recent)
                derivations = unused_derivations(store, stale, recent)
                freed += _remove_objects(store, chosen, blobs)
                _remove_garbage(store)
                delete_records(store, stale, derivations)
            store.after("trashed")
            freed += _empty_trash(store)
            with file_lock(store.layout.lock("gc"), on_wait=on_wait):
                blobs = _discard_unused(store, blobs)
            store.after("blobs trashed")
            remove_free_locks(store)
            freed += _empty_trash(store)
    return Collected(
        dry_run=dry_run,
        objects=tuple(chosen),
        blobs=len(blobs),
        freed_bytes=freed,
        kept_objects=len(graph.sealed_at) - len(chosen),
        roots=tuple(roots),
        seconds=time.monotonic() - begin,
        expired=len(expired),
        realisations=len(stale),
    )


def make_room(store: Writer, refusal: DiskFull) -> None:
    """Collect just what a refused reservation lacked (what `Store.reserve` does)."""
    lacking = (
        refusal.details["need_bytes"]
        + refusal.details["promised_bytes"]
        + refusal.details["floor_bytes"]
        - refusal.details["have_bytes"]
    )
    collect(store, max_free_bytes=max(1, lacking))


def _dead(store: Writer, look: Look, recent: float) -> tuple[Graph, list[Root], set[str]]:
    """The graph, the roots, and the objects that neither a root nor anything recent needs."""
    roots = all_roots(store, look)
    graph = read_graph(store)
    live = mark(store, graph, roots)
    young = [name for name, at in graph.sealed_at.items() if name not in live and at > recent]
    return graph, roots, set(graph.sealed_at) - live - graph.closure(young)


def _choose(store: Writer, graph: Graph, dead: set[str], max_free_bytes: int | None) -> list[str]:
    """Dead objects in the order in which they may go: users before what they need, oldest first."""
    users: dict[str, int] = dict.fromkeys(dead, 0)
    for name in dead:
        for target in graph.references.get(name, ()):
            if target in users and target != name:
                users[target] += 1
    links = _links(store, dead) if max_free_bytes is not None else None
    ready = [(graph.sealed_at[name], name) for name, count in users.items() if not count]
    heapq.heapify(ready)
    chosen: list[str] = []
    freed = 0
    while ready and (max_free_bytes is None or freed < max_free_bytes):
        _, name = heapq.heappop(ready)
        chosen.append(name)
        freed += _counted_out(links, name)
        for target in graph.references.get(name, ()):
            if target in users and target != name:
                users[target] -= 1
                if users[target] == 0:
                    heapq.heappush(ready, (graph.sealed_at[target], target))
    return chosen


@dataclass(slots=True)
class _Links:
    """Which blobs dead objects use, and how many objects use each blob."""

    users: dict[BlobKey, int] = field(default_factory=lambda: defaultdict(int))
    size: dict[BlobKey, int] = field(default_factory=dict)
    blobs: dict[str, list[BlobKey]] = field(default_factory=lambda: defaultdict(list))


def _links(store: Writer, dead: set[str]) -> _Links:
    links = _Links()
    with store.index.read() as index:
        rows = index.execute(
            "SELECT object, sha256, executable, size FROM entry WHERE kind = 'file'"
            " GROUP BY object, sha256, executable"
        )
        for name, sha256, executable, size in rows:
            key = (sha256, bool(executable))
            links.users[key] += 1
            links.size[key] = size
            if name in dead:
                links.blobs[name].append(key)
    return links


def _counted_out(links: _Links | None, name: str) -> int:
    """Bytes whose last user is this object."""
    freed = 0
    if links is None:
        return 0
    for key in links.blobs[name]:
        links.users[key] -= 1
        if links.users[key] == 0:
            freed += links.size[key]
    return freed


def _stale(
    store: Writer, graph: Graph, chosen: Iterable[str], max_free_bytes: int | None, recent: float
) -> list[str]:
    """Records of steps that lead to nothing once `chosen` are removed.

    A collection that only makes room leaves them: a build waits for it, and they are small.
    """
    if max_free_bytes is not None:
        return []
    return stale_records(store, graph.sealed_at.keys() - set(chosen), recent)


def _remove_objects(store: Writer, names: list[str], blobs: Iterable[Path]) -> int:
    """Rows first, in one transaction: from then on the objects do not exist.

    Only on a disk that is too full to write that are their files removed first; returns their
    bytes. If it is killed there, rows without a folder remain, which the next collection removes.
    """
    freed = 0
    try:
        _remove_rows(store, names)
    except DiskFull:
        freed = _unlink([*map(store.layout.object, names), *blobs])
        store.after("unlinked")
        _remove_rows(store, names)
    store.after("rows removed")
    for name in names:
        store.layout.sidecar(name).unlink(missing_ok=True)
        store.after("record removed")
        try:
            store.discard(store.layout.object(name))
        except FileNotFoundError:
            continue
        store.after("object trashed")
    return freed


def _remove_rows(store: Writer, names: Iterable[str]) -> None:
    with store.index.write() as index:
        remove_objects(index, names)


def _remove_garbage(store: Writer) -> None:
    """What killed commits and collections left: paths without a row, records half written."""
    with store.index.read() as index:
        known = {row[0] for row in index.execute("SELECT name FROM object")}
    with os.scandir(store.layout.objects) as items:
        for item in items:
            if item.name.removesuffix(".json") not in known and item.name not in known:
                store.discard(Path(item.path))
    records = store.layout.derivations
    for folder in (records, records / "realised", *store.layout.roots.iterdir()):
        for path in folder.glob(HALF_WRITTEN):  # their writers hold the collector off
            path.unlink(missing_ok=True)


def _loose_blobs(store: Writer, *, without: set[str], recent: float) -> list[Path]:
    """Blobs that no object uses once `without` are gone.

    One that came on its own (a pin that did not fit) and later than `recent` is left.
    """
    used: set[BlobKey] = set()
    dropped: set[BlobKey] = set()
    with store.index.read() as index:
        for name, sha256, executable in index.execute(
            "SELECT object, sha256, executable FROM entry WHERE kind = 'file'"
        ):
            (dropped if name in without else used).add((sha256, bool(executable)))
    found = []
    for path, key in _blobs(store):
        if key not in used and (key in dropped or path.stat().st_ctime <= recent):
            found.append(path)
    return found


def _blobs(store: Writer) -> Iterator[tuple[Path, BlobKey]]:
    for folder in sorted(store.layout.blobs.iterdir()):
        with os.scandir(folder) as items:
            for item in items:
                if is_sha256(item.name[:64]):
                    yield Path(item.path), (item.name[:64], item.name.endswith("-x"))


def _discard_unused(store: Writer, blobs: Iterable[Path]) -> list[Path]:
    """Discard blobs unless a build took one up since it was listed."""
    gone = []
    for path in blobs:
        key = (path.name[:64], int(path.name.endswith("-x")))
        used = store.index.row(
            "SELECT 1 FROM entry WHERE sha256 = ? AND executable = ? LIMIT 1", key
        )
        if used is None:
            with suppress(FileNotFoundError):  # removed before the rows
                store.discard(path)
            gone.append(path)
    return gone


def _would_free(store: Writer, chosen: Iterable[str], blobs: Iterable[Path]) -> int:
    """Bytes of the disk that vanish with these objects and blobs."""
    links: dict[int, int] = defaultdict(int)
    for name in chosen:
        found = store.object(name)
        for entry in found.files if found else ():
            if found and entry.kind == "file":
                links[(found.path / entry.path).stat().st_ino] += 1
    freed = 0
    for path in blobs:
        info = path.stat()
        if info.st_nlink <= 1 + links[info.st_ino]:
            freed += info.st_blocks * BLOCK_BYTES
    return freed


def _empty_trash(store: Writer) -> int:
    """Unlink what lies in the trash; bytes whose last link went."""
    return _unlink(list(store.layout.trash.iterdir()))


def _unlink(paths: Iterable[Path]) -> int:
    """Unlink files and folders; bytes whose last link went."""
    freed = 0
    for path in paths:
        freed += last_links(path)
        unlink_tree(path)
    return freed
