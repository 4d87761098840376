"""`mm fit`, `mm hub`: know before the download.

Neither needs the panel, the broker or a database; `fit` takes this machine as the host, or one
that is only described.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmadmin.cli.deployments import SpecFile, read_spec
from mmadmin.cli.hub_progress import hub_for, reporting
from mmadmin.cli.output import JsonFlag, console, counted, emit_json, escape
from mmadmin.cli.tables import Column, table
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from mmadmin.core.fit.facts import HostFacts
    from mmadmin.core.fit.placement import Answer, Wanted
    from mmadmin.core.spec.spec import Spec
    from mmadmin.host.fit import Look

HOSTS = Path(__file__).resolve().parents[2] / "deployments" / "hosts"

OnHost = Annotated[
    str,
    typer.Option("--on", help="A described host (v100x4, h200, cpu, …) instead of this machine."),
]
Revision = Annotated[str, typer.Option(help="Branch, tag or commit.")]


def fit(file: SpecFile, *, on: OnHost = "", as_json: JsonFlag = False) -> None:
    """Say whether a deployment fits a host, on which GPUs, and what would make it fit.

    Reads the model's header from the hub by ranges; downloads nothing else. A model of a package or
    an address is read in the store, once it is there. Ends with 1 when it does not fit.

    Example: mm fit deployments/catalog/mistral-medium-3.5-v100.toml --on v100x4
    """
    from mmadmin.core.fit.described_host import described_host
    from mmadmin.core.fit.placement import HostView, place
    from mmadmin.core.spec.spec import parse_spec
    from mmadmin.host.facts import host_facts
    from mmadmin.host.fit import (
        answer_as_json,
        calibration_of,
        look,
        running_engines,
        wanted_of,
    )

    spec = parse_spec(read_spec(file))
    home = Home.from_env()
    if on:
        facts = described_host(HOSTS, on)
        host = HostView(on, facts)
    else:
        facts = host_facts(home.store)
        engines = running_engines(home, facts)
        host = HostView("this machine", facts, engines, calibration_of(home))
    with reporting("looking at the model's header", quiet=as_json) as say:
        seen = _stored(spec, home) or look(spec, hub_for(say))
    wanted = wanted_of(spec, seen.header, attachment_bytes=seen.attachment_bytes)
    answer = place(wanted, [host])
    rows = answer_as_json(answer)
    room = _room(answer, wanted, facts)
    if as_json:
        emit_json(
            {
                "model": seen.where,
                "quant": seen.label,
                "size_bytes": seen.size_bytes,
                "licence": seen.listing.licence if seen.listing else "",
                "answers": rows,
                **room,
            }
        )
    else:
        console.print(
            f"[bold]{escape(seen.label)}[/] of {escape(seen.where)}, "
            f"{bytes_text(seen.size_bytes)}, {seen.header.parameters / 1e9:.1f} B parameters"
        )
        for row in rows:
            _show(row)
        if room:
            console.print(
                f"at most {room['largest_context']} tokens a request, or "
                f"{counted(room['most_slots'], 'request')} of this context at once"
            )
    if not answer.candidates:
        raise typer.Exit(1)


def _stored(spec: Spec, home: Home) -> Look | None:
    """A model whose header no one can read before the download, where it is in the store."""
    from mmadmin.core.store import Store

    if spec.model.source in {"hub", "path"} or not home.store.exists():
        return None
    from mmadmin.cli.build import locked
    from mmadmin.host.fit import stored

    return stored(spec, locked(spec, home, quiet=True), Store(home.store))


def _room(answer: Answer, wanted: Wanted, facts: HostFacts) -> dict[str, int]:
    """How far context and slots could go on the GPUs that were found; empty without them."""
    from mmadmin.core.fit.estimate import Room, device_of
    from mmadmin.core.fit.placement import RESERVE_BYTES

    if not answer.candidates or not answer.candidates[0].devices:
        return {}
    chosen = answer.candidates[0].devices
    devices = [device_of(gpu) for gpu in facts.gpus if gpu.index in chosen]
    reach = wanted.memory.reach(wanted.header, wanted.options, devices, Room(RESERVE_BYTES))
    return {"largest_context": reach.largest_context, "most_slots": reach.most_slots}


def _show(row: dict[str, Any]) -> None:
    mark = "[green]fits[/]" if row["ok"] else "[red]does not fit[/]"
    console.print(f"{mark}: {escape(row['words'])}")
    for position, size in enumerate(row["per_device_bytes"]):
        device = row["devices"][position] if row["devices"] else position
        console.print(f"  GPU {device}: {bytes_text(size)}")
    if row["host_bytes"]:
        console.print(f"  main memory: {bytes_text(row['host_bytes'])}")
    for finding in row["warnings"]:
        console.print(f"  [yellow]{finding['severity']}[/]: {escape(finding['words'])}")
        console.print(f"    {escape(finding['remedy'])}")
    if not row["ok"] and row.get("remedy"):
        console.print(f"  instead: {escape(str(row['remedy']))}")


def hub(
    repo: Annotated[
        str, typer.Argument(help="The repository on the hub: owner/name.", metavar="REPO")
    ],
    *,
    revision: Revision = "main",
    as_json: JsonFlag = False,
) -> None:
    """List the models of a hub repository: quants, sizes, licence. Downloads nothing.

    Example: mm hub unsloth/Mistral-Medium-3.5-128B-GGUF
    """
    from mmadmin.host.hub_browser import browse as browse_hub

    with reporting(f"asking the hub for {repo}", quiet=as_json) as say:
        found = browse_hub(hub_for(say), repo, revision)
    if as_json:
        emit_json(found.as_json())
        return
    rows = [
        [one.label, one.kind, bytes_text(one.size_bytes), str(one.shards), one.name]
        for one in found.sets
    ]
    console.print(f"[bold]{escape(found.repo)}[/] at {found.commit[:12]}")
    console.print(
        f"licence: {escape(found.licence or 'not declared')} {escape(found.licence_link)}"
    )
    columns = [
        Column("quant", whole=True),
        Column("kind", whole=True, drop=2),
        Column("size", whole=True, right=True),
        Column("files", whole=True, right=True, drop=3),
        Column("name", drop=1),
    ]
    table(columns, rows, empty="it holds no model")
    for note in found.notes:
        console.print(f"[yellow]note[/]: {escape(note)}")
