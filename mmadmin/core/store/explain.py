"""Who needs an object, and how large it is alone and with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mmadmin.core.errors import NotFound
from mmadmin.core.store.graph import BlobKey, Look, all_roots, read_graph
from mmadmin.core.store.records import Root
from mmadmin.core.store.runtime import in_use
from mmadmin.core.store.store import Store


@dataclass(frozen=True, slots=True)
class Need:
    """One reason why an object is kept: a root, and the way from it to the object."""

    root: Root
    path: tuple[str, ...]
    """Object names, from the root's to the one that was asked for."""

    def as_json(self) -> dict[str, Any]:
        """The reason as data."""
        return {"root": self.root.as_json(), "path": list(self.path)}


def why(store: Store, name: str, *, look: Look = in_use) -> list[Need]:
    """Who needs an object: each root that keeps it, with the shortest way. Empty = collectable."""
    graph = read_graph(store)
    if name not in graph.sealed_at:
        raise NotFound(f"the store has no object {name}", remedy="see `mm store ls`")
    found = []
    for root in all_roots(store, look):
        path = _way(graph.references, root.object, name)
        if path:
            found.append(Need(root, path))
    return found


def _way(references: Mapping[str, list[str]], start: str, end: str) -> tuple[str, ...]:
    """The shortest way along references; empty when there is none."""
    came: dict[str, str] = {start: ""}
    row = [start]
    while row and end not in came:
        below = []
        for name in row:
            for target in references.get(name, ()):
                if target not in came:
                    came[target] = name
                    below.append(target)
        row = below
    if end not in came:
        return ()
    way = [end]
    while came[way[-1]]:
        way.append(came[way[-1]])
    return tuple(reversed(way))


@dataclass(frozen=True, slots=True)
class Size:
    """How large an object is, and how much of that it has alone."""

    name: str
    size_bytes: int
    """Of its distinct files."""
    own_bytes: int
    """Of files that no other object has: what would be freed without it."""


def sizes(store: Store, names: Iterable[str]) -> list[Size]:
    """Shared and own bytes of objects; a file that is there twice counts once."""
    users: dict[BlobKey, set[str]] = defaultdict(set)
    files: dict[str, dict[BlobKey, int]] = defaultdict(dict)
    with store.index.read() as index:
        for name, sha256, executable, size in index.execute(
            "SELECT object, sha256, executable, size FROM entry WHERE kind = 'file'"
        ):
            users[sha256, bool(executable)].add(name)
            files[name][sha256, bool(executable)] = size
    return [
        Size(
            name,
            sum(files[name].values()),
            sum(size for key, size in files[name].items() if users[key] == {name}),
        )
        for name in names
    ]
