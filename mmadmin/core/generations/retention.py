"""Which generations stay in the store: the one rule, as a pure function.

Kept are: what is not settled (being built, started, live, drained), what is on trial, what is
pinned, what was live within the last days, and of each deployment the last N that were built. How
many days and generations, each deployment says (`[keep]`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from mmadmin.core.generations.lifecycle import GenerationState

DAY_S = 86400

SETTLED = frozenset({GenerationState.BUILT, GenerationState.RETIRED, GenerationState.FAILED})
"""States in which nothing happens to a generation by itself."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the rule must know about a generation that has a system."""

    uid: str
    deployment: str
    number: int
    state: GenerationState
    pinned: bool = False
    last_live_at: float | None = None
    """When it was last live, Unix seconds; None = never, or it is live now."""
    last: int = 5
    """How many of its deployment are kept."""
    days: int = 30
    """How many days it stays after it was live."""
    on_trial: bool = False
    """It runs beside the live one, or is about to."""


def keep(candidates: Iterable[Candidate], *, now: float) -> dict[str, str]:
    """The uids to keep, each with its reason."""
    kept: dict[str, str] = {}
    of: dict[str, list[Candidate]] = defaultdict(list)
    for one in candidates:
        of[one.deployment].append(one)
        if one.state not in SETTLED:
            kept[one.uid] = f"it is {one.state.value}"
        elif one.on_trial:
            kept[one.uid] = "it is on trial"
        elif one.pinned:
            kept[one.uid] = "pinned"
        elif one.last_live_at is not None and now - one.last_live_at < one.days * DAY_S:
            kept[one.uid] = f"live within the last {one.days} days"
    for rows in of.values():
        for place, one in enumerate(sorted(rows, key=lambda c: c.number, reverse=True)):
            if place < one.last:
                kept.setdefault(one.uid, f"one of the last {one.last} of {one.deployment}")
    return kept
