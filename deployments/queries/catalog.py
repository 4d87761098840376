"""The catalog: deployment files that come with mmadmin, to begin with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import deployments
from deployments.models import User
from deployments.queries.paging import require

CATALOG = Path(deployments.__file__).parent / "catalog"


class Entry(NamedTuple):
    """One ready deployment file."""

    slug: str
    title: str
    about: str
    text: str


def catalog(actor: User) -> tuple[Entry, ...]:
    """The deployment files that come with mmadmin, by file name."""
    require(actor)
    return _entries()


@cache
def _entries() -> tuple[Entry, ...]:
    import tomllib

    entries = []
    for path in sorted(CATALOG.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
        title = str(document.get("name", path.stem))
        entries.append(Entry(path.stem, title, str(document.get("description", "")), text))
    return tuple(entries)
