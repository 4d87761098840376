"""`mm new`: the file of a first deployment of one's own, for a model that fits this machine.

Asks on a terminal for what no option said. Reads headers only; the file is all that it writes.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from mmadmin.cli.hub_progress import hub_for, reporting
from mmadmin.cli.output import JsonFlag, console, emit_json, escape
from mmadmin.cli.tables import Column, table
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.catalog import DEFAULT_ENGINE
from mmadmin.core.errors import InvalidInput, NotFound
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from mmadmin.core.fit.placement import HostView
    from mmadmin.core.spec.spec import Spec
    from mmadmin.host.adopt import Found

CATALOG = Path(__file__).resolve().parents[2] / "deployments" / "catalog"
ENGINE_OF = CATALOG / "smollm2-135m.toml"
"""The deployment whose engine a new one begins with."""
HUB = "a repository of the model hub"
FILE = "a model file on this machine"
CONTEXT_TRIES = 8
"""How often the context is asked for again until it fits."""

Model = dict[str, Any]


def new(
    file: Annotated[
        Path | None,
        typer.Argument(help="The file to write; by default NAME.toml here.", metavar="[FILE]"),
    ] = None,
    *,
    hub: Annotated[str, typer.Option(help="A hub repository, owner/name.", metavar="REPO")] = "",
    quant: Annotated[str, typer.Option(help="The quant; else the largest that fits.")] = "",
    path: Annotated[
        str,
        typer.Option(help="A model file on this machine; of shards, the first.", metavar="PATH"),
    ] = "",
    cached: Annotated[
        str,
        typer.Option(
            help="A model of Ollama's or the hub's cache on this machine, by a part of its name.",
            metavar="NAME",
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="The deployment's name.")] = "",
    context: Annotated[int, typer.Option(help="Tokens per request.", min=0)] = 0,
    slots: Annotated[int, typer.Option(help="Requests at the same time.", min=0)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the deployment file of a model of your own, after asking what it needs.

    Shows which models fit this machine, and reads headers only: nothing is downloaded and nothing
    but the file is written. Without a terminal, options say everything. Ends with 1 when the
    deployment does not fit; the file is written all the same, to be changed.

    Example: mm new --hub OWNER/NAME --quant Q4_K_M
    """
    from mmadmin.core.spec.first_file import first_file, first_name
    from mmadmin.core.spec.spec import parse_spec

    if sum(map(bool, (hub, path, cached))) > 1:
        raise InvalidInput(
            "a model has one source", remedy="give one of --hub, --path and --cached"
        )
    asks = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    host = _this_machine()
    model, called = _model(hub, quant, path, cached, host, asks=asks, as_json=as_json)
    name = name or _ask("name of the deployment", first_name(called), asks=asks)
    target = file or Path(f"{name}.toml")
    if target.exists() and not force:
        raise InvalidInput(f"{target} exists", remedy="name another file, or replace it by --force")
    engine = tomllib.loads(ENGINE_OF.read_text(encoding="utf-8"))["engine"]
    schema = f"{_panel()}/api/v1/deployment-file.schema.json"
    serve = {k: v for k, v in {"context": context, "slots": slots}.items() if v}
    fits: dict[str, Any] = {}
    for _ in range(CONTEXT_TRIES):
        text = first_file(name, model, engine, serve, schema=schema)
        spec = parse_spec(text)
        fits = _fit(spec, host, as_json=as_json)
        if fits["ok"] or not asks:
            break
        console.print(f"[red]does not fit[/]: {escape(fits['words'])}")
        if fits["remedy"]:
            console.print(f"  instead: {escape(fits['remedy'])}")
        wanted = _ask("tokens per request (empty: write it as it is)", "", asks=asks)
        if not wanted.isdecimal():
            break
        serve["context"] = int(wanted)
    _write(target, text, force=force)
    if as_json:
        emit_json({"file": str(target), "name": name, "fit": fits, "spec_toml": text})
    else:
        mark = "[green]fits[/]" if fits["ok"] else "[red]does not fit[/]"
        console.print(f"{mark}: {escape(fits['words'])}")
        console.print(f"wrote {escape(str(target))}")
        console.print(f"next: [bold]mm plan {escape(str(target))}[/], then mm deploy")
    if not fits["ok"]:
        raise typer.Exit(1)


def _model(
    hub: str,
    quant: str,
    path: str,
    cached: str,
    host: HostView,
    *,
    asks: bool,
    as_json: bool,
) -> tuple[Model, str]:
    """The `[model]` table, and the name that its source gives it."""
    found: Sequence[Found] = ()
    if not (hub or path):
        found = _in_caches()
    if not (hub or path or cached):
        if not asks:
            raise InvalidInput(
                "which model?",
                remedy="give --hub REPO, --path FILE or --cached NAME, or run it on a terminal",
            )
        choices = [HUB, FILE, *(f"{o.label} ({bytes_text(o.size_bytes)})" for o in found)]
        chosen = _choose("the model comes from", choices)
        if chosen == 0:
            hub = _ask("repository (owner/name)", "", asks=True)
        elif chosen == 1:
            path = _ask("path of the model file", "", asks=True)
        else:
            return _of_cache(found[chosen - 2])
    if cached:
        return _of_cache(_named(cached, found))
    if path:
        where = Path(path).expanduser().resolve()
        if not where.is_file():
            raise NotFound(
                f"{where} does not exist", remedy="name a model file; of shards, the first"
            )
        return {"source": "path", "path": str(where)}, where.name
    return _of_hub(hub, quant, host, asks=asks, as_json=as_json), hub


def _in_caches() -> list[Found]:
    from mmadmin.host.adopt import find_in_hub_cache, find_in_ollama, hub_cache, ollama_store

    return [*find_in_ollama(ollama_store()), *find_in_hub_cache(hub_cache())]


def _named(part: str, found: Sequence[Found]) -> Found:
    """The one model of the caches whose label has that part."""
    fitting = [one for one in found if part.lower() in one.label.lower()]
    if len(fitting) != 1:
        what = "no model" if not fitting else f"{len(fitting)} models"
        labels = ", ".join(one.label for one in fitting or found)
        raise NotFound(
            f"{what} of the caches on this machine have {part} in their names",
            remedy=f"there are: {labels}" if labels else "use --hub or --path",
        )
    return fitting[0]


def _of_cache(found: Found) -> tuple[Model, str]:
    first = min(found.files)
    return {"source": "path", "path": str(found.files[first])}, first


def _of_hub(repo: str, quant: str, host: HostView, *, asks: bool, as_json: bool) -> Model:
    """The table for a quant: the one asked for, the one chosen, or the largest that fits."""
    from mmadmin.host.fit import offers

    with reporting(f"asking the hub for {repo}", quiet=as_json) as say:
        found = cast("dict[str, Any]", offers(hub_for(say), repo, "main", [host]))
    rows = [o for o in found["offers"] if o["quant"] and o["engine"] == DEFAULT_ENGINE]
    if not as_json:
        for note in found["notes"]:
            console.print(f"[yellow]note[/]: {escape(str(note))}")
    if not rows:
        raise NotFound(
            f"{repo} has no model for {DEFAULT_ENGINE}",
            remedy="try another, or begin with a file of deployments/catalog for its engine",
        )
    names = [str(offer["quant"]) for offer in rows]
    fitting = [str(offer["quant"]) for offer in rows if offer["fit"][0]["ok"]]
    if not quant and asks:
        console.print(f"licence: {escape(found['licence'] or 'not declared')}")
        columns = [Column("", right=True), Column("quant", whole=True), Column("size"), Column("")]
        table(columns, [[str(n), *_offered(offer)] for n, offer in enumerate(rows, 1)], empty="")
        quant = _ask("quant", (fitting or names)[-1], asks=True)
        if quant.isdecimal() and 0 < int(quant) <= len(names):
            quant = names[int(quant) - 1]
    quant = quant or (fitting[-1] if fitting else "")
    if quant not in names:
        raise NotFound(
            f"{repo} has no quant {quant}" if quant else "no quant fits this machine",
            remedy=f"there are: {', '.join(names)}",
        )
    return {"source": "hub", "repo": found["repo"], "revision": found["commit"], "quant": quant}


def _offered(offer: Mapping[str, Any]) -> list[str]:
    fit = offer["fit"][0]
    said = "[green]fits[/]" if fit["ok"] else f"[red]no[/]: {escape(fit['words'])}"
    return [escape(offer["quant"]), bytes_text(offer["size_bytes"]), said]


def _this_machine() -> HostView:
    from mmadmin.core.fit.placement import HostView
    from mmadmin.host.facts import host_facts
    from mmadmin.host.fit import calibration_of, running_engines

    home = Home.from_env()
    facts = host_facts(home.store)
    return HostView("this machine", facts, running_engines(home, facts), calibration_of(home))


def _fit(spec: Spec, host: HostView, *, as_json: bool) -> dict[str, Any]:
    """Whether the deployment fits: `ok`, `words`, `remedy`."""
    from mmadmin.core.fit.placement import place
    from mmadmin.host.fit import answer_as_json, look, wanted_of

    with reporting("looking at the model's header", quiet=as_json) as say:
        seen = look(spec, hub_for(say))
    wanted = wanted_of(spec, seen.header, attachment_bytes=seen.attachment_bytes)
    row = answer_as_json(place(wanted, [host]))[0]
    return {"ok": row["ok"], "words": row["words"], "remedy": str(row.get("remedy") or "")}


def _write(target: Path, text: str, *, force: bool) -> None:
    try:
        with target.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise InvalidInput(
            f"{target} cannot be written: {error.strerror}", remedy="name another file"
        ) from error


def _panel() -> str:
    from mmadmin.cli.installation import panel_url
    from mmadmin.core.home import Ports

    return panel_url(Ports.from_env())


def _ask(question: str, default: str, *, asks: bool) -> str:
    """An answer; the default where nobody can be asked."""
    if not asks:
        return default
    return str(typer.prompt(question, default=default, show_default=bool(default))).strip()


def _choose(question: str, choices: Sequence[str]) -> int:
    """The index of one of several."""
    for number, choice in enumerate(choices, 1):
        console.print(f"  {number}  {escape(choice)}")
    while not 0 < (answer := int(typer.prompt(question, default=1, type=int))) <= len(choices):
        console.print(f"type a number from 1 to {len(choices)}")
    return answer - 1
