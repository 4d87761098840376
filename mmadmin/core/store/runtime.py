"""Objects that running processes use: found in /proc, so that the collector leaves them.

Looks at what a process maps, has open, runs, stands in, and was started with. Processes of other
users that may not be looked at are passed over, as they cannot run engines of ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
OBJECT = rb"/([0-9a-f]{64}-[A-Za-z0-9_][A-Za-z0-9._+=-]{0,127})"
BLOB = rb"/[0-9a-f]{2}/([0-9a-f]{64})(-x)?"


@dataclass(frozen=True, slots=True)
class InUse:
    """What one process uses of a store."""

    pid: int
    program: str
    objects: frozenset[str]
    """Names."""
    blobs: frozenset[tuple[str, bool]]
    """(sha256, executable) of blobs that it uses by their own path."""


def in_use(objects: Path, blobs: Path, proc: Path = PROC) -> list[InUse]:
    """Every process that uses something below `objects` or `blobs`.

    The kernel names files by their real path, arguments by the one that was given: both count.
    """
    object_pattern = re.compile(_either(objects) + OBJECT)
    blob_pattern = re.compile(_either(blobs) + BLOB)
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        names: set[str] = set()
        digests: set[tuple[str, bool]] = set()
        for text in _texts(folder):
            names.update(name.decode() for name in object_pattern.findall(text))
            digests.update((sha.decode(), bool(x)) for sha, x in blob_pattern.findall(text))
        if names or digests:
            found.append(
                InUse(int(folder.name), _program(folder), frozenset(names), frozenset(digests))
            )
    return found


def _either(folder: Path) -> bytes:
    """A pattern for a folder's path as it was given, or without symbolic links."""
    forms = {os.fsencode(folder), os.fsencode(os.path.realpath(folder))}
    return b"(?:" + b"|".join(re.escape(form) for form in sorted(forms)) + b")"


def _texts(folder: Path) -> Iterator[bytes]:
    for name in ("maps", "cmdline", "environ"):
        try:
            yield (folder / name).read_bytes()
        except OSError:  # it ended, or is not ours to look at
            continue
    links = [folder / "exe", folder / "cwd", folder / "root"]
    with suppress(OSError):
        links.extend((folder / "fd").iterdir())
    for link in links:
        try:
            yield os.fsencode(os.readlink(link))  # noqa: PTH115 (bytes as they are)
        except OSError:
            continue


def _program(folder: Path) -> str:
    try:
        return (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
