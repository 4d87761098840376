"""`mm tunnel`: a public address for the gate through Cloudflare, without an open port."""

from __future__ import annotations

from typing import Annotated

import typer

from mmadmin.cli.output import JsonFlag, console, emit_json, escape
from mmadmin.cli.tables import Column, table
from mmadmin.core.home import Home, Ports

app = typer.Typer(
    no_args_is_help=True,
    help="A public address through Cloudflare: a quick tunnel, or a named one with its token.",
)

Name = Annotated[str, typer.Argument(help="Name of the tunnel.", metavar="NAME")]


@app.command()
def start(
    name: Name = "public",
    *,
    hostname: Annotated[
        str, typer.Option(help="Public host name of a named tunnel; without it: a quick tunnel.")
    ] = "",
    token_file: Annotated[
        str, typer.Option(help="File (mode 0600) with the token of a named tunnel.")
    ] = "",
    expose_panel: Annotated[
        bool, typer.Option("--expose-panel", help="Lead to the panel instead of the gate.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Start a tunnel, wait for its address and keep it running under the supervisor.

    Example: mm tunnel start own --hostname api.example.org --token-file /etc/mm/tunnel.token
    """
    from mmadmin.host import tunnel

    wanted = tunnel.Tunnel(
        name,
        "named" if hostname or token_file else "quick",
        "panel" if expose_panel else "gate",
        hostname,
        token_file,
    )
    state = tunnel.start(
        Home.from_env(),
        Ports.from_env(),
        wanted,
        expose_panel=expose_panel,
        on_progress=lambda line: None if as_json else console.print(f"[dim]{escape(line)}[/]"),
    )
    if as_json:
        emit_json(state.as_json())
        return
    console.print(f"{escape(state.tunnel.target)}: [bold]{escape(state.url)}[/]")
    if expose_panel:
        console.print(
            f"[yellow]set PUBLIC_ORIGIN={escape(state.url)}[/] and run mm up: "
            "the panel refuses forms from an address that it does not know"
        )
    else:
        console.print(f"clients use {escape(state.url)}/v1 with their keys")


@app.command()
def stop(name: Name = "public", *, as_json: JsonFlag = False) -> None:
    """Stop a tunnel; its address is gone at once.

    Example: mm tunnel stop own
    """
    from mmadmin.host import tunnel

    tunnel.stop(Home.from_env(), name)
    if as_json:
        emit_json({"name": name, "state": "stopped"})
    else:
        console.print(f"{escape(name)} is stopped")


@app.command("list")
def list_(*, as_json: JsonFlag = False) -> None:
    """List the tunnels with their addresses and states.

    Example: mm tunnel list
    """
    from mmadmin.host import tunnel

    states = tunnel.tunnels(Home.from_env())
    if as_json:
        emit_json([state.as_json() for state in states])
        return
    table(
        [
            Column("name", whole=True),
            Column("leads to", whole=True, drop=1),
            Column("address", whole=True),
            Column("state", whole=True),
        ],
        [[s.tunnel.name, s.tunnel.target, s.url, s.state] for s in states],
        empty="no tunnels",
    )


@app.command()
def fetch(
    url: Annotated[str, typer.Argument(help="Address of a cloudflared release.", metavar="URL")],
    sha256: Annotated[
        str, typer.Argument(help="Its sha256, as the release page says.", metavar="SHA256")
    ],
    size: Annotated[int, typer.Argument(help="Its size in bytes.", metavar="SIZE")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Download cloudflared by its digest, for hosts without Cloudflare's package.

    Example: mm tunnel fetch https://mirror.example.org/cloudflared-linux-amd64 3b71…c8 39911424
    """
    from mmadmin.host import tunnel

    found = tunnel.fetch_cloudflared(Home.from_env(), url, sha256, size)
    if as_json:
        emit_json({"path": str(found)})
    else:
        console.print(f"{escape(str(found))} is ready")
