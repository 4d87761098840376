"""`mm keys`: the keys with which clients call the gate, from issuing to revoking."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmadmin.cli.installation import public_gate_url
from mmadmin.cli.output import JsonFlag, console, emit_json, escape, styled, when_text
from mmadmin.cli.records import actor
from mmadmin.cli.tables import Column, table
from mmadmin.core.access import ENDPOINTS
from mmadmin.core.errors import InvalidInput
from mmadmin.core.home import Ports

if TYPE_CHECKING:
    from deployments.models import ClientKey, User

app = typer.Typer(no_args_is_help=True, help="Keys with which clients call the API.")

KeyId = Annotated[str, typer.Argument(help="The key's id, or its prefix sk-mm-ID.", metavar="KEY")]


def bare_id(text: str) -> str:
    """The id in `ID`, in `sk-mm-ID` and in a whole key."""
    return text.removeprefix("sk-mm-").split("-", 1)[0]


def _show_json(person: User, key: ClientKey, **more: Any) -> None:
    """Print a key as the REST API gives it, and what a command adds."""
    from deployments import queries
    from deployments import schemas as s

    spent = queries.budgets(person, [key.key_id])[key.key_id]
    emit_json(s.KeyOut.of(key, spent).dict() | more)


Owner = Annotated[str, typer.Option(help="Who will use it.")]
Note = Annotated[str | None, typer.Option(help="What for.")]
Deployments = Annotated[
    list[str] | None,
    typer.Option("--deployment", help="May use only this deployment; may be repeated."),
]
Endpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint", help=f"May use only this endpoint; may be repeated: {', '.join(ENDPOINTS)}."
    ),
]
Rpm = Annotated[int | None, typer.Option(help="Requests a minute; 0 = no limit.", min=0)]
Tpm = Annotated[int | None, typer.Option(help="Tokens a minute; 0 = no limit.", min=0)]
Concurrency = Annotated[
    int | None, typer.Option(help="Requests at the same time; 0 = no limit.", min=0)
]
PerDay = Annotated[int | None, typer.Option(help="Tokens a day (UTC); 0 = no limit.", min=0)]
PerMonth = Annotated[int | None, typer.Option(help="Tokens a month (UTC); 0 = no limit.", min=0)]
ExpiresInDays = Annotated[
    int | None, typer.Option(help="Expires after this many days.", min=1, max=36_500)
]
LIMIT_WORDS = {
    "rpm": "requests/min",
    "tpm": "tokens/min",
    "concurrency": "at once",
    "tokens_per_day": "tokens/day",
    "tokens_per_month": "tokens/month",
}


def _limits_text(key: ClientKey) -> str:
    found = [
        f"{getattr(key, name)} {word}" for name, word in LIMIT_WORDS.items() if getattr(key, name)
    ]
    return ", ".join(found) or "none"


def _may_use(key: ClientKey) -> str:
    models, endpoints = ", ".join(key.deployments), ", ".join(key.endpoints)
    return f"{models or 'all'} ({endpoints} only)" if endpoints else models or "all"


def _used_text(key: ClientKey, spent: tuple[int, int]) -> str:
    """The use of the key's budgets."""
    found = [
        f"{used} of {limit} {word}"
        for used, limit, word in (
            (spent[0], key.tokens_per_day, "today"),
            (spent[1], key.tokens_per_month, "this month"),
        )
        if limit
    ]
    return ", ".join(found)


def _expiry(days: int | None) -> datetime | None:
    return datetime.now(UTC) + timedelta(days=days) if days else None


@app.command()
def issue(
    *,
    owner: Owner,
    note: Note = None,
    deployment: Deployments = None,
    endpoint: Endpoints = None,
    rpm: Rpm = None,
    tpm: Tpm = None,
    concurrency: Concurrency = None,
    tokens_per_day: PerDay = None,
    tokens_per_month: PerMonth = None,
    expires_in_days: ExpiresInDays = None,
    as_json: JsonFlag = False,
) -> None:
    """Issue a key. Its text is printed this once and kept nowhere.

    Without --deployment, --endpoint, a limit or an expiry, nothing is restricted.

    Example: mm keys issue --owner alice --note "coding agent" --tokens-per-day 2000000
    """
    person = actor()
    from deployments import actions

    key, text = actions.issue_key(
        person,
        owner=owner,
        note=note or "",
        deployments=deployment or (),
        endpoints=endpoint or (),
        rpm=rpm or 0,
        tpm=tpm or 0,
        concurrency=concurrency or 0,
        tokens_per_day=tokens_per_day or 0,
        tokens_per_month=tokens_per_month or 0,
        expires_at=_expiry(expires_in_days),
    )
    base_url = f"{public_gate_url(Ports.from_env())}/v1"
    if as_json:
        from deployments import schemas as s

        emit_json(s.NewKeyOut.of_new(key, text).dict() | {"base_url": base_url})
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
    """List keys: prefix, owner, what each may do, its limits and budgets, when it was last used.

    Example: mm keys list --search alice
    """
    person = actor()
    from deployments import queries

    found = queries.keys(person, search=search, state=state or "", page=page)
    spent = queries.budgets(person, [key.key_id for key in found.rows])
    if as_json:
        from deployments import schemas as s

        emit_json([s.KeyOut.of(key, spent[key.key_id]) for key in found.rows])
        return
    table(
        [
            Column("key", whole=True),
            Column("state", whole=True),
            Column("owner"),
            Column("note", drop=2),
            Column("may use", drop=3),
            Column("limits", drop=4),
            Column("used", drop=5),
            Column("expires", whole=True, drop=6),
            Column("last used", whole=True, drop=1),
        ],
        [
            [
                str(key),
                styled(key.state),
                escape(key.owner),
                escape(key.note),
                escape(_may_use(key)),
                _limits_text(key),
                _used_text(key, spent[key.key_id]),
                when_text(key.expires_at),
                when_text(key.last_used_at),
            ]
            for key in found.rows
        ],
        empty="no keys; issue one with: mm keys issue --owner NAME",
    )
    if found.pages > 1:
        console.print(f"[dim]page {found.page} of {found.pages}; --page N for others[/]")


@app.command()
def show(key: KeyId, *, as_json: JsonFlag = False) -> None:
    """Show a key: what it may do, its limits, what is used of its budgets, what was done to it.

    Example: mm keys show sk-mm-abcdefghjkmn
    """
    person = actor()
    from deployments import queries

    found = queries.key(person, bare_id(key))
    events = queries.key_events(person, found.key_id)
    if as_json:
        from deployments import schemas as s

        _show_json(person, found, events=[s.AuditOut.from_orm(event) for event in events])
        return
    spent = queries.budgets(person, [found.key_id])[found.key_id]
    console.print(f"[bold]{found}[/]  {styled(found.state)}")
    for name, text in (
        ("owner", found.owner),
        ("note", found.note),
        ("may use", _may_use(found)),
        ("limits", _limits_text(found)),
        ("used", _used_text(found, spent) or f"{spent[0]} today, {spent[1]} this month"),
        ("expires", when_text(found.expires_at) if found.expires_at else "never"),
        ("last used", when_text(found.last_used_at) if found.last_used_at else "never"),
        ("follows", str(found.rotated_from) if found.rotated_from else ""),
    ):
        if text:
            console.print(f"{name:<10} {escape(text)}")
    for event in events:
        who = escape(str(event.actor or "mmadmin"))
        console.print(f"[dim]{when_text(event.at)}  {who}: {escape(event.summary)}[/]")


@app.command()
def edit(
    key: KeyId,
    *,
    owner: Annotated[str | None, typer.Option(help="Who uses it.")] = None,
    note: Note = None,
    deployment: Deployments = None,
    any_deployment: Annotated[
        bool, typer.Option("--any-deployment", help="May use all deployments.")
    ] = False,
    endpoint: Endpoints = None,
    any_endpoint: Annotated[
        bool, typer.Option("--any-endpoint", help="May use all endpoints.")
    ] = False,
    rpm: Rpm = None,
    tpm: Tpm = None,
    concurrency: Concurrency = None,
    tokens_per_day: PerDay = None,
    tokens_per_month: PerMonth = None,
    expires_in_days: ExpiresInDays = None,
    never_expires: Annotated[
        bool, typer.Option("--never-expires", help="Takes the expiry away.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Change a key; what is not named stays. The gate applies it at once.

    Example: mm keys edit sk-mm-abcdefghjkmn --rpm 60 --endpoint chat --endpoint embeddings
    """
    person = actor()
    from deployments import actions

    named = {
        "owner": owner,
        "note": note,
        "deployments": [] if any_deployment else deployment or None,
        "endpoints": [] if any_endpoint else endpoint or None,
        "rpm": rpm,
        "tpm": tpm,
        "concurrency": concurrency,
        "tokens_per_day": tokens_per_day,
        "tokens_per_month": tokens_per_month,
        "expires_at": _expiry(expires_in_days),
    }
    changes: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if never_expires:
        changes["expires_at"] = None
    if not changes:
        raise InvalidInput("nothing to change", remedy="name a field, for example --rpm 60")
    changed = actions.edit_key(person, bare_id(key), **changes)
    if as_json:
        _show_json(person, changed)
    else:
        console.print(
            f"{changed} of {escape(changed.owner)}: {escape(_may_use(changed))}; "
            f"limits: {_limits_text(changed)}"
        )


def _changed(person: User, key: ClientKey, *, as_json: bool) -> None:
    if as_json:
        _show_json(person, key)
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
        _show_json(person, ended, revoked_at=ended.revoked_at, revoked_by=who)
    elif before is None:
        _changed(person, ended, as_json=False)
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

    suspended = actions.suspend_key(person, bare_id(key), True)  # noqa: FBT003
    _changed(person, suspended, as_json=as_json)


@app.command()
def resume(key: KeyId, *, as_json: JsonFlag = False) -> None:
    """Let a suspended key work again.

    Example: mm keys resume sk-mm-abcdefghjkmn
    """
    person = actor()
    from deployments import actions

    resumed = actions.suspend_key(person, bare_id(key), False)  # noqa: FBT003
    _changed(person, resumed, as_json=as_json)


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
    old = fresh.rotated_from
    ends = old.expires_at if old else None
    if as_json:
        from deployments import schemas as s

        emit_json(s.NewKeyOut.of_new(fresh, text))
    else:
        console.print(f"[bold]{text}[/]  [yellow](shown only now)[/]")
        console.print(f"{old} keeps working until {when_text(ends)}")
