"""All records from one database to another: copied, counted, and compared by digest.

Small tables are copied again each time, in one transaction, because they refer to each other. The
long ones (usage, logs, audit) go in parts that are committed one by one: an interrupted copy goes
on behind its last part. What the comparison finds different is copied once more.

PostgreSQL's texts cannot hold the character U+0000; it becomes U+2400, its picture.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from django.apps import apps
from django.core.management.color import no_style
from django.db import OperationalError, connections, models, transaction

from deployments.models import AuditEvent, LogChunk, UsageEvent, User
from mmadmin.core.errors import Conflict, DigestMismatch, Unreachable
from mmadmin.settings import BASE_DIR, database

LONG: tuple[type[models.Model], ...] = (UsageEvent, AuditEvent, LogChunk)
"""Tables that grow with every request, action and log line; nothing refers to them."""
PART_ROWS = 20_000
BATCH_ROWS = 500
"""Rows of one INSERT of SQLite, which limits its variables."""
NUL, PICTURE = "\x00", "\u2400"
UNDER_WAY = "mm_copy_under_way"
"""A table that marks a target while it is filled."""
Step = Callable[[str, int, int], None]
"""Told the table, the rows that are done, and all of its rows."""


@dataclass(frozen=True, slots=True)
class Table:
    """What a table holds: for comparison."""

    rows: int
    digest: str
    """Of all rows, in any order."""


def open_database(alias: str, url: str) -> None:
    """Make a database known to Django under this alias."""
    connections.databases[alias] = {**connections.databases["default"], **database(url)}


def copied_models() -> list[type[models.Model]]:
    """Every table with records, the long ones last."""
    found = apps.get_models(include_auto_created=True)
    return [m for m in found if m._meta.managed and m not in LONG] + list(LONG)  # noqa: SLF001


def bring_to_schema(url: str) -> None:
    """Migrate a database, in a process for which it is the only one. Raises `Unreachable`."""
    done = subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--verbosity", "0", "--no-input"],
        env={**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "mmadmin.settings"},
        cwd=BASE_DIR,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Unreachable(
            f"the database cannot be set up: {done.stderr.strip().splitlines()[-1]}",
            remedy="check that the user may create tables there",
        )


def prepare_target(alias: str, url: str) -> None:
    """Bring an empty database to the present schema and mark it. Idempotent.

    Raises `Conflict` when it holds records of its own, `Unreachable` when it does not answer.
    """
    connection = connections[alias]
    try:
        tables = set(connection.introspection.table_names())
        marked = UNDER_WAY in tables
        if not marked and User._meta.db_table in tables and User.objects.using(alias).exists():  # noqa: SLF001
            raise Conflict(
                "the database holds records already",
                remedy="name an empty one; nothing was changed",
            )
        if not marked:
            with connection.cursor() as cursor:
                cursor.execute(f"CREATE TABLE {UNDER_WAY} (id integer)")
    except OperationalError as error:
        raise Unreachable(
            f"the database does not answer: {str(error).splitlines()[0]}",
            remedy="check its address, user and password",
        ) from error
    bring_to_schema(url)


def finish_target(alias: str) -> None:
    """Set counters behind the copied rows, and take the mark away."""
    connection = connections[alias]
    statements = connection.ops.sequence_reset_sql(no_style(), copied_models())
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        cursor.execute(f"DROP TABLE {UNDER_WAY}")


def copy_all(source: str, target: str, on_step: Step) -> dict[str, Table]:
    """Copy every table and compare; returns what each holds. Raises `DigestMismatch`."""
    short = [model for model in copied_models() if model not in LONG]
    with transaction.atomic(using=target):
        for model in reversed(short):
            _clear(model, target)
        for model in short:
            _copy(model, source, target, 0, on_step)
    for model in LONG:
        there = model._base_manager.using(target).count()  # noqa: SLF001
        _copy(model, source, target, there, on_step)
    found = {}
    for model in copied_models():
        wanted, is_there = table_of(model, source), table_of(model, target)
        if wanted != is_there and model in LONG:  # the source went on since the first attempt
            _clear(model, target)
            _copy(model, source, target, 0, on_step)
            is_there = table_of(model, target)
        if wanted != is_there:
            raise DigestMismatch(
                f"{_name(model)} differs: {wanted.rows} rows here, {is_there.rows} there",
                remedy="end what writes to the database, then run it again",
                expected=wanted.digest,
                actual=is_there.digest,
            )
        found[_name(model)] = wanted
    return found


def table_of(model: type[models.Model], alias: str) -> Table:
    """Count and digest of a table."""
    count = total = 0
    for row in _rows(model, alias, 0):
        text = json.dumps(row, ensure_ascii=False, sort_keys=True, default=_plain)
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        total += int.from_bytes(digest, "big")
        count += 1
    return Table(count, f"{total % 2**128:032x}")


def _name(model: type[models.Model]) -> str:
    return model._meta.db_table  # noqa: SLF001


def _fields(model: type[models.Model]) -> list[Any]:
    return list(model._meta.concrete_fields)  # noqa: SLF001


def _rows(model: type[models.Model], alias: str, skip: int) -> Iterator[list[Any]]:
    """The rows in the order of their keys, without the first `skip`."""
    names = [field.attname for field in _fields(model)]
    rows = model._base_manager.using(alias).order_by("pk").values_list(*names)  # noqa: SLF001
    if skip:
        rows = rows[skip:]
    for row in rows.iterator(chunk_size=PART_ROWS):
        yield [_same(value) for value in row]


def _same(value: Any) -> Any:
    """A value in the form in which both databases give it back."""
    if isinstance(value, str):
        return value.replace(NUL, PICTURE) if NUL in value else value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {_same(key): _same(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_same(entry) for entry in value]
    return value


def _plain(value: Any) -> str:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)


def _clear(model: type[models.Model], alias: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(f'DELETE FROM "{_name(model)}"')  # noqa: S608 (our own table)


def _copy(model: type[models.Model], source: str, target: str, skip: int, on_step: Step) -> None:
    """Append a table's rows behind the first `skip`, a transaction a part."""
    total = model._base_manager.using(source).count()  # noqa: SLF001
    rows, done = _rows(model, source, skip), skip
    while part := list(islice(rows, PART_ROWS)):
        with transaction.atomic(using=target):
            _write(model, target, part)
        done += len(part)
        on_step(_name(model), done, total)


def _write(model: type[models.Model], alias: str, rows: Sequence[Sequence[Any]]) -> None:
    connection = connections[alias]
    fields = _fields(model)
    columns = ", ".join(f'"{field.column}"' for field in fields)
    of_json = [i for i, field in enumerate(fields) if isinstance(field, models.JSONField)]
    if connection.vendor == "postgresql":
        statement = f'COPY "{_name(model)}" ({columns}) FROM STDIN'
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            for row in _with_json_text(rows, of_json):
                copy.write_row(row)
        return
    marks = ", ".join(["%s"] * len(fields))
    statement = f'INSERT INTO "{_name(model)}" ({columns}) VALUES ({marks})'  # noqa: S608
    with connection.cursor() as cursor:
        for begin in range(0, len(rows), BATCH_ROWS):
            prepared = [
                [
                    field.get_db_prep_save(v, connection)
                    for field, v in zip(fields, row, strict=True)
                ]
                for row in rows[begin : begin + BATCH_ROWS]
            ]
            cursor.executemany(statement, prepared)


def _with_json_text(rows: Iterable[Sequence[Any]], of_json: Sequence[int]) -> Iterator[list[Any]]:
    for row in rows:
        values = list(row)
        for index in of_json:
            if values[index] is not None:
                values[index] = json.dumps(values[index])
        yield values
