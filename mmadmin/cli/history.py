"""`mm history`, `diff`, `mark`, `pin`, `request`: what became of a deployment, and what people say.

The history is never edited: a mark and a pin are words about a generation, not a part of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mmadmin.cli.deployments import Name, Number, Reason
from mmadmin.cli.output import (
    JsonFlag,
    console,
    emit_json,
    errors,
    escape,
    seconds_text,
    styled,
    when_text,
)
from mmadmin.cli.records import MOST, actor
from mmadmin.cli.tables import Column, table
from mmadmin.core.bytes_text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deployments.models import Activation, Build, BuildStep, Generation
    from deployments.queries import HistoryRow
    from mmadmin.core.generations.diff import DiffRow

CHANGES_SHOWN = 3
VALUE_SHOWN = 40
"""Longer values are not shown in a history; `mm diff` has them."""
Before = Annotated[
    int, typer.Argument(help="The one generation.", metavar="BEFORE", min=1, max=MOST)
]
After = Annotated[int, typer.Argument(help="The other.", metavar="AFTER", min=1, max=MOST)]


# --- the list


def history(
    name: Name,
    *,
    page: Annotated[int, typer.Option(help="Older pages.", min=1)] = 1,
    generation: Annotated[
        int | None,
        typer.Option(help="All about one: each build, step, phase and live span.", min=1),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the whole history into this file, as JSON; - is stdout."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List a deployment's generations: what changed, who, when, why, and how long it was live.

    Example: mm history smollm2-135m --generation 2
    """
    person = actor()
    from deployments import queries

    if export is not None:
        from deployments import schemas as s

        document = s.history_document(queries.export_history(person, name))
        _export(document, export, as_json=as_json)
        return
    if generation is not None:
        row = queries.generation(person, name, generation)
        _show_story(row, queries.generation_builds(person, row.generation), as_json=as_json)
        return
    rows = queries.history(person, name, page=page).rows
    if as_json:
        from deployments import schemas as s

        emit_json([s.HistoryOut.of_row(row) for row in rows])
        return
    table(
        [
            Column("", whole=True),
            Column("state", whole=True),
            Column("mark", whole=True, drop=4),
            Column("author", drop=2),
            Column("when", whole=True),
            Column("live for", whole=True, drop=3),
            Column("reason"),
            Column("changes", drop=1),
        ],
        [
            [
                f"[bold]{row.generation.number}[/]{' ◂' if row.is_live else ''}",
                styled(str(row.generation.state)),
                escape(_marks(row.generation)),
                escape(row.generation.author.get_username()),
                when_text(row.generation.created_at),
                seconds_text(row.live_s) if row.live_s else "",
                escape(_why(row)),
                escape(_changes(row.changes)),
            ]
            for row in rows
        ],
        empty=f"{escape(name)} has no generations",
    )


def _export(data: dict[str, Any], path: Path, *, as_json: bool) -> None:
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    path.write_text(text, encoding="utf-8")
    count = len(data["generations"])
    if as_json:
        emit_json({"file": str(path), "generations": count, "bytes": len(text.encode())})
        return
    console.print(
        f"{count} generations of [bold]{escape(str(data['deployment']['name']))}[/] written to "
        f"{escape(str(path))} ({bytes_text(len(text.encode()))}); any of them again, anywhere: "
        f"mm rebuild {escape(str(path))} NUMBER",
        soft_wrap=True,
    )


def _marks(generation: Generation) -> str:
    return ", ".join([*([str(generation.mark)] if generation.mark else []), *_pinned(generation)])


def _pinned(generation: Generation) -> list[str]:
    return ["pinned"] if generation.pinned else []


def _changes(rows: Sequence[DiffRow]) -> str:
    """The few differences to its parent that say most, a line each; not what came of them."""
    if not rows:
        return ""
    from mmadmin.core.generations.diff import telling, written

    few = telling(rows, CHANGES_SHOWN)
    lines = [_change(row) for row in few]
    rest = len(written(rows)) - len(few)
    return "\n".join([*lines, *([f"and {rest} more: mm diff"] if rest else [])])


def _change(row: DiffRow) -> str:
    values = [value for value in (row.was, row.now) if value is not None]
    if any("\n" in value or len(value) > VALUE_SHOWN for value in values):
        return f"{row.label}: changed"
    if row.was is None:
        return f"{row.label}: {row.now}"
    return f"{row.label}: {row.was} → {row.now if row.now is not None else 'not set'}"


def _why(row: HistoryRow) -> str:
    """Why it was made and, where it was gone back to, who did that last, when and why."""
    words = str(row.generation.reason)
    back = next((a for a in row.activations if a.kind == "rollback"), None)
    if back is not None:
        words += f"\nrolled back to by {_who(back)}, {when_text(back.created_at)}: {back.reason}"
    return words


def _who(job: Build | Activation) -> str:
    return str(job.actor.get_username()) if job.actor else "mmadmin"


# --- the story of one


@dataclass(frozen=True, slots=True)
class _Event:
    """Something that took time, and what it consisted of."""

    at: datetime
    took_s: float | None
    """None = it goes on."""
    words: str
    parts: list[tuple[float | None, str]] = field(default_factory=list)
    """Each part, and how long it took."""


def _show_story(row: HistoryRow, builds: Sequence[Build], *, as_json: bool) -> None:
    generation = row.generation
    if as_json:
        from deployments import schemas as s

        told = [s.BuildRunOut.from_orm(build) for build in builds]
        emit_json(s.HistoryOut.of_row(row).dict() | {"builds": told})
        return
    marks = _marks(generation)
    console.print(
        f"[bold]{escape(generation.uid)}[/] is {styled(str(generation.state))}"
        + (f", {escape(marks)}" if marks else "")
        + (f": {escape(generation.state_reason)}" if generation.state_reason else "")
    )
    author = escape(generation.author.get_username())
    console.print(f"by {author}, {when_text(generation.created_at)}: {escape(generation.reason)}\n")
    events = sorted(_events(row, builds), key=lambda event: event.at)
    table(
        [
            Column("when", whole=True),
            Column("took", whole=True, right=True),
            Column("what"),
        ],
        [line for event in events for line in _lines(event)],
        empty="nothing has happened to it yet",
    )


def _lines(event: _Event) -> Iterator[list[str]]:
    at = event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    yield [at, "" if event.took_s is None else seconds_text(event.took_s), event.words]
    for took, words in event.parts:
        yield ["", "" if took is None else seconds_text(took), f"  [dim]{escape(words)}[/]"]


def _events(row: HistoryRow, builds: Sequence[Build]) -> Iterator[_Event]:
    for build in builds:
        steps = [
            (_step_s(step), f"{step.recipe} {step.name}: {step.state}") for step in _run(build)
        ]
        words = f"[bold]build {build.pk}[/] by {escape(_who(build))}: {styled(str(build.state))}"
        yield _Event(build.created_at, _took(build.started_at, build.ended_at), words, steps)
    for activation in row.activations:
        words = f"[bold]{activation.kind} {activation.pk}[/] by {escape(_who(activation))}"
        words += f": {styled(str(activation.state))}"
        if activation.mode:
            words += f" ({activation.mode})"
        if activation.reason:
            words += f", {escape(activation.reason)}"
        phases = [
            (_took(_moment(phase.get("started")), _moment(phase.get("ended"))), phase["phase"])
            for phase in activation.phases
        ]
        took = _took(activation.started_at, activation.ended_at)
        yield _Event(activation.created_at, took, words, phases)
    for since, until in row.live_spans:
        words = styled("live") if until is None else f"{styled('live')} until {when_text(until)}"
        yield _Event(since, _took(since, until), words)


def _run(build: Build) -> list[BuildStep]:
    """Steps that did something; what was in the store took no time."""
    return [step for step in build.steps.all() if step.state != "cached"]


def _step_s(step: BuildStep) -> float | None:
    return _took(step.started_at, step.ended_at)


def _took(start: datetime | None, end: datetime | None) -> float | None:
    return (end - start).total_seconds() if start and end else None


def _moment(text: Any) -> datetime | None:
    return datetime.fromisoformat(text) if isinstance(text, str) else None


# --- differences


def diff(name: Name, a: Before, b: After, *, as_json: JsonFlag = False) -> None:
    """Compare two generations: spec, lock, model, flags, template and what it renders, speed, size.

    Example: mm diff smollm2-135m 1 2
    """
    person = actor()
    from deployments import queries

    rows = queries.diff(person, name, a, b)
    if as_json:
        from deployments import schemas as s

        emit_json([s.DiffRowOut.of(row) for row in rows])
        return
    short = [row for row in rows if not row.is_long]
    if short or not rows:
        table(
            [
                Column("section", whole=True, drop=1),
                Column("field"),
                Column(f"generation {a}"),
                Column(f"generation {b}"),
            ],
            [
                [
                    escape(row.section),
                    escape(row.label),
                    f"[red]{escape(row.was)}[/]" if row.was is not None else "",
                    f"[green]{escape(row.now)}[/]" if row.now is not None else "",
                ]
                for row in short
            ],
            empty="no difference",
        )
    for row in rows:
        if row.is_long:
            console.print(f"\n{escape(row.section)}  [bold]{escape(row.label)}[/]", soft_wrap=True)
            for line in row.lines():
                show_line(line)


LINE_STYLES = {"+": "green", "-": "red", "@": "dim"}


def show_line(line: str) -> None:
    """A line of a unified diff, in its colour."""
    style = LINE_STYLES.get(line[:1])
    text = escape(line)
    console.print(f"  [{style}]{text}[/]" if style else f"  {text}", soft_wrap=True)


# --- what people say of it


class Word(StrEnum):
    """A mark, as it is typed."""

    GOOD = "good"
    BAD = "bad"
    NONE = "none"


MARKS: dict[Word, Literal["good", "bad", ""]] = {
    Word.GOOD: "good",
    Word.BAD: "bad",
    Word.NONE: "",
}


def mark(
    name: Name,
    number: Number,
    word: Annotated[Word, typer.Argument(help="good, bad or none.", metavar="MARK")],
    *,
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> None:
    """Mark a generation as good or bad, for everybody who reads the history.

    Example: mm mark smollm2-135m 2 bad --reason 'loops on long tool results'
    """
    person = actor()
    from deployments import actions

    found = actions.mark(person, name, number, MARKS[word], reason=reason)
    if as_json:
        from deployments import schemas as s

        emit_json(s.GenerationOut.from_orm(found))
    else:
        console.print(f"[bold]{escape(found.uid)}[/] is marked {word.value}")


def pin(
    name: Name,
    number: Number,
    *,
    off: Annotated[bool, typer.Option("--off", help="Let it go like any other.")] = False,
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> None:
    """Keep a generation's objects in the store, however old it gets.

    Example: mm pin smollm2-135m 2
    """
    person = actor()
    from deployments import actions

    found = actions.pin(person, name, number, not off, reason=reason)
    if as_json:
        from deployments import schemas as s

        emit_json(s.GenerationOut.from_orm(found))
    else:
        console.print(
            f"[bold]{escape(found.uid)}[/] is {'pinned' if found.pinned else 'not pinned'}"
        )


def request(
    request_id: Annotated[
        str, typer.Argument(help="The x-request-id of its answer.", metavar="REQUEST")
    ],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Say which generation answered a request, when, how fast, and with which key.

    Example: mm request req_44db72a4283048771
    """
    person = actor()
    from deployments import queries

    found = queries.request(person, request_id)
    if as_json:
        from deployments import schemas as s

        emit_json(s.RequestOut.from_orm(found))
        return
    by = f"{found.deployment}/{found.generation}" if found.generation else "no generation"
    console.print(f"answered by [bold]{escape(by)}[/]: {found.status}, {escape(found.outcome)}")
    console.print(
        f"{found.at.astimezone():%Y-%m-%d %H:%M:%S}, {escape(found.endpoint)}, key "
        f"{escape(found.key_id or 'unknown')}, {found.prompt_tokens} + {found.completion_tokens} "
        f"tokens in {seconds_text(found.duration_ms / 1000)}"
    )
    if found.generation:
        errors.print(
            f"[dim]what that was: mm history {escape(found.deployment)} "
            f"--generation {found.generation}[/]"
        )
