"""The table of a job's moves."""

from __future__ import annotations

from mmadmin.core.generations.lifecycle import (
    ACTIVE_JOB,
    ENDED,
    JOB_MOVES,
    JobState,
    may_become,
)


def test_what_has_ended_stays_ended() -> None:
    """Whoever tries again makes another job."""
    assert set(ACTIVE_JOB) | ENDED == set(JobState)
    assert all(not JOB_MOVES[state] for state in ENDED)
    for after in JobState:
        assert not ENDED & set(may_become(after))


def test_only_work_can_turn_out_a_bug() -> None:
    """A job that waits is taken, cancelled, or ended without having been done."""
    assert may_become(JobState.ERRORED) == (JobState.RUNNING,)
    assert set(may_become(JobState.CANCELLED)) == set(ACTIVE_JOB)
