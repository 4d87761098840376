"""`mm keys`: issue, list and revoke the keys with which clients call the gate."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmadmin.cli.installation import public_gate_url
from mmadmin.cli.output import JsonFlag, console, emit_json, escape, styled, when_text
from mmadmin.cli.records import actor
from mmadmin.cli.tables import Column, table
from mmadmin.core.home import Ports

if TYPE_CHECKING:
    from deployments.models import ClientKey

app = typer.Typer(no_args_is_help=True, help="Keys with which clients call the API.")

KeyId = Annotated[str, typer.Argument(help="The key's id, or its prefix sk-mm-ID.", metavar="KEY")]


def bare_id(text: str) -> str:
    """The id in `ID`, in `sk-mm-ID` and in a whole key."""
    return text.removeprefix("sk-mm-").split("-", 1)[0]


def _as_json(key: ClientKey) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "prefix": str(key),
        "state": key.state,
        "owner": key.owner,
        "note": key.note,
        "deployments": key.deployments,
        "endpoints": key.endpoints,
        "rpm": key.rpm,
        "tpm": key.tpm,
        "concurrency": key.concurrency,
        "tokens_per_day": key.tokens_per_day,
        "tokens_per_month": key.tokens_per_month,
        "expires_at": key.expires_at,
        "last_used_at": key.last_used_at,
        "created_at": key.created_at,
    }


@app.command()
def issue(
    *,
    owner: Annotated[str, typer.Option(help="Who will use it.")],
    note: Annotated[str, typer.Option(help="What for.")] = "",
    deployment: Annotated[
        list[str] | None,
        typer.Option(help="May use only this deployment; may be repeated. Without it: all."),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="May use only this endpoint; may be repeated. Without it: all."),
    ] = None,
    rpm: Annotated[int, typer.Option(help="Requests a minute; 0 = no limit.", min=0)] = 0,
    tpm: Annotated[int, typer.Option(help="Tokens a minute; 0 = no limit.", min=0)] = 0,
    concurrency: Annotated[
        int, typer.Option(help="Requests at the same time; 0 = no limit.", min=0)
    ] = 0,
    tokens_per_day: Annotated[
        int, typer.Option(help="Tokens a day (UTC); 0 = no limit.", min=0)
    ] = 0,
    tokens_per_month: Annotated[
        int, typer.Option(help="Tokens a month (UTC); 0 = no limit.", min=0)
    ] = 0,
    expires_in_days: Annotated[
        int | None,
        typer.Option(help="Expires after this many days; without it: never.", min=1, max=36_500),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Issue a key. Its text is printed this once and kept nowhere.

    Example: mm keys issue --owner alice --note "coding agent" --tokens-per-day 2000000
    """
    person = actor()
    from deployments import actions

    expires_at = datetime.now(UTC) + timedelta(days=expires_in_days) if expires_in_days else None
    key, text = actions.issue_key(
        person,
        owner=owner,
        note=note,
        deployments=deployment or (),
        endpoints=endpoint or (),
        rpm=rpm,
        tpm=tpm,
        concurrency=concurrency,
        tokens_per_day=tokens_per_day,
        tokens_per_month=tokens_per_month,
        expires_at=expires_at,
    )
    base_url = f"{public_gate_url(Ports.from_env())}/v1"
    if as_json:
        emit_json({"id": key.key_id, "key": text, "base_url": base_url, "owner": key.owner})
        return
    console.print(f"[bold]{text}[/]  [yellow](shown only now)[/]")
    console.print(f"[dim]OPENAI_BASE_URL={base_url}[/]")


class KeyState(StrEnum):
    """How a key is, as it is typed."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    EXPIRED = "expired"
    REVOKED = "revoked"


@app.command("list")
def list_keys(
    *,
    search: Annotated[
        str, typer.Option(help="Only those with these words in owner, note or prefix.")
    ] = "",
    state: Annotated[
        KeyState | None,
        typer.Option(help="Only those that are active, suspended, expired or revoked."),
    ] = None,
    page: Annotated[int, typer.Option(help="Older pages.", min=1)] = 1,
    as_json: JsonFlag = False,
) -> None:
    """List keys: prefix, owner, what each may do, when it was last used.

    Example: mm keys list --search alice
    """
    person = actor()
    from deployments import queries

    found = queries.keys(person, search=search, state=state or "", page=page)
    if as_json:
        emit_json([_as_json(key) for key in found.rows])
        return
    table(
        [
            Column("key", whole=True),
            Column("state", whole=True),
            Column("owner"),
            Column("note", drop=2),
            Column("may use", drop=1),
            Column("last used", whole=True, drop=3),
        ],
        [
            [
                str(key),
                styled(key.state),
                escape(key.owner),
                escape(key.note),
                escape(", ".join(key.deployments) or "all"),
                when_text(key.last_used_at),
            ]
            for key in found.rows
        ],
        empty="no keys; issue one with: mm keys issue --owner NAME",
    )
    if found.pages > 1:
        console.print(f"[dim]page {found.page} of {found.pages}; --page N for others[/]")


def _changed(key: ClientKey, *, as_json: bool) -> None:
    if as_json:
        emit_json(_as_json(key))
    else:
        console.print(f"{key} of {escape(key.owner)} is {styled(key.state)}")


@app.command()
def revoke(key: KeyId, *, as_json: JsonFlag = False) -> None:
    """Revoke a key permanently: it is refused at once, and its running streams end.

    Example: mm keys revoke sk-mm-abcdefghjkmn
    """
    person = actor()
    from deployments import actions, queries

    before = queries.key(person, bare_id(key)).revoked_at
    ended = actions.revoke_key(person, bare_id(key))
    who = queries.revoked_by(person, ended.key_id)
    if as_json:
        emit_json(_as_json(ended) | {"revoked_at": ended.revoked_at, "revoked_by": who})
    elif before is None:
        _changed(ended, as_json=False)
    else:
        console.print(
            f"{ended} of {escape(ended.owner)} was {styled('revoked')} before: "
            f"{when_text(before)}, by {escape(who or 'mmadmin')}"
        )


@app.command()
def suspend(key: KeyId, *, as_json: JsonFlag = False) -> None:
    """Refuse a key until it is resumed.

    Example: mm keys suspend sk-mm-abcdefghjkmn
    """
    person = actor()
    from deployments import actions

    _changed(actions.suspend_key(person, bare_id(key), True), as_json=as_json)  # noqa: FBT003


@app.command()
def resume(key: KeyId, *, as_json: JsonFlag = False) -> None:
    """Let a suspended key work again.

    Example: mm keys resume sk-mm-abcdefghjkmn
    """
    person = actor()
    from deployments import actions

    _changed(actions.suspend_key(person, bare_id(key), False), as_json=as_json)  # noqa: FBT003


@app.command()
def rotate(
    key: KeyId,
    *,
    overlap_hours: Annotated[
        int, typer.Option(help="How long the old key works beside the new one.", min=0)
    ] = 24,
    as_json: JsonFlag = False,
) -> None:
    """Issue a successor with the same rights; the old key ends after the overlap.

    Example: mm keys rotate sk-mm-abcdefghjkmn --overlap-hours 1
    """
    person = actor()
    from deployments import actions

    fresh, text = actions.rotate_key(person, bare_id(key), overlap=timedelta(hours=overlap_hours))
    if as_json:
        emit_json({"id": fresh.key_id, "key": text})
    else:
        console.print(f"[bold]{text}[/]  [yellow](shown only now)[/]")
