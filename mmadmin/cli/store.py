"""`mm store`: what lies in this machine's store."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.markup import escape

from mmadmin.cli.output import JsonFlag, bytes_text, emit_json, table
from mmadmin.core.errors import NotFound
from mmadmin.core.home import Home
from mmadmin.core.store import Store

app = typer.Typer(no_args_is_help=True, help="What lies in this machine's store.")

ObjectName = Annotated[
    str, typer.Argument(help="An object's name, or the beginning of it.", metavar="OBJECT")
]


def open_store() -> Store:
    """The store of this machine."""
    return Store(Home.from_env().store)


def resolve_name(store: Store, text: str) -> str:
    """The one object whose name begins (or whose own name is) so; `NotFound` otherwise."""
    names = [found.name for found in store.objects()]
    matches = [n for n in names if n == text or n.startswith(text) or n[65:] == text]
    if len(matches) != 1:
        raise NotFound(
            f"{len(matches)} objects are called {text!r}"
            if matches
            else f"no object is called {text!r}",
            remedy="give more of the name" if matches else "`mm store ls` lists them",
            candidates=matches[:10],
        )
    return matches[0]


@app.command("ls")
def list_objects(*, as_json: JsonFlag = False) -> None:
    """List the objects, largest first.

    Example: mm store ls
    """
    store = open_store()
    found = sorted(store.objects(), key=lambda o: o.size, reverse=True)
    if as_json:
        emit_json([{"name": o.name, "size": o.size, "refs": list(o.refs)} for o in found])
        return
    table(
        ["size", "object"],
        [[bytes_text(o.size), escape(o.name)] for o in found],
        empty="the store is empty",
    )


@app.command()
def path(name: ObjectName, *, as_json: JsonFlag = False) -> None:
    """Print where an object lies.

    Example: mm store path smollm2-135m
    """
    store = open_store()
    full = resolve_name(store, name)
    where = store.object_path(full)
    if as_json:
        emit_json({"name": full, "path": str(where)})
    else:
        sys.stdout.write(f"{where}\n")
