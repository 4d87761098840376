"""`mm migrate`: the records from SQLite to PostgreSQL, without a request that fails.

Panel, worker and beat pause while the rows are copied; gate and engines go on. Nothing changes for
the installation before every table has been counted and compared; the old file is kept.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from mmadmin.cli import installation
from mmadmin.cli.output import JsonFlag, console, emit_json, escape, seconds_text
from mmadmin.cli.settings_file import read_settings, write_settings
from mmadmin.core.errors import Conflict, InvalidInput
from mmadmin.core.home import BEFORE_POSTGRESQL, Home
from mmadmin.core.variables import REMEMBERED

WRITERS = ("beat", "worker", "panel")
MM = [sys.executable, "-c", "from mmadmin.cli.entry import main; main()"]


def migrate(
    *,
    to: Annotated[
        str,
        typer.Option(
            help="Where to: postgres://USER:PASSWORD@HOST/NAME. Without it, DATABASE_URL; that one"
            " does not stand in the list of processes.",
            metavar="DATABASE_URL",
        ),
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Move the records from SQLite to an empty PostgreSQL database.

    Copies every table, compares counts and digests, then switches the installation over and starts
    its services again. Gate and engines go on meanwhile. An interrupted run goes on where it was.
    The SQLite file is kept beside.

    Example: DATABASE_URL_FILE=/run/secrets/database_url mm migrate
    """
    home = Home.from_env()
    url = to or os.environ.get("DATABASE_URL", "")
    _check(home, url)
    os.environ.pop("DATABASE_URL", None)  # until the copy is whole, the records are in SQLite
    import django

    django.setup()
    from django.db import connection

    from deployments import copying

    began = time.monotonic()
    copying.open_database("target", url)
    copying.prepare_target("target", url)
    connection.ensure_connection()  # it could not be opened under the lock
    with _paused(home) as running, _unchanged(home.database):
        found = copying.copy_all("default", "target", _show_progress(quiet=as_json))
        copying.finish_target("target")
        kept = read_settings(home)
        write_settings(home, {**kept.values, "DATABASE_URL": url}, unusable=kept.problems)
    connection.close()
    aside = home.database.with_name(home.database.name + BEFORE_POSTGRESQL)
    _set_aside(home.database, aside)
    if running:
        subprocess.run([*MM, "up", "--no-demo"], check=True, stdout=subprocess.DEVNULL)
    rows, took = sum(table.rows for table in found.values()), time.monotonic() - began
    if as_json:
        tables = {name: {"rows": t.rows, "digest": t.digest} for name, t in found.items()}
        emit_json({"tables": tables, "rows": rows, "kept": str(aside), "seconds": round(took, 1)})
        return
    console.print(
        f"{rows} rows in {len(found)} tables: counts and digests are equal ({seconds_text(took)})\n"
        f"the SQLite file is kept as {escape(str(aside))}"
    )
    if not running:
        console.print("[dim]start with: mm up[/]")


def _check(home: Home, url: str) -> None:
    if urlsplit(url).scheme not in ("postgres", "postgresql"):
        raise InvalidInput(
            "the address of a PostgreSQL database is missing",
            remedy="mm migrate --to postgres://USER:PASSWORD@HOST/NAME",
        )
    if problem := REMEMBERED["DATABASE_URL"].problem(url):
        raise InvalidInput(f"DATABASE_URL: {problem}", remedy="encode such characters with %")
    if read_settings(home).values.get("DATABASE_URL"):
        raise Conflict(
            "the records are in PostgreSQL already", remedy="`mm backup` and `mm restore` move them"
        )
    if not installation.has_sqlite_records(home):
        raise Conflict("there are no records to move", remedy="run `mm up` with DATABASE_URL set")


@contextmanager
def _paused(home: Home) -> Iterator[bool]:
    """Stop what writes records; after an error start it again. Tells whether anything ran."""
    from mmadmin.host.supervisor import Supervisor

    supervisor = Supervisor(home)
    running = supervisor.running()
    paused = [name for name in WRITERS if running and supervisor.pid(name)]
    try:
        for name in paused:
            supervisor.stop_program(name)
        yield running
    except BaseException:
        for name in paused:
            supervisor.start_again(name)
        raise


@contextmanager
def _unchanged(path: Path) -> Iterator[None]:
    """Hold SQLite's write lock: commands typed meanwhile wait, then say that it is locked."""
    lock = sqlite3.connect(path, timeout=60, isolation_level=None)
    try:
        lock.execute("BEGIN IMMEDIATE")
        yield
        lock.execute("ROLLBACK")
    finally:
        lock.close()


def _set_aside(path: Path, aside: Path) -> None:
    """Fold the write-ahead log into the file, and rename it."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()
    path.rename(aside)


def _show_progress(*, quiet: bool) -> Callable[[str, int, int], None]:
    """Tell of the tables that take a while."""
    said = 0.0

    def show(table: str, done: int, total: int) -> None:
        nonlocal said
        if not quiet and time.monotonic() - said > 1:
            said = time.monotonic()
            console.print(f"  {table}: {done} of {total}")

    return show
