"""The store of this host as a page shows it: what lies there, what keeps it, what would be freed.

A read of the disk's own index; the other hosts' stores are seen on their own machines (`mm store`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from django.conf import settings

from deployments.models import User
from deployments.queries import require
from mmadmin.core.store import Root, Store
from mmadmin.core.store.explain import sizes
from mmadmin.core.store.gc import mark
from mmadmin.core.store.graph import all_roots, read_graph


@dataclass(frozen=True, slots=True)
class Shelf:
    """One object with what keeps it."""

    name: str
    size_bytes: int
    own_bytes: int
    """Of files that no other object has."""
    sealed_at: int
    """Unix seconds."""
    keepers: tuple[str, ...]
    """Roots that need it, each once; empty = a collection would free it."""


@dataclass(frozen=True, slots=True)
class Shelves:
    """The whole store."""

    path: str
    shelves: tuple[Shelf, ...]
    """Largest first."""
    roots: tuple[Root, ...]
    total_bytes: int
    """Of distinct files."""
    free_bytes: int
    """On its file system."""
    garbage: tuple[Shelf, ...]
    freeable_bytes: int
    """At least so much a collection would free."""


def shelves(actor: User) -> Shelves:
    """What lies in this host's store. Raises `StoreCorrupt` when a record is damaged."""
    require(actor)
    store = Store(settings.HOME.store)
    graph, roots = read_graph(store), all_roots(store)
    needed = mark(store, graph, roots)
    keepers: dict[str, dict[str, None]] = defaultdict(dict)
    for root in roots:
        label = f"{root.kind} {root.key}"
        for name in graph.closure([root.object]):
            keepers[name][label] = None
    found = tuple(
        sorted(
            (
                Shelf(
                    name=size.name,
                    size_bytes=size.size_bytes,
                    own_bytes=size.own_bytes,
                    sealed_at=graph.sealed_at[size.name],
                    keepers=tuple(keepers[size.name]),
                )
                for size in sizes(store, graph.sealed_at)
            ),
            key=lambda shelf: -shelf.size_bytes,
        )
    )
    garbage = tuple(shelf for shelf in found if shelf.name not in needed)
    return Shelves(
        path=str(store.root),
        shelves=found,
        roots=tuple(roots),
        total_bytes=_distinct_bytes(store),
        free_bytes=store.free_bytes(),
        garbage=garbage,
        freeable_bytes=sum(shelf.own_bytes for shelf in garbage),
    )


def _distinct_bytes(store: Store) -> int:
    """Bytes of the store's files, each counted once however many objects have it."""
    with store.index.read() as index:
        row = index.execute(
            "SELECT COALESCE(SUM(size), 0) FROM"
            " (SELECT DISTINCT sha256, executable, size FROM entry WHERE kind = 'file')"
        ).fetchone()
    return int(row[0])
