"""The few moves on files that the store is made of; each leaves old or new, never a part."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

EPOCH = (1, 1)
"""Access and modification time of everything in an object."""


FLUSHES = 16
"""Files that are flushed at a time."""


HALF_WRITTEN = ".*.new"
"""Files that replace another once they are whole; a killed process leaves them."""


NOT_LINKABLE = {
    errno.EMLINK,
    errno.EXDEV,
    errno.EPERM,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
}
"""What `link` fails with where a copy would succeed."""


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_paths(paths: Iterable[Path]) -> None:
    """Flush many files or folders; raises the first error.

    Many at a time: a file system writes what waits together in one commit, which takes as long as
    that of a single file.
    """
    with ThreadPoolExecutor(FLUSHES, thread_name_prefix="fsync") as pool:
        for _ in pool.map(fsync_path, paths):
            pass


def stamp(path: Path) -> None:
    """Set the times; not written when they are right, so that a shared inode is left alone."""
    if path.stat().st_mtime_ns != EPOCH[1] * 10**9:
        os.utime(path, EPOCH)


def write_file(path: Path, data: bytes) -> None:
    """Replace a small file at once: the old content or the new, never a part."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def sealed_mode(*, executable: bool) -> int:
    """The mode of a sealed file."""
    return 0o555 if executable else 0o444


def is_sealed(info: os.stat_result, *, executable: bool) -> bool:
    """False for a file that was changed since it was sealed, or was found to be damaged."""
    mode = sealed_mode(executable=executable)
    return stat.S_IMODE(info.st_mode) == mode and int(info.st_mtime) == EPOCH[1]


def take_blob(blob: Path, size: int, target: Path) -> bool:
    """Link a blob to a new path; False when it is missing, or known to be damaged."""
    try:
        info = blob.stat()
        if info.st_size != size or not is_sealed(info, executable=blob.name.endswith("-x")):
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(blob, target)
    except FileNotFoundError:
        return False
    return True


def link(source: Path, target: Path) -> bool:
    """Give a file a second name; False where the file system cannot.

    Some have no hard links at all; others bound their number, or a mount refuses them.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NOT_LINKABLE:
            raise
        return False
    return True


def link_or_copy(source: Path, target: Path) -> None:
    """Link where the file system allows, else copy with mode and times; on the disk then."""
    if link(source, target):
        return
    temporary = target.with_name(f".{uuid.uuid4().hex}.new")
    try:
        shutil.copy2(source, temporary)
        fsync_path(temporary)
        if target.exists():  # as a link would
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)


def unlink_tree(path: Path) -> None:
    """Unlink a file or a folder that may hold read-only folders; forgives what vanishes."""
    with suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        path.chmod(0o755)
        for below in list(path.iterdir()):
            unlink_tree(below)
        path.rmdir()
