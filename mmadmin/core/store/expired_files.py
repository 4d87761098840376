"""Files that expire: build logs, quarantined files, unfinished downloads.

What a killed step wrote in `staging/` is removed at once (`Writer.sweep`); these may still be of
use for a time. The files of locks that killed processes held are removed when they are free.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from mmadmin.core.store.disk import BLOCK_BYTES
from mmadmin.core.store.files import unlink_tree
from mmadmin.core.store.locks import file_lock
from mmadmin.core.store.writer import Writer

DAY_S = 86400
DEFAULTS_S = {"logs": 30 * DAY_S, "quarantine": 30 * DAY_S, "downloads": 7 * DAY_S}
"""How long a file is kept after it was last touched, by folder."""


def find_expired(store: Writer, now: float, age_s: float | None) -> list[Path]:
    """Files that were not touched for `age_s` (by default `DEFAULTS_S`)."""
    found = []
    for folder, default_s in DEFAULTS_S.items():
        before = now - (default_s if age_s is None else age_s)
        place = store.root / folder
        for path in place.iterdir() if place.is_dir() else ():
            # a download is touched by its bytes, the others also by being moved there
            info = path.lstat()
            touched = info.st_mtime if folder == "downloads" else info.st_ctime
            if touched < before:
                found.append(path)
    return sorted(found)


def remove_expired(store: Writer, paths: Iterable[Path]) -> tuple[list[Path], int]:
    """Remove them, except downloads that are being resumed: the removed paths, and their bytes."""
    gone, freed = [], 0
    for path in paths:
        try:
            with ExitStack() as held:
                for lock in _transfers(store, path):
                    held.enter_context(file_lock(lock, on_wait=_give_up))
                freed += last_links(path)
                unlink_tree(path)
                gone.append(path)
        except _Busy:
            continue
    return gone, freed


def remove_free_locks(store: Writer) -> None:
    """Remove the files of free locks: a holder that was killed leaves its file."""
    for path in store.layout.locks.glob("*.lock"):
        with suppress(_Busy), file_lock(path, on_wait=_give_up):
            pass  # its last holder removes it


class _Busy(Exception):
    """The lock is held."""


def _give_up(_holder: str) -> None:
    raise _Busy


def _transfers(store: Writer, path: Path) -> list[Path]:
    """The locks of those who may write to a download (`host.download`, `store.substitute`)."""
    if path.parent != store.layout.downloads:
        return []
    sha256 = path.name.partition(".")[0]
    return [store.layout.downloads / f"{sha256}.lock", store.layout.lock(f"blob-{sha256}")]


def last_links(path: Path) -> int:
    """Bytes that vanish with a path: of files with no other link."""
    try:
        info = path.lstat()
        if stat.S_ISDIR(info.st_mode):
            return sum(last_links(below) for below in path.iterdir())
    except FileNotFoundError:  # unlinked meanwhile
        return 0
    return info.st_blocks * BLOCK_BYTES if info.st_nlink == 1 else 0
