"""`mm eval`: how well a deployment's model predicts a text, alone and against another's.

Like `mm build` it needs neither panel nor broker nor database. A report is an object in the store:
the same model, text and parameters are measured once.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmadmin.cli.build import locked, tools_of, watching
from mmadmin.cli.deployments import SpecFile, read_spec
from mmadmin.cli.output import JsonFlag, console, emit_json, escape
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from mmadmin.core.evaluation.text import Comparison, TextReport

app = typer.Typer(help="Measure the quality of models, and compare them.", no_args_is_help=True)

Reference = Annotated[
    Path, typer.Argument(help="The deployment file to compare with.", metavar="REFERENCE")
]
TextFile = Annotated[
    Path,
    typer.Option("--text", help="The text to predict, UTF-8.", exists=True, dir_okay=False),
]
Context = Annotated[int, typer.Option(help="Tokens per chunk: 128, 256, 512, 1024 or 2048.")]
Chunks = Annotated[int, typer.Option(help="Chunks to measure; 0 = the whole text.", min=0)]


@app.command("run")
def run(
    file: SpecFile,
    *,
    text: TextFile,
    context: Context = 512,
    chunks: Chunks = 0,
    as_json: JsonFlag = False,
) -> None:
    """Measure the perplexity of a deployment file's model on a text; deploys nothing.

    Builds the model and the program that measures where the store lacks them.

    Example: mm eval run deployments/catalog/smollm2-135m.toml --text wiki.test.raw
    """
    name, path, report = _measured(file, text, context, chunks, quiet=as_json)
    if as_json:
        emit_json(_as_json(name, path, report))
        return
    console.print(f"[bold]{escape(name)}[/]  {_line(report)}")
    console.print(f"report: {escape(str(path))}", soft_wrap=True)


@app.command("compare")
def compare(
    file: SpecFile,
    reference: Reference,
    *,
    text: TextFile,
    context: Context = 512,
    chunks: Chunks = 0,
    as_json: JsonFlag = False,
) -> None:
    """Measure two deployment files' models on a text, and say whether the first is worse.

    The change of perplexity has a 95 % interval, paired by chunk. Where that holds 0, there is no
    winner. Models with different tokenizers are refused.

    Example: mm eval compare small.toml large.toml --text wiki.test.raw
    """
    from mmadmin.core.evaluation.text import compare as compare_reports

    name, path, report = _measured(file, text, context, chunks, quiet=as_json)
    other, other_path, other_report = _measured(reference, text, context, chunks, quiet=as_json)
    found = compare_reports(report, other_report)
    if as_json:
        emit_json(
            {
                "model": _as_json(name, path, report),
                "reference": _as_json(other, other_path, other_report),
                **asdict(found),
            }
        )
        return
    console.print(f"[bold]{escape(name)}[/]  {_line(report)}")
    console.print(f"[bold]{escape(other)}[/]  {_line(other_report)}")
    console.print(_sentence(found))


def _measured(
    file: Path, text: Path, context: int, chunks: int, *, quiet: bool
) -> tuple[str, Path, TextReport]:
    """The deployment's name, its report's folder, and the report."""
    from mmadmin.core import catalog
    from mmadmin.core.build.builder import GoalRoot, realise
    from mmadmin.core.build.recipe import PathSource
    from mmadmin.core.engines.protocol import MeasuresText, TextMeasure
    from mmadmin.core.errors import Refused
    from mmadmin.core.evaluation.text import read_report
    from mmadmin.core.spec.lock import LockedFile
    from mmadmin.core.spec.spec import parse_spec
    from mmadmin.core.store import Store
    from mmadmin.host.binary_caches import configured_substituter
    from mmadmin.host.facts import host_facts
    from mmadmin.host.known_digests import KnownDigests

    home = Home.from_env()
    spec = parse_spec(read_spec(file))
    engine = catalog.engine(spec.engine_kind)
    if not isinstance(engine, MeasuresText):
        raise Refused(
            f"perplexity is not measured for {engine.kind}",
            remedy="docs/evaluations.md names the engines whose models are measured",
        )
    lock = locked(spec, home, quiet=quiet)
    home.store.mkdir(parents=True, exist_ok=True)
    store = Store(home.store)
    sha256, size = KnownDigests(home.digests).hash_file(text)
    pinned = LockedFile("text.txt", sha256, size, PathSource(str(text.resolve())))
    measure = TextMeasure(pinned, context, chunks)
    goal = engine.text_report(spec, lock, host_facts(home.store), measure)
    with watching(quiet=quiet) as watcher:
        done = realise(
            goal,
            store,
            tools_of(home, watcher.progress),
            watcher,
            root=GoalRoot("eval", spec.name, f"last measured by mm eval, {file}"),
            substituter=configured_substituter(home, store),
            owner=f"mm eval of {spec.name}",
        )
    path = store.object_path(done.object)
    return spec.name, path, read_report(path)


def _as_json(name: str, path: Path, report: TextReport) -> dict[str, Any]:
    return {
        "name": name,
        "path": str(path),
        "perplexity": report.perplexity,
        "standard_error": report.standard_error,
        "mean_nll": report.mean_nll,
        "chunks": len(report.chunk_nll),
        "context": report.context,
        "text_sha256": report.text_sha256,
    }


def _line(report: TextReport) -> str:
    return (
        f"perplexity {report.perplexity} ± {report.standard_error}, mean NLL "
        f"{report.mean_nll:.4f} ({len(report.chunk_nll)} chunks of {report.context} tokens)"
    )


def _sentence(found: Comparison) -> str:
    change = found.perplexity_change_percent
    numbers = f"{change.estimate:+.2f} % perplexity (95 %: {change.low:+.2f} to {change.high:+.2f})"
    if found.verdict == "no difference seen":
        return f"No difference seen at this sample size, {found.chunks} chunks: {numbers}"
    return f"The first is {found.verdict}: {numbers}, {found.chunks} chunks"
