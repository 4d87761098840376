"""`mm store`: what lies in this machine's store, why, and what it is made of."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mmadmin.cli import store_exchange, store_maintenance
from mmadmin.cli.output import JsonFlag, console, counted, emit_json, escape
from mmadmin.cli.store_names import ObjectName, object_column, open_store, resolve_name
from mmadmin.cli.tables import Column, table
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import InvalidInput, NotFound

app = typer.Typer(no_args_is_help=True, help="What lies in this machine's store.")


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
        [Column("size", whole=True, right=True), object_column()],
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


@app.command()
def roots(*, as_json: JsonFlag = False) -> None:
    """List what keeps objects: generations, pins, running builds, running programs.

    Example: mm store roots
    """
    from mmadmin.core.store.graph import all_roots

    found = all_roots(open_store())
    if as_json:
        emit_json([root.as_json() for root in found])
        return
    table(
        [
            Column("kind", whole=True),
            object_column("key"),
            object_column(drop=1),
            Column("why", drop=2),
        ],
        [[escape(r.kind), escape(r.key), escape(r.object), escape(r.reason)] for r in found],
        empty="nothing is kept",
    )


@app.command()
def pin(
    name: ObjectName,
    reason: Annotated[str, typer.Option(help="Why it is kept.")] = "",
    *,
    as_json: JsonFlag = False,
) -> None:
    """Keep an object, with all it needs, until it is released.

    Example: mm store pin llama-server --reason "the reference for comparisons"
    """
    store = open_store()
    full = resolve_name(store, name)
    store.add_root("pin", full, full, reason or "pinned by hand")
    if as_json:
        emit_json({"kind": "pin", "key": full, "object": full})
    else:
        console.print(f"kept: {escape(full)}")


@app.command()
def release(
    kind: Annotated[
        str, typer.Argument(help="Its kind: pin, build, adopted, pulled, check.", metavar="KIND")
    ],
    key: Annotated[str, typer.Argument(help="Its key, or a part that only it has.", metavar="KEY")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Stop keeping an object for that reason; `mm store roots` lists kinds and keys.

    Which generations are kept is decided by the deployment's rule, and by pinning them.

    Example: mm store release adopted Qwen3-8B
    """
    store = open_store()
    if kind == "generation":
        raise InvalidInput(
            "generations are kept by their deployment's rule",
            remedy="archive the deployment, unpin the generation, or use `mm store gc --keep N`",
        )
    keys = [root.key for root in store.roots() if root.kind == kind and key in root.key]
    exact = [one for one in keys if one == key] or keys
    if len(exact) != 1:
        raise NotFound(
            f"{counted(len(exact), 'root')} of kind {kind} with {key!r} in the key",
            remedy="`mm store roots` lists them",
        )
    store.remove_root(kind, exact[0])
    if as_json:
        emit_json({"kind": kind, "key": exact[0]})
    else:
        console.print(f"no longer kept as {escape(kind)} {escape(exact[0])}")


@app.command()
def why(name: ObjectName, *, as_json: JsonFlag = False) -> None:
    """Say who needs an object: each root that keeps it, and the way from there.

    Example: mm store why llama-server
    """
    from mmadmin.core.store.explain import why as needs

    store = open_store()
    found = needs(store, resolve_name(store, name))
    if as_json:
        emit_json([need.as_json() for need in found])
        return
    if not found:
        console.print("unused: `mm store gc` would free it")
    for need in found:
        root = need.root
        console.print(f"[bold]{escape(root.kind)} {escape(root.key)}[/]  {escape(root.reason)}")
        for depth, step in enumerate(need.path):
            console.print("    " + "  " * depth + escape(step))


@app.command()
def closure(name: ObjectName, *, as_json: JsonFlag = False) -> None:
    """List an object with everything that it needs, with sizes.

    Own bytes are those that no other object shares.

    Example: mm store closure smollm2-135m
    """
    from mmadmin.core.store.explain import sizes

    store = open_store()
    found = sizes(store, store.closure(resolve_name(store, name)))
    if as_json:
        emit_json([{"name": s.name, "size": s.size_bytes, "own": s.own_bytes} for s in found])
        return
    table(
        [
            Column("size", whole=True, right=True),
            Column("own", whole=True, right=True, drop=1),
            object_column(),
        ],
        [[bytes_text(s.size_bytes), bytes_text(s.own_bytes), escape(s.name)] for s in found],
        empty="",
    )
    total = bytes_text(sum(s.size_bytes for s in found))
    console.print(f"{total} in {counted(len(found), 'object')}")


app.command()(store_maintenance.gc)
app.command("verify")(store_maintenance.verify_objects)
app.command()(store_maintenance.repair)
app.command()(store_maintenance.reindex)
app.command()(store_exchange.key)
app.command()(store_exchange.push)
app.command()(store_exchange.pull)
app.command()(store_exchange.serve)
app.command()(store_exchange.adopt)
