"""`mm usage`: what keys, owners, deployments and generations used, as a table, JSON or CSV."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer

from mmadmin.cli.keys import bare_id
from mmadmin.cli.output import JsonFlag, emit_json, escape
from mmadmin.cli.records import actor
from mmadmin.cli.tables import Column, table
from mmadmin.core.errors import InvalidInput

_AGO = re.compile(r"(\d{1,4})([hd])")
COLUMNS = {
    "requests": "requests",
    "failed": "failed",
    "refused": "refused",
    "cancelled": "cancelled",
    "prompt_tokens": "prompt",
    "completion_tokens": "output",
}


class By(StrEnum):
    """What is added up, as it is typed."""

    KEY = "key"
    OWNER = "owner"
    DEPLOYMENT = "deployment"
    GENERATION = "generation"
    ENDPOINT = "endpoint"
    DAY = "day"
    HOUR = "hour"


def moment(text: str, now: datetime) -> datetime:
    """`7d`, `24h`, `2026-11-30` or a whole ISO date and time; UTC where no zone is named."""
    if (ago := _AGO.fullmatch(text)) is not None:
        return now - timedelta(**{"hours" if ago[2] == "h" else "days": int(ago[1])})
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(
            f"{text!r} is not a date",
            remedy="write for example 7d, 24h, 2026-11-30 or 2026-11-30T12:00",
        ) from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def usage(
    *,
    by: Annotated[By, typer.Option(help="What is added up.")] = By.DEPLOYMENT,
    since: Annotated[str, typer.Option(help="From here: 7d or 24h ago, or a date (UTC).")] = "7d",
    until: Annotated[str, typer.Option(help="To here: a date; without it: now.")] = "",
    deployment: Annotated[str, typer.Option(help="Only this deployment.")] = "",
    key: Annotated[str, typer.Option(help="Only this key: its id or prefix.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Sum up requests and tokens by key, owner, deployment, generation, endpoint or time.

    Refused requests (limits, scopes, unknown models) are counted apart from the others.

    Example: mm usage --by owner --since 2026-11-01 --until 2026-12-01 --csv
    """
    person = actor()
    from deployments import queries

    now = datetime.now(UTC)
    rows = queries.usage(
        person,
        since=moment(since, now),
        until=moment(until, now) if until else now,
        deployment=deployment,
        key_id=bare_id(key),
        by=by.value,
    )
    if as_csv:
        sys.stdout.write(queries.usage_csv(rows, by.value))
        return
    if as_json:
        emit_json(rows)
        return
    table(
        [
            Column(by.value, whole=True),
            *(Column(word, whole=True, right=True) for word in COLUMNS.values()),
        ],
        [[escape(_name(row, by)), *(str(row[name]) for name in COLUMNS)] for row in rows],
        empty="no usage in this time",
    )


def _name(row: dict[str, Any], by: By) -> str:
    """What the row is about."""
    if by is By.KEY:
        return f"sk-mm-{row['key_id']} {row.get('owner', '')}".rstrip()
    if by is By.OWNER:
        return str(row["owner"]) or "unknown key"
    if by is By.DAY:
        return f"{row.get('day') or row['hour']:%Y-%m-%d}"
    if by is By.HOUR:
        return f"{row['hour']:%Y-%m-%d %H:%M}"
    if by is By.GENERATION and row["deployment"]:
        return f"{row['deployment']}/{row['generation']}"
    return str(row["endpoint" if by is By.ENDPOINT else "deployment"]) or "no deployment"
