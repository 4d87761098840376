"""`mm store`: exchanging objects with other stores: push, pull, serve, and the keys for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli.output import JsonFlag, console, counted, emit_json, errors, escape
from mmadmin.cli.store_maintenance import progress_bar
from mmadmin.cli.store_names import object_column, open_store, resolve_name
from mmadmin.cli.tables import Column, table
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import InvalidInput, NotFound
from mmadmin.core.home import Home
from mmadmin.core.private_file import write_private

if TYPE_CHECKING:
    from mmadmin.core.store.attestations import SigningKey


CacheAddress = Annotated[
    str, typer.Argument(help="A folder, or s3://BUCKET/PREFIX.", metavar="CACHE")
]


def signing_key(home: Home) -> SigningKey | None:
    """The key of this store, if it was made."""
    from mmadmin.core.store.attestations import SigningKey

    try:
        return SigningKey.from_text((home.secrets / "store_key").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def key(
    name: Annotated[
        str, typer.Argument(help="Name of a new key; without it, show.", metavar="NAME")
    ] = "",
    *,
    as_json: JsonFlag = False,
) -> None:
    """Make the key with which this store signs what it built, or show its public half.

    Others put the public half under "trusted" into their MM_HOME/substituters.json.

    Example: mm store key team-gpu-1
    """
    from mmadmin.core.store.attestations import SigningKey

    home = Home.from_env()
    found = signing_key(home)
    if found is None:
        if not name:
            raise NotFound("this store has no key yet", remedy="make one: `mm store key NAME`")
        found = SigningKey.generate(name)
        home.secrets.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(home.secrets / "store_key", found.secret_text() + "\n")
    elif name and name != found.name:
        raise InvalidInput(
            f"this store's key is called {found.name}",
            remedy="to replace it, remove MM_HOME/secrets/store_key first",
        )
    if as_json:
        emit_json({"name": found.name, "public": found.public_text()})
    else:
        sys.stdout.write(found.public_text() + "\n")


def push(
    cache: CacheAddress,
    names: Annotated[
        list[str], typer.Argument(help="Objects, with all they need.", metavar="OBJECT")
    ],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Push objects, with everything they need, to a binary cache (a folder or a bucket).

    Signed with this store's key, if it has one (mm store key). An interrupted push resumes.

    Example: mm store push /mnt/share/cache smollm2-135m
    """
    from mmadmin.core.store.push import push as push_to
    from mmadmin.host.binary_caches import writable_cache_at

    os.umask(0o022)  # unlike MM_HOME, a cache is for others to read
    home = Home.from_env()
    store = open_store()
    target = writable_cache_at(cache)
    signer = signing_key(home)
    wanted = [resolve_name(store, name) for name in names]
    with progress_bar("pushing", quiet=as_json) as hook:
        done = push_to(store, wanted, target, signer=signer, progress=hook)
    if as_json:
        emit_json(
            {
                "objects": done.objects,
                "signatures": done.attestations,
                "blobs": done.blobs,
                "sent_bytes": done.sent_bytes,
                "signed_by": signer.name if signer else None,
            }
        )
        return
    message = f"signed by {signer.name}" if signer else "unsigned: others must pull by name"
    console.print(
        f"{counted(done.objects, 'object')} and {counted(done.attestations, 'signed step')} there, "
        f"{counted(done.blobs, 'file')} sent "
        f"({bytes_text(done.sent_bytes)}), {escape(message)}"
    )


def pull(
    name: Annotated[str, typer.Argument(help="The full name of an object.", metavar="OBJECT")],
    cache: Annotated[
        str,
        typer.Option("--from", help="A cache to use instead of the configured ones."),
    ] = "",
    *,
    as_json: JsonFlag = False,
) -> None:
    """Get an object, with all it needs, from the configured binary caches or another one.

    Example: mm store pull 3f1c…-smollm2-135m --from https://cache.example.org
    """
    from mmadmin.core.store.attestations import Trust
    from mmadmin.core.store.substitute import Substituter
    from mmadmin.host.binary_caches import cache_at, configured_caches

    home = Home.from_env()
    store = open_store()
    caches, trust = ([cache_at(cache)], Trust({})) if cache else configured_caches(home)
    with (
        progress_bar("pulling", quiet=as_json) as hook,
        store.lease("pull") as lease,
    ):
        if not caches:
            raise NotFound(
                "no binary cache is configured",
                remedy="write MM_HOME/substituters.json (see docs/store.md), or use --from",
            )
        substituter = Substituter(
            store, caches, trust, hook, lambda line: errors.print(escape(line), style="dim")
        )
        if not substituter.pull(name, lease):
            asked = ", ".join(one.label for one in caches)
            raise NotFound(f"{name} is not complete in {asked}")
        store.add_root("pulled", name, name, "pulled by hand")
    if as_json:
        emit_json({"name": name, "path": str(store.object_path(name))})
    else:
        sys.stdout.write(f"{store.object_path(name)}\n")


def adopt(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Which: parts of what the list shows.", metavar="MODEL"),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Adopt everything that is found.")] = False,
    hub_cache: Annotated[Path | None, typer.Option(help="Another hub cache.")] = None,
    ollama: Annotated[Path | None, typer.Option(help="Another Ollama store.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List models in the hub's cache and in Ollama's store, or take them over without a copy.

    A later build that wants one of them by its digest then downloads nothing.

    Example: mm store adopt Qwen3-8B
    """
    from mmadmin.host import adopt as caches

    found = caches.find_in_hub_cache(hub_cache or caches.hub_cache())
    found += caches.find_in_ollama(ollama or caches.ollama_store())
    if names:
        found = [one for one in found if any(name in one.label for name in names)]
        if not found:
            raise NotFound("no cache has such a model", remedy="`mm store adopt` lists them")
    rows = []
    store = open_store()
    for one in found:
        row = {"label": one.label, "size": one.size_bytes, "object": ""}
        if names or every:
            with progress_bar(one.name, quiet=as_json) as hook:
                row["object"] = caches.adopt(store, one, progress=hook).name
        rows.append(row)
    if as_json:
        emit_json(rows)
        return
    table(
        [Column("size", whole=True, right=True), Column("model"), object_column()],
        [
            [bytes_text(o.size_bytes), escape(o.label), escape(str(r["object"]))]
            for o, r in zip(found, rows, strict=True)
        ],
        empty="the caches hold no models",
    )
    if names or every:
        console.print("where linked, the cache's file is read-only now, its time set to 1970")


def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any.")] = 8090,
) -> None:
    """Serve this store to other stores over HTTP, read-only, until interrupted.

    Everyone who reaches the port can read every object.

    Example: mm store serve --host 0.0.0.0
    """
    from mmadmin.host.store_server import serve as serve_store

    home = Home.from_env()
    signer = signing_key(home)
    store_root: Path = home.store
    open_store().close()
    with serve_store(store_root, (host, port), signer=signer) as server:
        message = f"signing as {signer.name}" if signer else "without a key: unsigned"
        console.print(f"http://{host}:{server.server_address[1]}  [dim]{escape(message)}[/]")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
