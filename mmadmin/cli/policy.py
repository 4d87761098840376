"""`mm policy`: which sources deployments may use, and requests for exceptions."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli.deployments import read_spec
from mmadmin.cli.output import JsonFlag, console, emit_json, escape, styled, when_text
from mmadmin.cli.records import MOST, actor
from mmadmin.cli.tables import Column, table

if TYPE_CHECKING:
    from mmadmin.core.source_policy import Rule

app = typer.Typer(no_args_is_help=True, help="Which sources deployments may use.")


class Kind(StrEnum):
    """What a rule is about."""

    HUB = "hub"
    INDEX = "index"
    ADDRESS = "address"
    FOLDER = "folder"
    DIGEST = "digest"


KindOf = Annotated[Kind, typer.Argument(help="What the rule is about.", metavar="KIND")]
Pattern = Annotated[
    str,
    typer.Argument(
        help="owner/name or owner/*; a package; public, a host name, an address or a network;"
        " an absolute folder; a SHA-256.",
        metavar="PATTERN",
    ),
]
Why = Annotated[str, typer.Option("--reason", "-m", help="Why; shown beside the rule.")]
RequestId = Annotated[
    int, typer.Argument(help="The request's number.", metavar="NUMBER", min=1, max=MOST)
]


def _effect(rule: Rule) -> str:
    return "[green]allow[/]" if rule.allow else "[red]deny[/]"


@app.command()
def show(*, as_json: JsonFlag = False) -> None:
    """Show every rule that holds. The most specific one that matches decides.

    Example: mm policy show
    """
    person = actor()
    from deployments import queries

    rows = queries.policy(person)
    if as_json:
        from deployments import schemas as s

        emit_json([s.RuleOut.of(row.rule) for row in rows])
        return
    table(
        [
            Column("kind", whole=True),
            Column("pattern", whole=True),
            Column("effect", whole=True),
            Column("set by", whole=True),
            Column("reason"),
        ],
        [
            [
                row.rule.kind,
                escape(row.rule.pattern),
                _effect(row.rule),
                escape(str(row.record.by)) if row.record else "[dim]default[/]",
                escape(row.rule.reason),
            ]
            for row in rows
        ],
        empty="no rules",
    )


def _set(kind: Kind, pattern: str, reason: str, *, allow: bool, as_json: bool) -> None:
    person = actor()
    from deployments import actions

    made = actions.set_rule(person, kind, pattern, allow=allow, reason=reason).rule
    if as_json:
        from deployments import schemas as s

        emit_json(s.RuleOut.of(made))
    else:
        console.print(f"{_effect(made)} {made.kind} [bold]{escape(made.pattern)}[/]")


@app.command()
def allow(kind: KindOf, pattern: Pattern, *, reason: Why = "", as_json: JsonFlag = False) -> None:
    """Allow a pattern; replaces the rule that it has.

    Example: mm policy allow folder /srv/models --reason "models that we trained"
    """
    _set(kind, pattern, reason, allow=True, as_json=as_json)


@app.command()
def deny(kind: KindOf, pattern: Pattern, *, reason: Why = "", as_json: JsonFlag = False) -> None:
    """Deny a pattern; replaces the rule that it has, also a default.

    Example: mm policy deny address public --reason "only what is listed"
    """
    _set(kind, pattern, reason, allow=False, as_json=as_json)


@app.command()
def remove(kind: KindOf, pattern: Pattern, *, as_json: JsonFlag = False) -> None:
    """Take a rule back: another one that matches, or a default, decides from then on.

    Example: mm policy remove folder /srv/models
    """
    person = actor()
    from deployments import actions

    actions.remove_rule(person, kind, pattern)
    if as_json:
        emit_json({"kind": kind.value, "pattern": pattern})
    else:
        console.print(f"removed the rule for {kind.value} {escape(pattern)}")


@app.command()
def check(
    what: Annotated[
        list[str],
        typer.Argument(
            help="A deployment file, or a kind and what it is about.", metavar="FILE | KIND SUBJECT"
        ),
    ],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Say whether operators may use what a deployment file names, or one source; 1 = no.

    Names are not resolved and links not followed: that happens on the host that builds.

    Example: mm policy check hub acme/model
    """
    person = actor()
    from deployments import queries
    from mmadmin.core.errors import SourceRefused
    from mmadmin.core.source_policy import Access
    from mmadmin.core.spec.spec import parse_spec

    if len(what) == 1:
        from deployments.models import PolicyRule

        spec = parse_spec(read_spec(Path(what[0])))
        try:
            Access(PolicyRule.policy()).check_spec(spec)
        except SourceRefused as error:
            if as_json:
                emit_json({"allowed": False, "error": error.as_json()})
            else:
                console.print(escape(str(error)))
            raise typer.Exit(1) from error
        if as_json:
            emit_json({"allowed": True})
        else:
            console.print(f"the policy allows everything that {escape(spec.name)} names")
        return
    if len(what) > 2:  # noqa: PLR2004 (a kind and its subject)
        raise typer.BadParameter("give a file, or a kind and one subject")
    rule = queries.decision(person, what[0], what[1])
    if as_json:
        from deployments import schemas as s

        emit_json({"allowed": rule.allow, "rule": s.RuleOut.of(rule)})
    else:
        console.print(f"{_effect(rule)} by the rule {escape(str(rule))}")
    if not rule.allow:
        raise typer.Exit(1)


@app.command()
def requests(*, as_json: JsonFlag = False) -> None:
    """List requests for exceptions, those that wait first.

    Example: mm policy requests
    """
    person = actor()
    from deployments import queries

    rows = queries.requests(person).rows
    if as_json:
        from deployments import schemas as s

        emit_json([s.ExceptionOut.from_orm(row) for row in rows])
        return
    table(
        [
            Column("number", whole=True, right=True),
            Column("state", whole=True),
            Column("source", whole=True),
            Column("by", whole=True),
            Column("at", whole=True),
            Column("reason"),
            Column("answer"),
        ],
        [
            [
                str(r.pk),
                styled(r.state),
                escape(f"{r.kind} {r.pattern}"),
                escape(str(r.by)),
                when_text(r.at),
                escape(r.reason),
                escape(r.answer),
            ]
            for r in rows
        ],
        empty="nothing was asked",
    )


def _answer(number: int, reason: str, *, grant: bool, as_json: bool) -> None:
    person = actor()
    from deployments import actions

    asked = actions.answer_request(person, number, grant=grant, reason=reason)
    if as_json:
        from deployments import schemas as s

        emit_json(s.ExceptionOut.from_orm(asked))
    else:
        console.print(f"{styled(asked.state)}: {escape(str(asked))}")


@app.command()
def grant(number: RequestId, *, reason: Why = "", as_json: JsonFlag = False) -> None:
    """Grant a request: it becomes a rule.

    Example: mm policy grant 3
    """
    _answer(number, reason, grant=True, as_json=as_json)


@app.command()
def refuse(number: RequestId, *, reason: Why = "", as_json: JsonFlag = False) -> None:
    """Refuse a request; a reason is needed.

    Example: mm policy refuse 3 --reason "use the hub's copy"
    """
    _answer(number, reason, grant=False, as_json=as_json)
