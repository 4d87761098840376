"""`mm env`: the Python environments in this machine's store, and why each package is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli.output import JsonFlag, console, counted, emit_json, escape
from mmadmin.cli.store_names import ObjectName, object_column, open_store, resolve_name
from mmadmin.cli.tables import Column, table
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.environments import package_changes, read_environment
from mmadmin.core.errors import InvalidInput

if TYPE_CHECKING:
    from mmadmin.core.environments import Environment
    from mmadmin.core.store import Store

app = typer.Typer(no_args_is_help=True, help="The Python environments in this machine's store.")
PackageName = Annotated[str, typer.Argument(help="A package of it.", metavar="PACKAGE")]


@app.command("list")
def list_environments(*, as_json: JsonFlag = False) -> None:
    """List the environments, with what each shares with the others.

    Example: mm env list
    """
    store = open_store()
    found = environments(store)
    shared = shared_bytes(store, list(found))
    if as_json:
        emit_json([_summary(store, name, found[name], shared[name]) for name in found])
        return
    table(
        [
            Column("size", whole=True, right=True),
            Column("shared", whole=True, right=True),
            Column("packages", whole=True, right=True, drop=1),
            Column("interpreter", whole=True, drop=2),
            object_column(),
        ],
        [
            [
                *(bytes_text(store.object_size(name)), bytes_text(shared[name])),
                *(str(len(one.packages)), escape(one.interpreter), escape(name)),
            ]
            for name, one in found.items()
        ],
        empty="the store has no Python environments",
    )


@app.command()
def show(name: ObjectName, *, as_json: JsonFlag = False) -> None:
    """List the packages of an environment, largest first, with the packages that need each.

    Example: mm env show engine-environment
    """
    store = open_store()
    full = resolve_name(store, name)
    found = environment(store, full)
    if as_json:
        shared = shared_bytes(store, list(environments(store)))
        packages = [
            {
                **package.as_json(),
                "why": found.why(package.name),
                "needed_by": found.needed_by(package.name),
            }
            for package in found.packages
        ]
        emit_json({**_summary(store, full, found, shared[full]), "packages": packages})
        return
    edges = found.edges()
    rows = []
    for package in sorted(found.packages, key=lambda one: (-one.size_bytes, one.name)):
        owners = sorted(owner for owner, needed in edges.items() if package.name in needed)
        needed_by = ", ".join(owner or "the requirements" for owner in owners)
        size = bytes_text(package.size_bytes)
        rows.append(
            [size, *map(escape, (package.name, package.version, package.licence, needed_by))]
        )
    table(
        [
            Column("size", whole=True, right=True),
            Column("package", whole=True),
            Column("version", whole=True),
            Column("licence", drop=2),
            Column("needed by", drop=1),
        ],
        rows,
        empty="it has no packages",
    )
    console.print(f"asked for: {escape(', '.join(found.requirements))}")
    for overlay in found.overlays:
        console.print(f"corrected: {escape(overlay['file'])}: {escape(overlay['reason'])}")
    for clash in found.clashes:
        console.print(
            escape(f"in two packages: {clash['file']}: of {clash['kept']}, not {clash['dropped']}")
        )


@app.command()
def why(name: ObjectName, package: PackageName, *, as_json: JsonFlag = False) -> None:
    """Say which requirement brings a package, over which others, and what needs it.

    Example: mm env why engine-environment sympy
    """
    store = open_store()
    found = environment(store, resolve_name(store, name))
    chain, owners = found.why(package), found.needed_by(package)
    if not chain:
        raise InvalidInput(
            f"nothing in the environment needs {package}",
            remedy="`mm env show` lists its packages and what was asked for",
        )
    if as_json:
        emit_json({"package": chain[-1], "why": chain, "needed_by": owners})
        return
    console.print(escape(" → ".join(["requirements", *chain])))
    console.print(escape("needed by " + ", ".join(one or "the requirements" for one in owners)))


@app.command()
def diff(before: ObjectName, after: ObjectName, *, as_json: JsonFlag = False) -> None:
    """List the packages added, gone and changed between two environments.

    Example: mm env diff 3f1c09ab47d2 5d20aa17c0e4
    """
    store = open_store()
    was, now = (
        {one.name: one.version for one in environment(store, resolve_name(store, name)).packages}
        for name in (before, after)
    )
    changes = list(package_changes(was, now))
    if as_json:
        emit_json([{"name": c.name, "before": c.before, "after": c.after} for c in changes])
        return
    table(
        [Column("package", whole=True), Column("before", whole=True), Column("after", whole=True)],
        [[escape(c.name), escape(c.before or "none"), escape(c.after or "none")] for c in changes],
        empty="both have the same packages",
    )
    if changes:
        console.print(counted(len(changes), "package"))


def environments(store: Store) -> dict[str, Environment]:
    """The environments of a store by their objects' names."""
    found = {name: read_environment(store.object_path(name)) for name in store.names()}
    return {name: one for name, one in found.items() if one is not None}


def environment(store: Store, name: str) -> Environment:
    """One of them. Raises `InvalidInput` for another object."""
    found = read_environment(store.object_path(name))
    if found is None:
        raise InvalidInput(f"{name} is not an environment", remedy="`mm env list` lists them")
    return found


def shared_bytes(store: Store, names: list[str]) -> dict[str, int]:
    """Of each object, the bytes of files that another of them has as well: stored once."""
    files = {}
    for name in names:
        found = store.object(name)
        entries = found.files if found else ()  # collected meanwhile
        files[name] = {(one.sha256, one.executable): one.size for one in entries}
    holders: dict[tuple[str, bool], int] = {}
    for held in files.values():
        for file in held:
            holders[file] = holders.get(file, 0) + 1
    return {
        name: sum(size for file, size in held.items() if holders[file] > 1)
        for name, held in files.items()
    }


def _summary(store: Store, name: str, found: Environment, shared: int) -> dict[str, object]:
    """An environment without its packages, as data."""
    return {
        "name": name,
        "interpreter": found.interpreter,
        "requirements": list(found.requirements),
        "package_count": len(found.packages),
        "size_bytes": store.object_size(name),
        "shared_bytes": shared,
        "overlays": [dict(one) for one in found.overlays],
        "clashes": [dict(one) for one in found.clashes],
    }
