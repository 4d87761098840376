"""The lock: the moving parts of a spec, resolved to commits, digests and sizes.

Made once by `mmadmin.host.resolve` (network), kept with the generation; everything after it works
from the lock alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mmadmin.core.build.recipe import HubSource, IndexSource, Json, PathSource, Source, UrlSource
from mmadmin.core.errors import InvalidInput

LOCK_FORMAT = 2
FIRST_LISTS = ("model", "mmproj", "engine", "template")
"""What a lock of format 1 held: each a list, one file or nothing."""


@dataclass(frozen=True, slots=True)
class LockedFile:
    """One file by content, and where it can be had."""

    path: str
    """Its relative path inside the fetched object."""
    sha256: str
    size: int
    source: Source


@dataclass(frozen=True, slots=True)
class Lock:
    """Everything that a spec's sources resolved to."""

    pins: Mapping[str, tuple[LockedFile, ...]]
    """Lists of files by name, as the engine asked for them (`PinRequest`)."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Digest of what each part of the spec asked for: an unchanged question keeps its answer."""
    interpreters: Mapping[str, str] = field(default_factory=dict)
    """Of each list that is a Python environment, the interpreter that its wheels are for."""

    @property
    def files(self) -> list[LockedFile]:
        """All of its files."""
        return [file for files in self.pins.values() for file in files]

    def of(self, name: str) -> tuple[LockedFile, ...]:
        """The files of that name; empty = there are none."""
        return self.pins.get(name, ())

    def one(self, name: str) -> LockedFile:
        """The first file of that name. Raises `InvalidInput` when there is none."""
        if not self.of(name):
            raise InvalidInput(f"the lock names no {name} file", remedy="make the lock again")
        return self.of(name)[0]


_KINDS: Mapping[str, type[HubSource | IndexSource | UrlSource | PathSource]] = {
    "hub": HubSource,
    "index": IndexSource,
    "url": UrlSource,
    "path": PathSource,
}


def source_as_json(source: Source) -> dict[str, Json]:
    """`{"kind": "hub", "repo": …}`."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(source, cls))
    values = {k: v for k, v in asdict(source).items() if v or k != "secret"}
    return {"kind": kind, **values}


def source_from_json(data: Mapping[str, Any]) -> Source:
    """The inverse of `source_as_json`. Raises `InvalidInput`."""
    values = dict(data)
    kind = str(values.pop("kind", ""))
    if kind not in _KINDS:
        raise InvalidInput(
            f'a source of kind "{kind}" is unknown', remedy=f"known: {', '.join(_KINDS)}"
        )
    try:
        return _KINDS[kind](**values)
    except TypeError as error:
        raise InvalidInput(
            f'a source of kind "{kind}" has other fields: {error}', remedy="make the lock again"
        ) from error


def file_as_json(file: LockedFile) -> dict[str, Json]:
    """A locked file as it stands in a lock and in a fetch step's params."""
    return {
        "path": file.path,
        "sha256": file.sha256,
        "size": file.size,
        "source": source_as_json(file.source),
    }


def _file(data: Mapping[str, Any]) -> LockedFile:
    return LockedFile(
        path=str(data["path"]),
        sha256=str(data["sha256"]),
        size=int(data["size"]),
        source=source_from_json(data["source"]),
    )


def lock_as_json(lock: Lock) -> dict[str, Json]:
    """The lock as data for the record."""
    return {
        "format": LOCK_FORMAT,
        "pins": {name: [file_as_json(f) for f in files] for name, files in lock.pins.items()},
        "asked": dict(lock.asked),
        **({"interpreters": dict(lock.interpreters)} if lock.interpreters else {}),
    }


def lock_from_json(data: Mapping[str, Any]) -> Lock:
    """The inverse of `lock_as_json`; reads format 1 too. Raises `InvalidInput`."""
    known = data.get("format")
    if known not in (1, LOCK_FORMAT):
        raise InvalidInput(
            f"the lock has format {known!r}, this version reads {LOCK_FORMAT}",
            remedy="make the lock again",
        )
    try:
        lists = data["pins"] if known == LOCK_FORMAT else {n: data[n] for n in FIRST_LISTS}
        return Lock(
            pins={
                str(name): tuple(_file(f) for f in (files if isinstance(files, list) else [files]))
                for name, files in lists.items()
                if files
            },
            asked={str(k): str(v) for k, v in data.get("asked", {}).items()},
            interpreters={str(k): str(v) for k, v in data.get("interpreters", {}).items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"the lock is damaged: {error!r}", remedy="make the lock again"
        ) from error
