"""How a generation goes live and back: the order of phases, as one pure table.

    overlap  preflight → start → probe → flip → drain → stop → retire
    swap     preflight → hold → drain → stop → start → probe → flip → retire → examine
    stop     flip → drain → stop → retire
    way back unstart, and after a swap that had taken the old one down: restart → reprobe → reopen
    returned return → redrain → unstart

A phase is written down before it begins and is repeatable: whoever finds the record after a crash
does the written phase again and goes on from there. Until the flip a failure or a cancellation
leads to the way back. While an overlap drains, the old engine still runs: a person may return to
it, at once; a failure does not. After that the activation can only be finished. Doing the phases is
the job's work (effects), deciding what comes next is here.

In a swap requests wait for the probe, so it asks only what decides or what traffic would spoil; the
other rows follow in examine, when the requests have gone on. In an overlap nobody waits, and all
rows come before the flip.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from mmadmin.core.errors import Conflict


class Phase(StrEnum):
    """One step of an activation."""

    PREFLIGHT = "preflight"
    HOLD = "hold"
    START = "start"
    PROBE = "probe"
    FLIP = "flip"
    DRAIN = "drain"
    STOP = "stop"
    RETIRE = "retire"
    EXAMINE = "examine"
    UNSTART = "unstart"
    RESTART = "restart"
    REPROBE = "reprobe"
    REOPEN = "reopen"
    RETURN = "return"
    REDRAIN = "redrain"


class Kind(StrEnum):
    """Forward to a generation, back to an earlier one, or down."""

    ACTIVATE = "activate"
    ROLLBACK = "rollback"
    STOP = "stop"


class Mode(StrEnum):
    """Beside the old generation, or after it."""

    OVERLAP = "overlap"
    SWAP = "swap"


_P = Phase
OVERLAP = (_P.PREFLIGHT, _P.START, _P.PROBE, _P.FLIP, _P.DRAIN, _P.STOP, _P.RETIRE)
SWAP = (
    *(_P.PREFLIGHT, _P.HOLD, _P.DRAIN, _P.STOP),
    *(_P.START, _P.PROBE, _P.FLIP, _P.RETIRE, _P.EXAMINE),
)
STOP = (_P.FLIP, _P.DRAIN, _P.STOP, _P.RETIRE)
BACK_OVERLAP = (_P.UNSTART,)
BACK_SWAP = (_P.UNSTART, _P.RESTART, _P.REPROBE, _P.REOPEN)
RETURNED = (_P.RETURN, _P.REDRAIN, _P.UNSTART)

MESSAGES: dict[Phase, str] = {
    _P.PREFLIGHT: "checking that everything is present and fits",
    _P.HOLD: "holding new requests",
    _P.START: "starting the engine",
    _P.PROBE: "loading and testing the engine",
    _P.FLIP: "sending requests to the new generation",
    _P.DRAIN: "finishing requests of the old generation",
    _P.STOP: "stopping the old engine",
    _P.RETIRE: "keeping the old generation in the store",
    _P.EXAMINE: "running the remaining probes",
    _P.UNSTART: "stopping the failed engine",
    _P.RESTART: "restarting the old engine",
    _P.REPROBE: "loading and testing the old engine",
    _P.REOPEN: "releasing waiting requests to the old generation",
    _P.RETURN: "sending requests back to the old generation",
    _P.REDRAIN: "finishing requests of the new generation",
}
"""What a person reads while the phase runs."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where an activation is: everything that decides what comes next."""

    kind: Kind
    has_previous: bool
    """A generation was live, with an engine, when it began."""
    phase: Phase
    mode: Mode = Mode.OVERLAP
    """Decided by the preflight."""
    undoing: bool = False
    flipped: bool = False
    """The route has changed: the rest can only be finished."""


def begin(kind: Kind, *, has_previous: bool) -> Position:
    """The position at the first phase."""
    first = Phase.FLIP if kind is Kind.STOP else Phase.PREFLIGHT
    return Position(kind=kind, has_previous=has_previous, phase=first)


def resumed(
    kind: str, *, has_previous: bool, phase: str, mode: str, undoing: bool, flipped: bool
) -> Position:
    """The position that a record has; empty = it has not begun, or has not decided."""
    begun = begin(Kind(kind), has_previous=has_previous)
    return replace(
        begun,
        phase=Phase(phase or begun.phase),
        mode=Mode(mode or begun.mode),
        undoing=undoing,
        flipped=flipped,
    )


def choose_mode(wanted: str, *, has_previous: bool, fits_beside: bool) -> Mode:
    """Overlap or swap, from what the deployment file wants and what memory allows.

    Raises `Conflict` when an overlap is wanted and there is no room for it.
    """
    if not has_previous:
        return Mode.OVERLAP
    if wanted == "swap":
        return Mode.SWAP
    if fits_beside:
        return Mode.OVERLAP
    if wanted == "overlap":
        raise Conflict(
            "there is no room for the new generation beside the one that is live",
            remedy='set activation.mode to "auto" or "swap"',
        )
    return Mode.SWAP


def sequence(at: Position) -> tuple[Phase, ...]:
    """The phases of the way that it is on."""
    if at.undoing and (at.flipped or at.phase in (Phase.RETURN, Phase.REDRAIN)):
        return RETURNED
    if at.undoing:
        return BACK_SWAP if must_restore(at) else BACK_OVERLAP
    if at.kind is Kind.STOP:
        return STOP
    return SWAP if at.mode is Mode.SWAP else OVERLAP


def must_restore(at: Position) -> bool:
    """True when a failure brings the old engine back: the swap may have taken it down."""
    return at.mode is Mode.SWAP and at.has_previous and at.kind is not Kind.STOP


def may_turn_back(at: Position) -> bool:
    """True while a failure or a cancellation still leads to the way back."""
    return not at.flipped and not at.undoing and at.kind is not Kind.STOP


def may_return(at: Position) -> bool:
    """True while a cancellation still leads back after the flip: to the old engine, which runs."""
    beside = at.mode is Mode.OVERLAP and at.has_previous and at.kind is not Kind.STOP
    draining = at.phase in (Phase.FLIP, Phase.DRAIN)
    return beside and draining and at.flipped and not at.undoing


def may_cancel(at: Position) -> bool:
    """False once asking for a cancel is of no use. At the last probes it spares what is left."""
    if at.phase is Phase.FLIP and not at.flipped:  # what is being done there is done
        at = replace(at, flipped=True)
    return may_turn_back(at) or may_return(at) or at.phase is Phase.EXAMINE


def after(at: Position, *, mode: Mode | None = None) -> Position | None:
    """The position at the next phase once the present one is done; None = it has ended.

    `mode` is what the preflight found out. Raises `Conflict` for a phase that its way lacks.
    """
    if mode is not None:
        at = replace(at, mode=mode)
    if at.phase is Phase.FLIP:
        at = replace(at, flipped=True)
    way = sequence(at)
    if at.phase not in way:
        raise Conflict(
            f"{at.phase} is not a phase of this activation",
            remedy="cancel it and activate again",
        )
    following = way.index(at.phase) + 1
    return replace(at, phase=way[following]) if following < len(way) else None


def turn_back(at: Position) -> Position:
    """The position at the first phase of the way back. Raises `Conflict` when it can only go on."""
    if not (may_turn_back(at) or may_return(at)):
        raise Conflict(
            "the activation has gone too far to turn back", remedy="roll back once it has ended"
        )
    undone = replace(at, undoing=True)
    return replace(undone, phase=sequence(undone)[0])
