"""The lock: the moving parts of a spec, resolved to commits, digests and sizes.

Made once by `mmadmin.host.resolve` (network), kept with the generation; everything after it works
from the lock alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mmadmin.core.build.recipe import HubSource, IndexSource, Json, PathSource, Source, UrlSource
from mmadmin.core.errors import InvalidInput

LOCK_FORMAT = 1


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

    model: tuple[LockedFile, ...]
    """The model's files, or the one archive that holds it."""
    engine: LockedFile
    """The engine's source archive."""
    mmproj: tuple[LockedFile, ...] = ()
    """Empty when there is none, or when it lies in the model's archive."""
    template: LockedFile | None = None
    """The template file of `template.source = "file"`."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Digest of what each part of the spec asked for: an unchanged question keeps its answer."""
    format: int = LOCK_FORMAT

    @property
    def files(self) -> Sequence[LockedFile]:
        """All of its files."""
        return [*self.model, *self.mmproj, self.engine, *([self.template] if self.template else [])]


_KINDS: Mapping[str, type[HubSource | IndexSource | UrlSource | PathSource]] = {
    "hub": HubSource,
    "index": IndexSource,
    "url": UrlSource,
    "path": PathSource,
}


def source_as_json(source: Source) -> dict[str, Json]:
    """`{"kind": "hub", "repo": …}`."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(source, cls))
    return {"kind": kind, **asdict(source)}


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
        "format": lock.format,
        "model": [file_as_json(f) for f in lock.model],
        "mmproj": [file_as_json(f) for f in lock.mmproj],
        "engine": file_as_json(lock.engine),
        "template": file_as_json(lock.template) if lock.template else None,
        "asked": dict(lock.asked),
    }


def lock_from_json(data: Mapping[str, Any]) -> Lock:
    """The inverse of `lock_as_json`. Raises `InvalidInput`."""
    if data.get("format") != LOCK_FORMAT:
        raise InvalidInput(
            f"the lock has format {data.get('format')!r}, this version reads {LOCK_FORMAT}",
            remedy="make the lock again",
        )
    try:
        return Lock(
            model=tuple(_file(f) for f in data["model"]),
            mmproj=tuple(_file(f) for f in data["mmproj"]),
            engine=_file(data["engine"]),
            template=_file(data["template"]) if data.get("template") else None,
            asked={str(k): str(v) for k, v in data.get("asked", {}).items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"the lock is damaged: {error!r}", remedy="make the lock again"
        ) from error
