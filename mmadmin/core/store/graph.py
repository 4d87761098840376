"""The store's objects as a graph, and everything that keeps some of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mmadmin.core.store.reader import Reader
from mmadmin.core.store.records import Root
from mmadmin.core.store.runtime import InUse, in_use

Look = Callable[[Path, Path], Iterable[InUse]]
"""Finds what running processes use (`runtime.in_use`)."""

BlobKey = tuple[str, bool]
"""(sha256, executable)."""


@dataclass(slots=True)
class Graph:
    """The store's objects at one moment."""

    sealed_at: dict[str, int] = field(default_factory=dict)
    references: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def closure(self, names: Iterable[str]) -> set[str]:
        """The names and everything that they need; what is not in the store is in it, too."""
        found: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo.extend(self.references.get(name, ()))
        return found


def read_graph(store: Reader) -> Graph:
    """All objects and references, in one transaction."""
    graph = Graph()
    with store.index.snapshot() as index:
        graph.sealed_at.update(index.execute("SELECT name, sealed_at FROM object"))
        for name, target in index.execute("SELECT object, target FROM reference"):
            graph.references[name].append(target)
    return graph


def all_roots(store: Reader, look: Look = in_use) -> list[Root]:
    """Everything that keeps an object, with its reason: asked for, leased, or running."""
    roots = store.roots()
    for lease in store.leases(strict=True):
        roots.extend(
            Root("lease", lease.id, name, f"{lease.owner} (process {lease.holder.pid})")
            for name in sorted(lease.objects)
            if store.has_object(name)
        )
    used = list(look(store.layout.objects, store.layout.blobs))
    owners = _objects_of_blobs(store, {blob for process in used for blob in process.blobs})
    for process in used:
        names = set(process.objects)
        for blob in process.blobs:
            names.update(owners.get(blob, ()))
        roots.extend(
            Root("running", str(process.pid), name, f"used by {process.program}")
            for name in sorted(names)
            if store.has_object(name)
        )
    return roots


def _objects_of_blobs(store: Reader, blobs: set[BlobKey]) -> dict[BlobKey, list[str]]:
    found = {}
    with store.index.read() as index:
        for sha256, executable in blobs:
            found[sha256, executable] = [
                row[0]
                for row in index.execute(
                    "SELECT DISTINCT object FROM entry WHERE sha256 = ? AND executable = ?",
                    (sha256, int(executable)),
                )
            ]
    return found
