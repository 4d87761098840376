"""The table of a trial: every way ends, and no state of it looks like another."""

from __future__ import annotations

import pytest

from mmadmin.core.errors import Conflict
from mmadmin.core.generations.lifecycle import ENDED, JobState
from mmadmin.core.generations.trial import (
    END,
    FORWARD,
    MESSAGES,
    Phase,
    TrialStatus,
    after,
    status_of,
    turn_back,
)


def way_from(phase: Phase) -> list[Phase]:
    """The phases from one on, to the end of its way."""
    way = [phase]
    while (following := after(way[-1])) is not None:
        way.append(following)
    return way


def test_forward_ends_open_and_the_end_ends_stopped() -> None:
    """Nothing but a wake leads from the way forward to the end."""
    assert tuple(way_from(Phase.PREFLIGHT)) == FORWARD
    assert FORWARD[-1] is Phase.OPEN
    assert tuple(way_from(Phase.CLOSE)) == END
    assert END[-1] is Phase.STOP


@pytest.mark.parametrize("phase", FORWARD)
def test_every_way_back_ends_the_engine(phase: Phase) -> None:
    """Whatever failed, the last thing done is to end the engine; an open one closes first."""
    way = way_from(turn_back(phase))
    assert way[-1] is Phase.STOP
    assert (way[0] is Phase.CLOSE) == (phase is Phase.OPEN)


@pytest.mark.parametrize("phase", END)
def test_what_ends_does_not_turn_back(phase: Phase) -> None:
    """A second end is refused."""
    with pytest.raises(Conflict, match="ending already"):
        turn_back(phase)


def test_every_phase_is_on_one_way_and_has_its_words() -> None:
    """No phase is left out, and none is on both ways."""
    assert sorted(FORWARD + END) == sorted(Phase)
    assert set(MESSAGES) == set(Phase)


def test_it_is_open_in_one_phase_only() -> None:
    """Only an active job in the phase `open` answers requests, once every gate knows it."""
    open_ones = {
        (state, phase, told)
        for state in JobState
        for phase in (None, *Phase)
        for told in (True, False)
        if status_of(state, phase, told=told) is TrialStatus.OPEN
    }
    assert open_ones == {(s, Phase.OPEN, True) for s in (JobState.QUEUED, JobState.RUNNING)}
    assert status_of(JobState.RUNNING, Phase.OPEN, told=False) is TrialStatus.STARTING


@pytest.mark.parametrize("state", sorted(ENDED))
@pytest.mark.parametrize("phase", [None, *Phase])
def test_an_ended_job_is_an_ended_trial(state: JobState, phase: Phase | None) -> None:
    """However far it had come."""
    assert status_of(state, phase, told=True) in {
        TrialStatus.ENDED,
        TrialStatus.FAILED,
        TrialStatus.CANCELLED,
    }
