"""`mm set`, `mm unset`: what an installation is set to, and changing it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated

import typer

from mmadmin.cli import installation
from mmadmin.cli.output import JsonFlag, console, emit_json, escape
from mmadmin.cli.settings_file import check_settings, read_settings, write_settings
from mmadmin.cli.tables import Column, table
from mmadmin.core.errors import InvalidInput
from mmadmin.core.home import Home
from mmadmin.core.variables import PYTHON_SERVICES, REMEMBERED, SECTIONS, VARIABLES, Variable


def set_(
    assignments: Annotated[
        list[str] | None, typer.Argument(help="What to change.", metavar="NAME=VALUE …")
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Change settings of this installation; without arguments, list them.

    All values are checked before any is kept. Services get them with the next `mm up`, which
    restarts those that read a changed one. Secrets go into files of their own and are never shown.

    Example: mm set HF_ENDPOINT=https://hub.example.org MM_BUILDS_AT_ONCE=3
    """
    home = Home.from_env()
    if not assignments:
        _list(home, as_json=as_json)
        return
    wanted: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not value:
            raise InvalidInput(
                f"{name}: a value is missing",
                remedy=f"write {name}=VALUE; `mm unset {name}` takes a setting away",
            )
        wanted[name] = _known(name).clean(value)
    _keep(home, wanted, as_json=as_json)


def unset(
    names: Annotated[list[str], typer.Argument(help="Which settings.", metavar="NAME …")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Take settings away: their defaults hold again after the next `mm up`.

    Example: mm unset HF_ENDPOINT
    """
    for name in names:
        _known(name)
    _keep(Home.from_env(), dict.fromkeys(names, ""), as_json=as_json)


def _known(name: str) -> Variable:
    """The setting of that name. Raises `InvalidInput`."""
    if name in REMEMBERED:
        return REMEMBERED[name]
    if name in VARIABLES:
        raise InvalidInput(
            f"{name} is not kept", remedy="set it in the environment of the program that reads it"
        )
    near = difflib.get_close_matches(name.upper(), REMEMBERED, n=1, cutoff=0.7)
    raise InvalidInput(
        f"{name} is not a setting",
        remedy=f"did you mean {near[0]}?" if near else "`mm set` lists the settings",
    )


def _keep(home: Home, changes: Mapping[str, str], *, as_json: bool) -> None:
    """Check all settings as they would be, then keep them, and say what is to be done."""
    kept = read_settings(home)
    after = {name: value for name, value in {**kept.values, **changes}.items() if value}
    check_settings(after)
    installation.refuse_other_database(home, after.get("DATABASE_URL", ""))
    installation.prepare(home)
    rest = tuple(problem for problem in kept.problems if problem.name not in changes)
    write_settings(home, after, unusable=rest)
    changed = [name for name in changes if kept.values.get(name, "") != changes[name]]
    services = [s for s in PYTHON_SERVICES if any(s in REMEMBERED[n].services for n in changed)]
    if as_json:
        emit_json({"changed": changed, "restarts": services})
        return
    if not changed:
        console.print("nothing changed")
    for name in changed:
        value = REMEMBERED[name].shown(changes[name]) if changes[name] else "(default)"
        console.print(f"{name}  {escape(value)}")
        if os.environ.get(name) not in (None, kept.values.get(name)):
            console.print(f"[yellow]warning[/]  {name} in this shell overrides it: unset {name}")
    if services:
        console.print(f"[dim]`mm up` applies it and restarts {', '.join(services)}[/]")


def _list(home: Home, *, as_json: bool) -> None:
    """Every setting with its value, and where that comes from."""
    kept = read_settings(home).values
    rows = []
    for variable in (v for section in SECTIONS.values() for v in section if v.remembered):
        value = os.environ.get(variable.name, "")
        source = "settings" if kept.get(variable.name) == value else "environment"
        rows.append(
            {
                "name": variable.name,
                "value": variable.shown(value) if value else None,
                "source": source if value else "default",
                "default": variable.default,
                "meaning": variable.meaning,
            }
        )
    if as_json:
        emit_json(rows)
        return
    table(
        [Column("setting", whole=True), Column("value"), Column("from", whole=True, drop=1)],
        [
            [
                row["name"] or "",
                escape(row["value"]) if row["value"] else f"[dim]{escape(row['default'] or '')}[/]",
                row["source"] or "",
            ]
            for row in rows
        ],
        empty="there are no settings",
    )
