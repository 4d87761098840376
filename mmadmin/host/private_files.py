"""Everything under `MM_HOME` is its user's alone: no permission for group and others.

Inside the store, objects and blobs are read-only and keep the modes that belong to their digests;
nobody else reaches them, because the store's own folders are private.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.home import Home

OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class Exposed:
    """A file or folder that others may use, or that belongs to another user."""

    path: Path
    mode: int
    foreign: bool

    def __str__(self) -> str:
        if self.foreign:
            return f"{self.path} belongs to another user"
        return f"{self.path} has mode {self.mode:04o}"


def exposed(home: Home) -> Iterator[Exposed]:
    """What is not private, the outermost first; links and what has just gone are left out."""
    for path in _ours(home):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        mode = stat.S_IMODE(found.st_mode)
        foreign = found.st_uid != os.getuid()
        if not stat.S_ISLNK(found.st_mode) and (foreign or mode & OTHERS):
            yield Exposed(path, mode, foreign)


def make_private(home: Home) -> None:
    """Take every permission from group and others, except of what belongs to another user."""
    for found in exposed(home):
        if not found.foreign:
            found.path.chmod(found.mode & ~OTHERS)


def _ours(home: Home) -> Iterator[Path]:
    """The state folder and all below it, but of the store only its own folders and files.

    Either may be a link to another disk: then it is the folder there that counts.
    """
    store = home.store.resolve()
    pending = list(dict.fromkeys((home.root.resolve(), store)))
    yield from (folder for folder in pending if folder.exists())
    while pending:
        folder = pending.pop()
        for entry in _entries(folder):
            path = Path(entry.path)
            if path != store:
                yield path
                if entry.is_dir(follow_symlinks=False) and folder != store:
                    pending.append(path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, PermissionError):
        return []
