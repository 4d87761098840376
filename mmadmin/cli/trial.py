"""`mm trial`: a kept generation beside the live one for a limited time, for the playground."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from mmadmin.cli.deployments import Detach, Name, Reason, going_on
from mmadmin.cli.output import JsonFlag, console, emit_json, escape, seconds_text, styled
from mmadmin.cli.records import actor
from mmadmin.core.errors import NotFound
from mmadmin.core.generations.trial import MESSAGES, MINUTES, MOST_MINUTES, Phase, TrialStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from deployments.models import Trial, User

POLL_S = 0.4


def trial(
    name: Name,
    number: Annotated[
        int | None, typer.Argument(help="The generation to try.", metavar="NUMBER", min=1)
    ] = None,
    *,
    minutes: Annotated[
        int, typer.Option(help="How long it stays open.", min=1, max=MOST_MINUTES)
    ] = MINUTES,
    reason: Reason = "",
    end: Annotated[bool, typer.Option("--end", help="End the trial that is under way.")] = False,
    detach: Detach = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a kept generation beside the live one, for the playground, for a limited time.

    Without a number it says how the deployment's trial stands. Clients go on being served by the
    live generation; who may use the playground can ask both side by side.

    Example: mm trial smollm2-135m 2 --minutes 15
    """
    person = actor()
    if end and number is not None:
        raise typer.BadParameter(
            "a number begins a trial, --end ends the one under way: leave one of them out",
            param_hint="'--end'",
        )
    found: Trial | None
    if number is not None:
        found = _begin(person, name, number, minutes=minutes, reason=reason, detach=detach)
    elif end:
        found = _end(person, name, detach=detach)
    else:
        found = _newest(person, name)
    if as_json:
        from deployments import schemas as s

        emit_json(s.TrialOut.from_orm(found) if found else None)
    elif found is None:
        console.print(f"{escape(name)} has no trial")
    else:
        console.print(_words(found))


def _begin(
    person: User, name: str, number: int, *, minutes: int, reason: str, detach: bool
) -> Trial:
    from deployments import actions
    from mmadmin.cli.follow import error_of

    begun = actions.begin_trial(person, name, number, minutes=minutes, reason=reason)
    if detach:
        return begun
    found = _wait(begun, {TrialStatus.WAITING, TrialStatus.STARTING})
    if found.status not in {TrialStatus.OPEN, TrialStatus.ENDING, TrialStatus.ENDED}:
        raise error_of(found)
    return found


def _end(person: User, name: str, *, detach: bool) -> Trial:
    from deployments import actions, queries

    active = queries.deployment(person, name).trial
    if active is None:
        raise NotFound(f"{name} has no generation on trial", remedy="begin one: mm trial NAME N")
    ended = actions.end_trial(person, active.pk)
    if detach:
        return ended
    until = frozenset({TrialStatus.ENDED, TrialStatus.FAILED, TrialStatus.CANCELLED})
    return _wait(ended, set(TrialStatus) - until)


def _newest(person: User, name: str) -> Trial | None:
    from deployments import queries

    queries.deployment(person, name)
    return next(iter(queries.trials(person, name=name).rows), None)


def _wait(trial: Trial, while_it_is: Collection[TrialStatus]) -> Trial:
    """Watch it until it stands otherwise."""
    with going_on(f"trial {trial.pk}"):
        while trial.status in while_it_is:
            time.sleep(POLL_S)
            trial.refresh_from_db()
    return trial


def _words(trial: Trial) -> str:
    """How it stands, in a line."""
    from django.utils import timezone

    line = f"[bold]{escape(trial.generation.uid)}[/] on trial is {styled(trial.status)}"
    if trial.status is TrialStatus.OPEN and trial.ends_at is not None:
        left = (trial.ends_at - timezone.now()).total_seconds()
        return f"{line} for {seconds_text(max(left, 0))}: ask it in the panel's playground"
    if trial.ending:
        return f"{line}: {escape(trial.ending)}"
    if trial.phase:
        return f"{line}: {MESSAGES[Phase(trial.phase)]}"
    return line
