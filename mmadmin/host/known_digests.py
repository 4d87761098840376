"""Digests of this host's files that were read before: an unchanged file is not read again.

As git's index does, a file counts as unchanged while device, inode, size, time of modification and
time of change are the same. The last one cannot be set back: neither a copy over the file nor
`touch` hides a change. A file that changed just before it was read is not remembered, because a
second change within the same tick of the file system's clock would look the same.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.errors import Conflict
from mmadmin.core.store import hash_file

TICK_NS = 2_000_000_000
"""The coarsest clock of a file system that we expect (FAT); others count in milliseconds."""
MOST = 4096
"""More files than this are not remembered; those go that were not asked for the longest."""
BUSY_S = 5.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS digests (
    device TEXT, inode TEXT, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER,
    sha256 TEXT NOT NULL, used_ns INTEGER NOT NULL,
    PRIMARY KEY (device, inode)
) WITHOUT ROWID
"""
"""Device and inode are texts: SQLite's integers are signed, theirs are not."""


@dataclass(frozen=True, slots=True)
class KnownDigests:
    """The digests that are kept in one file; safe with several processes and a kill at any time.

    It only saves time: where the file cannot be read or written, everything is hashed.
    """

    path: Path

    def hash_file(self, path: Path) -> tuple[str, int]:
        """The sha256 and size of a file, from memory or by reading it.

        Raises `OSError`, and `Conflict` for a file that changed while it was read.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            before, began_ns = os.fstat(fd), time.time_ns()
            known = self._known(before)
            if known is not None:
                return known, before.st_size
            # The same inode, even where the path is replaced meanwhile.
            sha256, size = hash_file(Path(f"/proc/self/fd/{fd}"))
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if (before.st_size, before.st_mtime_ns) != (size, after.st_mtime_ns):
            raise Conflict(
                f"{path} changed while it was read", remedy="wait until it is complete, then retry"
            )
        settled = max(after.st_mtime_ns, after.st_ctime_ns) < began_ns - TICK_NS
        if settled and before.st_ctime_ns == after.st_ctime_ns:
            self._remember(after, sha256)
        return sha256, size

    def forget(self, paths: Iterable[Path]) -> None:
        """Have these files read again the next time."""
        keys = []
        for path in paths:
            with suppress(OSError):
                keys.append(_key(path.stat()))
        with suppress(sqlite3.Error), self._open() as database:
            database.executemany("DELETE FROM digests WHERE device = ? AND inode = ?", keys)

    def _known(self, stat: os.stat_result) -> str | None:
        if not self.path.exists():
            return None
        with suppress(sqlite3.Error), self._open() as database:
            row = database.execute(
                "UPDATE digests SET used_ns = ? WHERE device = ? AND inode = ? AND size = ?"
                " AND mtime_ns = ? AND ctime_ns = ? RETURNING sha256",
                (time.time_ns(), *_key(stat), *_state(stat)),
            ).fetchone()
            return str(row[0]) if row else None
        return None

    def _remember(self, stat: os.stat_result, sha256: str) -> None:
        with suppress(sqlite3.Error), self._open() as database:
            database.execute(
                "INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*_key(stat), *_state(stat), sha256, time.time_ns()),
            )
            database.execute(
                "DELETE FROM digests WHERE used_ns <="
                " (SELECT used_ns FROM digests ORDER BY used_ns DESC LIMIT 1 OFFSET ?)",
                (MOST,),
            )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction. A file that is not a database is thrown away: it only saved time."""
        try:
            with closing(sqlite3.connect(self.path, timeout=BUSY_S)) as database, database:
                database.execute(SCHEMA)
                yield database
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            self.path.unlink(missing_ok=True)
            raise


def _key(stat: os.stat_result) -> tuple[str, str]:
    return str(stat.st_dev), str(stat.st_ino)


def _state(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
