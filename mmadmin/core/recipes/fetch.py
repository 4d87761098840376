"""`fetch`: files pinned by sha256 and size, from wherever they can be had.

params: `{"files": [{"path", "sha256", "size", "source": {...}, "executable"?: true}]}`.
A source is one of `{"kind": "hub", "repo", "revision" (40 hex), "path"}`,
`{"kind": "index", "project", "version", "filename"}`, `{"kind": "url", "url", "secret"?: name}`,
`{"kind": "path", "path"}`. Output: the files at their paths; known before anything is fetched, so
another source for the same bytes gives the same object.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.params import (
    at_path,
    fields,
    flag,
    items,
    number,
    refuse,
    relative_path,
    table,
    text,
)
from mmadmin.core.build.recipe import (
    Determinism,
    FixedFile,
    HubSource,
    IndexSource,
    Json,
    Params,
    PathSource,
    Recipe,
    Source,
    Toolbox,
    UrlSource,
)

SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")


def _hub(value: Mapping[str, Json], where: str) -> Source:
    fields(value, where, required=("kind", "repo", "revision", "path"))
    revision = text(value, "revision", where)
    if not COMMIT.fullmatch(revision):
        refuse(f"{where}.revision", revision, "a 40-hex commit")
    return HubSource(text(value, "repo", where), revision, text(value, "path", where))


def _index(value: Mapping[str, Json], where: str) -> Source:
    fields(value, where, required=("kind", "project", "version", "filename"))
    return IndexSource(
        text(value, "project", where), text(value, "version", where), text(value, "filename", where)
    )


def _url(value: Mapping[str, Json], where: str) -> Source:
    fields(value, where, required=("kind", "url"), optional=("secret",))
    url = text(value, "url", where)
    if not url.startswith(("https://", "http://", "file://")):
        refuse(f"{where}.url", url, "an http, https or file address")
    return UrlSource(url, text(value, "secret", where) if "secret" in value else "")


def _path(value: Mapping[str, Json], where: str) -> Source:
    fields(value, where, required=("kind", "path"))
    path = text(value, "path", where)
    if not path.startswith("/"):
        refuse(f"{where}.path", path, "an absolute path")
    return PathSource(path)


SOURCES: Mapping[str, Callable[[Mapping[str, Json], str], Source]] = {
    "hub": _hub,
    "index": _index,
    "url": _url,
    "path": _path,
}


def source_from_json(value: Json, where: str = "source") -> Source:
    """Read one source; raises `InvalidDerivation` naming the field."""
    source = table(value, where)
    kind = source.get("kind")
    if kind not in SOURCES:
        refuse(f"{where}.kind", kind, f"one of {', '.join(SOURCES)}")
    return SOURCES[str(kind)](source, where)


def _file(value: Json, where: str) -> tuple[FixedFile, Source]:
    file = table(value, where)
    fields(file, where, required=("path", "sha256", "size", "source"), optional=("executable",))
    sha256 = text(file, "sha256", where)
    if not SHA256.fullmatch(sha256):
        refuse(f"{where}.sha256", sha256, "64 lower-case hex digits")
    pinned = FixedFile(
        path=relative_path(text(file, "path", where), f"{where}.path"),
        sha256=sha256,
        size=number(file, "size", where),
        executable=flag(file, "executable", where, default=False),
    )
    return pinned, source_from_json(file["source"], f"{where}.source")


def pinned_sources(params: Params) -> list[tuple[FixedFile, Source]]:
    """The files of a fetch step and where each comes from; raises `InvalidDerivation`."""
    fields(params, "fetch", required=("files",))
    files = [
        _file(value, f"fetch.files[{i}]") for i, value in enumerate(items(params, "files", "fetch"))
    ]
    if not files:
        refuse("fetch.files", [], "at least one file")
    paths = [pinned.path for pinned, _source in files]
    if len(set(paths)) != len(paths):
        refuse("fetch.files", sorted(paths), "each path once")
    return files


def _make_executable(file: Path) -> None:
    """Set the bit; a file shared with the store is copied first."""
    if file.stat().st_nlink > 1:
        own = file.with_name(file.name + ".own")
        shutil.copyfile(file, own)
        own.replace(file)
    file.chmod(0o755)


class Fetch:
    """Pinned files in, the same files out."""

    kind = "fetch"
    version = 1
    determinism: Determinism = "bitwise"
    refers_to_inputs = False
    copies: Sequence[str] = ()

    def check(self, params: Params) -> None:
        """Refuse bad params."""
        pinned_sources(params)

    def fixed_output(self, params: Params) -> Sequence[FixedFile]:
        """The output is known from the pins."""
        return [pinned for pinned, _source in pinned_sources(params)]

    def build(self, params: Params, inputs: Mapping[str, Path], out: Path, tools: Toolbox) -> None:
        """Fetch each file by its digest."""
        del inputs
        files = pinned_sources(params)
        tools.reserve(sum(pinned.size for pinned, _source in files))
        for pinned, source in files:
            to = at_path(out, pinned.path)
            tools.download(source, to, pinned.sha256, pinned.size)
            if pinned.executable:
                _make_executable(to)


RECIPE: Recipe = Fetch()
