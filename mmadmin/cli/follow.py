"""Watching a job from the command line: its steps, how far they are, how it ends.

Reads the records that the workers write, so it shows the same as the panel, sees jobs that
somebody else asked for, and may be interrupted and taken up again: the job does not notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from django.utils import timezone
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deployments.models import Activation, Build, BuildStep, LogChunk, StepState, Trial
from mmadmin.cli.output import console, escape, plain, seconds_text, styled
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import Cancelled, MmError
from mmadmin.core.generations.lifecycle import ENDED, JobState

J = TypeVar("J", Build, Activation)

POLL_S = 0.4
SAY_EVERY_S = 10.0
"""How often a long step says how far it is where the output is not a terminal."""
PATIENCE_S = 15.0
"""After this long in the queue, say that a worker may be missing."""
BAR_WIDTH = 24

MARKS = {
    StepState.WAITING: "[dim]·[/]",
    StepState.CACHED: "[dim]=[/]",
    StepState.SUBSTITUTED: "[green]↓[/]",
    StepState.RUNNING: "[cyan]▸[/]",
    StepState.BUILT: "[green]✓[/]",
    StepState.FAILED: "[red]✗[/]",
    StepState.CANCELLED: "[yellow]✗[/]",
}


@dataclass(slots=True)
class Screen:
    """Where progress goes: redrawn in place on a terminal, else a line when something changes."""

    quiet: bool = False
    live: Live | None = None
    said: dict[str, str] = field(default_factory=dict)
    said_at: dict[str, float] = field(default_factory=dict)

    def draw(self, picture: RenderableType) -> None:
        """Show the whole state, on a terminal."""
        if self.live is not None:
            self.live.update(picture)

    def say(self, subject: str, state: str, line: str) -> None:
        """Print `line` when `state` of `subject` is new, or again after a while."""
        if self.quiet or self.live is not None:
            return
        now = time.monotonic()
        new = self.said.get(subject) != state
        if new or (state == "running" and now - self.said_at[subject] >= SAY_EVERY_S):
            console.print(line, soft_wrap=True)
            self.said[subject], self.said_at[subject] = state, now


@contextmanager
def screen(*, quiet: bool) -> Iterator[Screen]:
    """A screen for the time of watching."""
    if quiet or not console.is_terminal:
        yield Screen(quiet=quiet)
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        yield Screen(live=live)


def error_of(job: Build | Activation | Trial) -> MmError:
    """The error with which a job ended, as the exception that it was."""
    found = job.error or {}
    kinds = {kind.code: kind for kind in _kinds(MmError)}
    kind = Cancelled if job.state == JobState.CANCELLED else MmError
    kind = kinds.get(str(found.get("code", "")), kind)
    what = type(job).__name__.lower()
    log = "mm logs worker" if isinstance(job, Trial) else f"mm logs --{what} {job.pk}"
    return kind(
        str(found.get("message") or f"{what} {job.pk} ended {job.state}"),
        remedy=str(found.get("remedy") or f"read its log: {log}"),
        **{k: v for k, v in (found.get("details") or {}).items() if k not in {"message", "remedy"}},
    )


def _kinds(root: type[MmError]) -> Iterator[type[MmError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)


def _wait(read: Callable[[], J]) -> Iterator[J]:
    while True:
        job = read()
        yield job
        if JobState(job.state) in ENDED:
            return
        time.sleep(POLL_S)


def follow_build(build_id: int, *, quiet: bool = False) -> Build:
    """Watch a build to its end; raises the error with which it failed."""
    began = time.monotonic()
    with screen(quiet=quiet) as view:
        for build in _wait(lambda: _read_build(build_id)):
            steps = list(build.steps.all())
            view.draw(_build_picture(build, steps, time.monotonic() - began))
            if not steps:
                _say_queue(view, build, "build", build.phase, time.monotonic() - began)
            for step in steps:
                state = str(step.state)
                if state == StepState.WAITING and not step.waits_for:
                    continue
                line = f"  {MARKS[StepState(state)]} {_words(step)}"
                view.say(f"step{step.pk}", f"{state}{step.waits_for}", line)
    if build.state != JobState.SUCCEEDED:
        raise error_of(build)
    return build


def _read_build(build_id: int) -> Build:
    return Build.objects.prefetch_related("steps").get(pk=build_id)


def _say_queue(view: Screen, job: Build | Activation, what: str, phase: str, waited: float) -> None:
    if job.state == JobState.QUEUED:
        words = _queue_words(job, waited)
        view.say("queue", words, f"  {what} {job.pk} {words}")
    elif phase:
        view.say("queue", phase, f"  {what} {job.pk}: {phase}")


def _queue_words(job: Build | Activation, waited: float) -> str:
    """What a job that has not begun waits for."""
    if isinstance(job, Build) and (many := job.crowded_out_by()):
        run = "build runs" if many == 1 else "builds run"
        return f"waits for a free place: {many} {run} (MM_BUILDS_AT_ONCE)"
    missing = " (does a worker run? mm status)" if waited > PATIENCE_S else ""
    return f"waits for a worker{missing}"


def _build_picture(build: Build, steps: list[BuildStep], waited: float) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for step in steps:
        grid.add_row(MARKS[StepState(step.state)], Text.from_markup(_words(step)))
    if not steps:
        queued = build.state == JobState.QUEUED
        words = _queue_words(build, waited) if queued else build.phase
        return Text(f"  build {build.pk}: {words or 'begins'} ({seconds_text(waited)})")
    running = next((s for s in steps if s.state == StepState.RUNNING), None)
    last = _last_line(step=running) if running else ""
    return Group(grid, Text(f"    {plain(last)}"[: console.width - 1], style="dim", no_wrap=True))


def _last_line(*, step: BuildStep) -> str:
    chunk = LogChunk.objects.filter(step=step).order_by("-id").first()
    lines = chunk.text.rstrip().splitlines() if chunk else []
    return lines[-1].strip() if lines else ""


def _words(step: BuildStep) -> str:
    name = f"[bold]{escape(step.recipe)}[/] {escape(step.name)}"
    match StepState(step.state):
        case StepState.RUNNING:
            return f"{name}  {_progress(step)} [dim]{_took(step.started_at, None)}[/]"
        case StepState.BUILT | StepState.SUBSTITUTED:
            return f"{name}  [dim]{_took(step.started_at, step.ended_at)}[/]"
        case StepState.FAILED:
            words = (step.error or {}).get("message", "failed")
            return f"{name}  [red]{escape(str(words))}[/]"
        case StepState.WAITING if step.waits_for:
            return f"{name}  {escape(step.message)}"
        case _:
            return f"{name}  [dim]{escape(str(step.state))}: {escape(step.why)}[/]"


def _took(began: datetime | None, ended: datetime | None) -> str:
    if began is None:
        return ""
    return seconds_text(((ended or timezone.now()) - began).total_seconds())


def _progress(step: BuildStep) -> str:
    done, total, unit = step.progress_done, step.progress_total, step.progress_unit
    if not total:
        return ""
    filled = round(BAR_WIDTH * min(1.0, done / total))
    bar = f"[cyan]{'━' * filled}[/][dim]{'─' * (BAR_WIDTH - filled)}[/]"
    if unit in {"B", "bytes"}:
        return f"{bar} {bytes_text(done)} of {bytes_text(total)}"
    return f"{bar} {done} of {total} {escape(unit)}"


def follow_activation(activation_id: int, *, quiet: bool = False) -> Activation:
    """Watch an activation to its end; raises the error with which it failed."""
    began = time.monotonic()
    with screen(quiet=quiet) as view:
        for activation in _wait(lambda: Activation.objects.get(pk=activation_id)):
            view.draw(_activation_picture(activation, time.monotonic() - began))
            _say_queue(view, activation, "activation", activation.phase, time.monotonic() - began)
    if activation.state != JobState.SUCCEEDED:
        raise error_of(activation)
    return activation


def _activation_picture(activation: Activation, waited: float) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for phase in activation.phases:
        ended = phase.get("ended")
        mark = MARKS[StepState.BUILT] if ended else MARKS[StepState.RUNNING]
        grid.add_row(mark, Text.from_markup(f"[bold]{escape(str(phase['phase']))}[/]"))
    state = styled(activation.state)
    grid.add_row("", Text.from_markup(f"activation: {state} [dim]{seconds_text(waited)}[/]"))
    return grid


def activation_after(build: Build) -> Activation | None:
    """The activation that a build asked for, once the worker has queued it."""
    if build.generation_id is None or not build.activate_after:
        return None
    return (
        Activation.objects.filter(target_id=build.generation_id, created_at__gte=build.created_at)
        .order_by("-id")
        .first()
    )


HAND_OVER_S = 30.0


def follow_to_live(build_id: int, *, quiet: bool = False) -> Build:
    """Watch a build and the activation that follows it; raises what went wrong."""
    build = follow_build(build_id, quiet=quiet)
    if not build.activate_after:
        return build
    give_up = time.monotonic() + HAND_OVER_S
    while (activation := activation_after(build)) is None:
        if time.monotonic() > give_up:
            raise MmError(
                f"build {build.pk} is done, but was not activated: "
                "another activation of the deployment was under way",
                remedy="when that has ended: mm activate NAME NUMBER",
            )
        time.sleep(POLL_S)
    follow_activation(activation.pk, quiet=quiet)
    return build
