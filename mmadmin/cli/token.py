"""`mm token`: a personal token for the REST API, for a machine without a browser."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from mmadmin.cli.output import JsonFlag, console, emit_json, escape, when_text
from mmadmin.cli.records import actor

DAYS = 90


def token(
    *,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What it may do; may be repeated: read, deploy, keys, admin.", show_default="read"
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(help="Ends after this many days; 0 = never.", min=0, max=36_500)
    ] = DAYS,
    note: Annotated[str, typer.Option(help="What for.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Make a personal token for the REST API, shown once. It is of the person named by `mm --as`.

    Example: mm token --scope deploy --note "deploy script"
    """
    person = actor()
    from deployments import actions

    expires_at = datetime.now(UTC) + timedelta(days=days) if days else None
    made, text = actions.issue_token(
        person, note=note, scopes=scope or ["read"], expires_at=expires_at
    )
    if as_json:
        from deployments import schemas as s

        emit_json(s.NewTokenOut.of_new(made, text).dict() | {"user": person.username})
        return
    end = f"until {when_text(expires_at)}" if expires_at else "without an end"
    console.print(f"[bold]{text}[/]  [yellow](shown only now)[/]")
    console.print(f"[dim]of {escape(person.username)}: {', '.join(made.scopes)}, {end}[/]")
