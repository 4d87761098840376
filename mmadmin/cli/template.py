"""`mm template`: chat templates shown, patched and tried over a matrix of conversations."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmadmin.cli.deployments import read_spec
from mmadmin.cli.history import show_line
from mmadmin.cli.output import JsonFlag, coloured, console, emit_json, escape
from mmadmin.cli.records import MOST, actor
from mmadmin.cli.tables import Column, table
from mmadmin.core.errors import InvalidInput, NotFound
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from deployments.models import Generation
    from mmadmin.core.build.recipe import Json
    from mmadmin.core.chat_templates.patches import Renders
    from mmadmin.core.engines.protocol import System

app = typer.Typer(no_args_is_help=True, help="Show, patch and try chat templates.")

WhichTemplate = Annotated[
    str, typer.Argument(help="A template file, or a deployment's name.", metavar="NAME|FILE")
]
Number = Annotated[
    int | None,
    typer.Option("--generation", help="Which generation; else the live one.", min=1, max=MOST),
]


@app.command()
def show(which: WhichTemplate, *, generation: Number = None, as_json: JsonFlag = False) -> None:
    """Print the chat template that a deployment is served with.

    Example: mm template show smollm2-135m
    """
    text = _template(which, generation)
    if as_json:
        emit_json({"sha256": hashlib.sha256(text.encode()).hexdigest(), "template": text})
    else:
        sys.stdout.write(coloured(text.rstrip("\n")) + "\n")


@app.command(name="test")
def try_out(which: WhichTemplate, *, generation: Number = None, as_json: JsonFlag = False) -> None:
    """Render a template over a matrix of conversations; ends with 1 when the plain one fails.

    A template file is rendered in a sandbox. For a deployment that runs, its engine is asked too:
    what it renders is what clients get, and where the sandbox differs the line is shown.

    Example: mm template test smollm2-135m
    """
    from mmadmin.core.chat_templates.render import BOS
    from mmadmin.host.template_matrix import matrix, render_in_child

    template = _template(which, generation)
    digest = hashlib.sha256(template.encode()).hexdigest()
    engine = None if Path(which).is_file() else _engine_renders(which, generation)
    renders: Renders | None = None
    tokens: Mapping[str, Json] = {}
    if engine is not None:
        renders, tokens = engine
    child = render_in_child({which: template}, tokens)[which]
    rows = matrix(child, renders, bos=str(tokens.get("bos_token", BOS)))
    if as_json:
        emit_json({"sha256": digest, "engine_asked": renders is not None, "rows": rows})
    else:
        asked = "sandbox and engine" if renders is not None else "sandbox only, no engine"
        console.print(f"[dim]sha256 {digest}, {asked}[/]", soft_wrap=True)
        table(
            [
                Column("conversation", whole=True),
                Column("", whole=True),
                Column("what came of it"),
                Column("where the sandbox differs", drop=1),
            ],
            [
                [
                    row.conversation,
                    "[yellow]ignored[/]"
                    if row.ignored
                    else "[green]ok[/]"
                    if row.ok
                    else "[red]fails[/]",
                    escape(row.message),
                    f"[yellow]{escape(row.difference)}[/]" if row.difference else "",
                ]
                for row in rows
            ],
            empty="no conversation",
        )
    if not all(row.ok for row in rows if row.conversation == "plain"):
        raise typer.Exit(1)


@app.command()
def patch(
    which: WhichTemplate,
    spec: Annotated[
        Path, typer.Argument(help="Its [[template.patches]] are applied.", metavar="SPEC")
    ],
    *,
    generation: Number = None,
    write: Annotated[Path | None, typer.Option(help="Write the patched template there.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Apply a deployment file's patches to a template and show what they change.

    Example: mm template patch chat.jinja deployments/catalog/mistral-medium-3.5-v100.toml
    """
    from mmadmin.core.chat_templates.patches import apply_patches, compare, describe
    from mmadmin.host.template_matrix import render_in_child

    before = _template(which, generation)
    patches: list[Any] = _patches(spec)
    after = apply_patches(before, patches)
    renders = render_in_child({"before": before, "after": after})
    rows: list[Any] = compare(renders["before"], renders["after"])
    if write is not None:
        write.write_text(after, encoding="utf-8")
    words = [describe(entry) for entry in patches]
    if as_json:
        emit_json({"changes": words, "rows": rows, "template": after})
        return
    for line in words:
        console.print(f"[bold]{escape(line)}[/]")
    for row in rows:
        if not row["changed"]:
            continue
        console.print(f"[cyan]{row['conversation']}[/]")
        for line in row["diff"].splitlines()[2:]:
            show_line(line)
    same = [row["conversation"] for row in rows if not row["changed"]]
    console.print(f"[dim]unchanged: {', '.join(same) or 'nothing'}[/]")


def _template(which: str, generation: int | None) -> str:
    """The text of a file, or of a deployment's generation."""
    path = Path(which)
    if path.is_file():
        if generation is not None:
            raise InvalidInput(
                f"{which} is a file, which has no generations",
                remedy="leave --generation out, or name a deployment",
            )
        return _read(path)
    if path.suffix or len(path.parts) > 1:  # no deployment is called so
        raise NotFound(
            f"there is not a file {which}",
            remedy="give a template file or a deployment's name: `mm status` lists them",
        )
    from mmadmin.host.template_matrix import template_of

    return template_of(_system(which, generation))


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read as a template: {error}") from error
    if not text.strip():
        raise InvalidInput(f"{path} is empty", remedy="give a file that holds a chat template")
    return text


def _patches(file: Path) -> list[Any]:
    """The patches of a deployment file."""
    from mmadmin.core.spec.spec import parse_spec

    patches: list[Any] = [dict(entry) for entry in parse_spec(read_spec(file)).template.patches]
    if not patches:
        raise InvalidInput(
            f"{file} has no [[template.patches]]", remedy="docs/spec.md shows how they are written"
        )
    return patches


def _generation(name: str, number: int | None) -> Generation:
    person = actor()
    from deployments import queries

    if number is not None:
        return queries.generation(person, name, number).generation
    live = queries.deployment(person, name).deployment.live
    if live is None:
        raise NotFound(
            f"nothing of {name} is live",
            remedy="name a generation that was built: --generation NUMBER",
        )
    return live


def _system(name: str, number: int | None) -> System:
    from mmadmin.core.engines.system import read_system
    from mmadmin.core.store import Store

    found = _generation(name, number)
    if not found.system:
        raise NotFound(f"{found.uid} has not been built", remedy="`mm history` says why")
    return read_system(Store(Home.from_env().store).object_path(found.system))


def _engine_renders(name: str, number: int | None) -> Any:
    """What a generation's engine renders, and its tokens; None when none runs on this machine."""
    from mmadmin.core.access import engine_secret
    from mmadmin.core.engines.stored_launch import launch_from_json
    from mmadmin.host.template_matrix import render_on_engine, tokens_of

    found = _generation(name, number)
    from deployments.models import ReplicaState
    from mmadmin import settings

    replica = found.replicas.filter(state=ReplicaState.READY, host__name=settings.HOST_NAME).first()
    if replica is None:
        return None
    launch = launch_from_json(replica.launch)
    secret = engine_secret(settings.ENGINE_MASTER, replica.uid)
    return render_on_engine(launch, secret), tokens_of(launch, secret)
