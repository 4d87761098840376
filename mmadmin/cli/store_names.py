"""What the commands of `mm store` share: the store, and how people write names, sizes and spans."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli.tables import Column
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import MmError, NotFound
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from mmadmin.core.store import Store


ObjectName = Annotated[
    str,
    typer.Argument(
        help="An object's name, the beginning of it or of its hash, or a generation (NAME/N).",
        metavar="OBJECT",
    ),
]
ObjectNames = Annotated[
    list[str] | None,
    typer.Argument(
        help="Names, beginnings of names, or generations (NAME/N); else all.", metavar="OBJECT"
    ),
]

HASH, HASH_SHOWN = 64, 12
"""Digits of the hash before an object's own name, and how many of them tables show."""
OBJECT = re.compile(r"[0-9a-f]{64}-.+")
GENERATION = re.compile(r"[a-z0-9][a-z0-9._-]*/[1-9][0-9]*")
SOME = 10
"""So many of them are named when a name fits several."""
SPAN = re.compile(r"(\d+)\s*([smhdw]?)")
SPAN_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
SIZE_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def open_store() -> Store:
    """The store of this machine."""
    from mmadmin.core.store import Store

    return Store(Home.from_env().store)


def short_name(name: str) -> str:
    """`3f1c09ab47d2…-smollm2-135m`: an object's name where there is no room for its hash."""
    return f"{name[:HASH_SHOWN]}…{name[HASH:]}" if OBJECT.fullmatch(name) else name


def object_column(heading: str = "object", *, drop: int = 0) -> Column:
    """A column of objects' names."""
    return Column(heading, whole=True, drop=drop, short=short_name)


def resolve_name(store: Store, text: str) -> str:
    """The one object that is meant: by its name, its own name, or the beginning of either.

    `3f1c…-model`, as narrow tables show it, is taken too, and `NAME/N` for what a generation runs.
    Raises `NotFound`, with those that it could be.
    """
    if GENERATION.fullmatch(text):
        for root in store.roots():
            if (root.kind, root.key) == ("generation", text):
                return root.object
        raise NotFound(
            f"this store keeps nothing for the generation {text}",
            remedy="`mm store roots` lists what is kept",
        )
    names = store.names()
    begin, _, end = text.partition("…")
    matches = [n for n in names if n == text or n[HASH + 1 :] == text] or [
        n for n in names if n.endswith(end) and n.startswith(begin)
    ]
    if not matches and not end:
        matches = [n for n in names if n[HASH + 1 :].startswith(begin)]
    if len(matches) > 1:  # a model and the report about it have the same name
        matches = [name for name in matches if not _is_report(store, name)] or matches
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise NotFound(f"no object is called {text!r}", remedy="`mm store ls` lists them")
    sizes = {found.name: found.size for found in store.objects()}
    some = [f"{short_name(n)} ({bytes_text(sizes.get(n, 0))})" for n in matches[:SOME]]
    raise NotFound(
        f"{len(matches)} objects are called {text!r}",
        remedy=f"name one by the beginning of its hash: {', '.join(some)}",
        candidates=matches[:SOME],
    )


def _is_report(store: Store, name: str) -> bool:
    """True for what a recipe wrote about a model."""
    from mmadmin.core import catalog
    from mmadmin.core.build.rebuild import load_graph

    reports = {kind.report_recipe for kind in catalog.formats().values()}
    for record in store.realisations_of(name):
        try:
            return load_graph(store, record.derivation).recipe in reports
        except MmError:  # it came from elsewhere, without its steps
            continue
    return False


def seconds_of(text: str) -> int:
    """`90`, `30m`, `12h`, `7d`, `2w` in seconds."""
    found = SPAN.fullmatch(text.strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a time span: write 30m, 12h, 7d or 2w")
    return int(found[1]) * SPAN_S[found[2]]


def bytes_of(text: str) -> int:
    """`500M`, `20G`, `20GiB` in bytes (powers of 1024)."""
    found = SIZE.fullmatch(text.strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a size: write 500M, 20G or 1T")
    return int(found[1]) * SIZE_BYTES[found[2].upper()]
