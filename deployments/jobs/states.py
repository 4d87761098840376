"""A generation's moves: by compare-and-set, each with its row of history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.utils import timezone

from deployments.broker import feed
from deployments.models import Generation, Transition
from mmadmin.core.errors import Conflict
from mmadmin.core.generations.lifecycle import GenerationState, check_move


def advance(
    generation_id: int,
    after: GenerationState,
    *,
    actor_id: int | None = None,
    reason: str = "",
    only_from: Sequence[GenerationState] = (),
    **values: Any,
) -> bool:
    """Move a generation to `after`; True when this call moved it.

    Idempotent: one that is there already, or (with `only_from`) stands elsewhere, stays. Raises
    `IllegalMove` for a move that the table lacks, `Conflict` when someone else moved it meanwhile.
    `values` are other fields to set with the move.
    """
    with transaction.atomic():
        generation = Generation.objects.select_related("deployment").get(pk=generation_id)
        before = GenerationState(generation.state)
        if before == after or (only_from and before not in only_from):
            return False
        check_move(before, after)
        failed = after == GenerationState.FAILED
        moved = Generation.objects.filter(pk=generation_id, state=before).update(
            state=after,
            state_reason=reason if failed else "",
            changed_at=timezone.now(),
            **values,
        )
        if not moved:
            raise Conflict(f"{generation.uid} was moved by someone else at the same moment")
        Transition.objects.create(
            generation=generation, before=before, after=after, actor_id=actor_id, reason=reason
        )
        name = generation.deployment.name
        transaction.on_commit(lambda: feed.announce("generation", generation_id, deployment=name))
    return True


def message(error: Mapping[str, Any] | None) -> str:
    """An error's message with its remedy, as one line of history."""
    if not error:
        return ""
    remedy = error.get("remedy")
    return f"{error['message']} ({remedy})" if remedy else str(error["message"])


def bug(error: BaseException) -> dict[str, Any]:
    """An error of mmadmin's own, in the shape of an `MmError`; its traceback is in the log."""
    return {
        "code": "errored",
        "message": f"an error in mmadmin itself: {type(error).__name__}: {error}",
        "remedy": "see the worker's log for the traceback, and report it",
        "details": {},
    }
