"""Legal moves of generations and jobs: the one table that says what may follow what."""

from __future__ import annotations

from enum import StrEnum

from mmadmin.core.errors import IllegalMove


class GenerationState(StrEnum):
    """Where a generation is in its life (DESIGN: planned → … → live → draining → retired)."""

    PLANNED = "planned"
    BUILDING = "building"
    BUILT = "built"
    STARTING = "starting"
    PROBING = "probing"
    LIVE = "live"
    DRAINING = "draining"
    RETIRED = "retired"
    FAILED = "failed"


class JobState(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ERRORED = "errored"
    CANCELLED = "cancelled"


_S = GenerationState
GENERATION_MOVES: dict[GenerationState, frozenset[GenerationState]] = {
    _S.PLANNED: frozenset({_S.BUILDING, _S.FAILED}),
    _S.BUILDING: frozenset({_S.BUILT, _S.FAILED, _S.PLANNED}),
    _S.BUILT: frozenset({_S.STARTING, _S.FAILED}),
    _S.STARTING: frozenset({_S.PROBING, _S.FAILED, _S.BUILT, _S.RETIRED}),
    _S.PROBING: frozenset({_S.LIVE, _S.FAILED, _S.BUILT, _S.RETIRED}),
    _S.LIVE: frozenset({_S.DRAINING, _S.FAILED}),
    _S.DRAINING: frozenset({_S.RETIRED, _S.LIVE, _S.FAILED}),
    _S.RETIRED: frozenset({_S.STARTING, _S.FAILED}),
    _S.FAILED: frozenset({_S.BUILDING, _S.STARTING, _S.PLANNED}),
}
"""A failed or retired generation may be built or started again; live is left only by draining."""

_J = JobState
JOB_MOVES: dict[JobState, frozenset[JobState]] = {
    _J.QUEUED: frozenset({_J.RUNNING, _J.SUCCEEDED, _J.FAILED, _J.CANCELLED}),
    _J.RUNNING: frozenset(
        {_J.RUNNING, _J.QUEUED, _J.SUCCEEDED, _J.FAILED, _J.ERRORED, _J.CANCELLED}
    ),
    _J.SUCCEEDED: frozenset(),
    _J.FAILED: frozenset(),
    _J.ERRORED: frozenset(),
    _J.CANCELLED: frozenset(),
}
"""Running again is another worker's claim; queued again is a trial that rests; a queued job that
succeeds is a trial whose engine an activation took over. What has ended stays as it ended: whoever
tries again makes another job."""

ACTIVE_JOB = tuple(state for state in JobState if JOB_MOVES[state])
"""States of a job that has not ended."""
ENDED = frozenset(JobState) - frozenset(ACTIVE_JOB)


def may_become(after: JobState) -> tuple[JobState, ...]:
    """The states from which a job may move to `after`."""
    return tuple(before for before, allowed in JOB_MOVES.items() if after in allowed)


def check_move(before: GenerationState, after: GenerationState) -> None:
    """Raise `IllegalMove` unless the table has the move."""
    if after not in GENERATION_MOVES[before]:
        raise IllegalMove(
            f"a generation that is {before.value} cannot become {after.value}",
            before=before.value,
            after=after.value,
        )


def waiting_message(holder: str) -> str:
    """What is said of a build step that another build makes, or that lacks what it requires."""
    return f"waits for {holder}"
