"""`mm secret`: credentials of addresses, which deployment files name and never hold."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mmadmin.cli.output import JsonFlag, console, emit_json, escape
from mmadmin.cli.records import actor
from mmadmin.cli.tables import Column, table
from mmadmin.core.home import Home
from mmadmin.core.source_secrets import SourceSecrets, origin_of

app = typer.Typer(no_args_is_help=True, help="Credentials of addresses, by name.")

SecretName = Annotated[
    str, typer.Argument(help="As deployment files name it: a-z, 0-9, hyphens.", metavar="NAME")
]


@app.command(name="set")
def set_(
    name: SecretName,
    *,
    origin: Annotated[
        str,
        typer.Option("--for", help="The origin that it is sent to: https://HOST[:PORT]."),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Keep a credential that is read from standard input: user:password, or a token.

    It is never shown again, and sent to that origin alone. On a terminal it is asked for.

    Example: mm secret set models --for https://models.example.org
    """
    person = actor()
    from deployments import actions

    asked = sys.stdin.isatty()
    value = typer.prompt("secret", hide_input=True) if asked else sys.stdin.read()
    actions.set_source_secret(person, name, origin, value)
    if as_json:
        emit_json({"name": name, "for": origin_of(origin)})
    else:
        console.print(f"{escape(name)} is kept for {escape(origin_of(origin))}")


@app.command(name="list")
def list_(*, as_json: JsonFlag = False) -> None:
    """List names and origins of the secrets of this host.

    Example: mm secret list
    """
    known = list(SourceSecrets(Home.from_env()).names())
    if as_json:
        emit_json([{"name": name, "for": origin} for name, origin in known])
        return
    table(
        [Column("name", whole=True), Column("for", whole=True)],
        [[escape(name), escape(origin)] for name, origin in known],
        empty="no secrets",
    )


@app.command()
def remove(name: SecretName, *, as_json: JsonFlag = False) -> None:
    """Forget a secret; deployment files that name it can no longer be rebuilt.

    Example: mm secret remove models
    """
    person = actor()
    from deployments import actions

    actions.remove_source_secret(person, name)
    if as_json:
        emit_json({"name": name})
    else:
        console.print(f"{escape(name)} is forgotten")
