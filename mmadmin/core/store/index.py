"""The store's index: SQLite, so that questions are fast. The disk is the truth.

WAL and `synchronous=FULL`: what a transaction said survives a power cut. Connections belong to
a thread and a process; a forked child opens its own. On a full disk, where SQLite cannot make the
file by which processes share a WAL, each use opens the index for itself alone.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmadmin.core.errors import DiskFull, StoreCorrupt

SCHEMA_VERSION = 3
BUSY_TIMEOUT_S = 60
SYNCHRONOUS = "FULL"
WAL_RETRY_S = 0.02
NO_SHARED_MEMORY = {
    sqlite3.SQLITE_IOERR_SHMOPEN,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMMAP,
    sqlite3.SQLITE_IOERR_SHMLOCK,
}
"""What SQLite says when the file that shares a WAL cannot be made: there is no room for it."""

_of_parents: list[sqlite3.Connection] = []
"""Connections that a fork copied: never used, and never closed, in the child (SQLite's rule)."""

SCHEMA = """
CREATE TABLE object (
  name TEXT PRIMARY KEY, hash TEXT NOT NULL, size INTEGER NOT NULL, sealed_at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE entry (
  object TEXT NOT NULL, path TEXT NOT NULL, kind TEXT NOT NULL, executable INTEGER NOT NULL,
  size INTEGER NOT NULL, sha256 TEXT NOT NULL, target TEXT NOT NULL, PRIMARY KEY (object, path)
) WITHOUT ROWID;
CREATE INDEX entry_sha256 ON entry (sha256);
CREATE TABLE reference (
  object TEXT NOT NULL, target TEXT NOT NULL, PRIMARY KEY (object, target)
) WITHOUT ROWID;
CREATE INDEX reference_target ON reference (target);
CREATE TABLE realisation (
  resolved_key TEXT PRIMARY KEY, derivation TEXT NOT NULL, object TEXT NOT NULL,
  sandbox TEXT NOT NULL, host TEXT NOT NULL, built_ms INTEGER NOT NULL, built_at INTEGER NOT NULL,
  log TEXT NOT NULL, inputs TEXT
) WITHOUT ROWID;
CREATE INDEX realisation_derivation ON realisation (derivation);
CREATE INDEX realisation_object ON realisation (object);
CREATE TABLE derivation (
  digest TEXT PRIMARY KEY, recipe TEXT NOT NULL, name TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX derivation_name ON derivation (recipe, name);
"""
TABLES = ("object", "entry", "reference", "realisation", "derivation")


class _Local(threading.local):
    """A thread's connection."""

    connection: sqlite3.Connection | None = None
    pid = 0
    alone = False
    """True when it keeps other processes out: it is closed after each use."""
    depth = 0
    """How many uses are under way, one inside the other."""


class Index:
    """Connections to one index file; made empty when there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = _Local()

    def prepare(self, fill: Callable[[sqlite3.Connection], None]) -> None:
        """Make the tables and have them filled, in one transaction; nothing when they are there.

        An index of an earlier version is rebuilt: the disk says everything that it said. No
        other process sees it half filled.
        """
        with self._mapped():
            connection = self._connection()
            version: int = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise StoreCorrupt(
                    f"the store's index has version {version}, this mmadmin knows {SCHEMA_VERSION}",
                    remedy="use the newer mmadmin that wrote it",
                )
        if version == SCHEMA_VERSION:
            return
        with self.write() as connection:
            if connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
                return
            for table in TABLES:
                connection.execute(f"DROP TABLE IF EXISTS {table}")
            for statement in SCHEMA.split(";"):
                connection.execute(statement)
            fill(connection)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def row(self, query: str, values: tuple[object, ...] = ()) -> tuple[Any, ...] | None:
        """The first row of a query, or None."""
        try:
            found: tuple[Any, ...] | None = self._connection().execute(query, values).fetchone()
        except sqlite3.DatabaseError as error:
            raise _explained(error) from None
        self._close_if_alone()
        return found

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection to read from; each statement sees one state."""
        with self._mapped():
            yield self._connection()

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A connection in a read transaction: all statements see one state."""
        with self._mapped():
            connection = self._connection()
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.execute("ROLLBACK")

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A connection in a write transaction: all or nothing."""
        with self._mapped():
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def close(self) -> None:
        """Close this thread's connection."""
        connection = self._local.connection
        if connection is not None:
            connection.close()
            self._local.connection = None

    def _connection(self) -> sqlite3.Connection:
        connection = self._local.connection
        if connection is not None:
            if self._local.pid == os.getpid():
                return connection
            _of_parents.append(connection)
        connection, alone = self._connect(), False
        try:
            self._to_wal(connection)
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode not in NO_SHARED_MEMORY:
                raise
            connection, alone = self._connect(), True
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._to_wal(connection)
        connection.execute(f"PRAGMA synchronous={SYNCHRONOUS}")
        self._local.connection = connection
        self._local.pid = os.getpid()
        self._local.alone = alone
        return connection

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, cached_statements=256
        )

    def _to_wal(self, connection: sqlite3.Connection) -> None:
        """Switch to WAL; while another process does so, SQLite refuses instead of waiting."""
        give_up_at = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > give_up_at:
                    raise
                time.sleep(WAL_RETRY_S)
            else:
                return

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Explains a damaged index; closes a connection that keeps others out."""
        self._local.depth += 1
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise _explained(error) from None
        finally:
            self._local.depth -= 1
            self._close_if_alone()

    def _close_if_alone(self) -> None:
        if self._local.alone and not self._local.depth:
            self.close()


def _explained(error: sqlite3.DatabaseError) -> Exception:
    """What the database's error means for a person; the error itself where it is our bug."""
    if not isinstance(error, sqlite3.OperationalError):
        return StoreCorrupt(
            f"the store's index cannot be used: {error}",
            remedy="rebuild it from the disk with `mm store reindex`",
        )
    if "full" in str(error):
        return DiskFull(
            f"disk full while writing the store's index: {error}",
            remedy="free space with `mm store gc` and try again",
        )
    return error
