"""How a kept generation runs on trial beside the live one: the order of phases, as one pure table.

    forward   preflight → start → probe → open
    asleep    nobody works on it: until its time is over, a person ends it, or memory is needed
    end       close → drain → stop
    way back  stop

A trial moves no generation state. What runs is a replica that belongs to the trial; the generation
is not live, and what its history says of when it was live stays true. A phase is written down
before it begins and may be done again by whoever finds the record after a crash.
"""

from __future__ import annotations

from enum import StrEnum

from mmadmin.core.errors import Conflict
from mmadmin.core.generations.lifecycle import JobState

MINUTES = 30
"""How long a trial lasts unless told otherwise."""
MOST_MINUTES = 480


class Phase(StrEnum):
    """One step of a trial."""

    PREFLIGHT = "preflight"
    START = "start"
    PROBE = "probe"
    OPEN = "open"
    CLOSE = "close"
    DRAIN = "drain"
    STOP = "stop"


class TrialStatus(StrEnum):
    """Where a trial is, for people."""

    WAITING = "waiting"
    STARTING = "starting"
    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"


_P = Phase
FORWARD = (_P.PREFLIGHT, _P.START, _P.PROBE, _P.OPEN)
END = (_P.CLOSE, _P.DRAIN, _P.STOP)

MESSAGES: dict[Phase, str] = {
    _P.PREFLIGHT: "checking that everything is present and fits alongside the live generation",
    _P.START: "starting the engine",
    _P.PROBE: "loading and testing the engine",
    _P.OPEN: "available in the playground",
    _P.CLOSE: "closing to new requests",
    _P.DRAIN: "finishing its requests",
    _P.STOP: "stopping the engine",
}
"""What a person reads while the phase runs."""


def after(phase: Phase) -> Phase | None:
    """The next phase on the same way; None = the way has ended (asleep, or over)."""
    way = FORWARD if phase in FORWARD else END
    position = way.index(phase) + 1
    return way[position] if position < len(way) else None


def turn_back(phase: Phase) -> Phase:
    """The first phase of the way back from one that failed or was cancelled.

    Before it was open no gate knew it: its engine ends at once. Raises `Conflict` when it ends
    already.
    """
    if phase not in FORWARD:
        raise Conflict("the trial is ending already")
    return Phase.CLOSE if phase is Phase.OPEN else Phase.STOP


def status_of(state: JobState, phase: Phase | None, *, told: bool) -> TrialStatus:
    """Where a trial is, from its job's state and its phase; `phase` None = it has not begun.

    `told` = every gate knows it: before that, one who asked would not be answered yet.
    """
    ended = {
        JobState.SUCCEEDED: TrialStatus.ENDED,
        JobState.CANCELLED: TrialStatus.CANCELLED,
        JobState.FAILED: TrialStatus.FAILED,
        JobState.ERRORED: TrialStatus.FAILED,
    }
    if state in ended:
        return ended[state]
    if phase is None:
        return TrialStatus.WAITING
    if phase is Phase.OPEN and told:
        return TrialStatus.OPEN
    return TrialStatus.STARTING if phase in FORWARD else TrialStatus.ENDING
