"""The activation table against a small world: crashes, failures and cancellations anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.errors import Conflict
from mmadmin.core.generations.activation import (
    MESSAGES,
    Kind,
    Mode,
    Phase,
    Position,
    after,
    begin,
    choose_mode,
    may_cancel,
    may_return,
    may_turn_back,
    turn_back,
)


@dataclass
class World:
    """Engines, their proof, and where requests go; every phase's effect may be done again."""

    has_previous: bool
    mode: Mode
    up: set[str] = field(default_factory=set)
    proved: set[str] = field(default_factory=set)
    route: str = "none"
    """previous, target, held or none."""

    def __post_init__(self) -> None:
        """What was live before."""
        if self.has_previous:
            self.up, self.proved, self.route = {"previous"}, {"previous"}, "previous"

    def do(self, at: Position) -> None:
        """The effect of a phase, as the job carries it out."""
        phase, stops = at.phase, at.kind is Kind.STOP
        if phase is Phase.HOLD:
            self.route = "held"
        elif phase in (Phase.START, Phase.RESTART):
            one = "target" if phase is Phase.START else "previous"
            if self.mode is Mode.SWAP:
                assert self.up <= {one}, "two engines where memory holds one"
            if one not in self.up:  # an engine that runs is left alone
                self.up.add(one)
                self.proved.discard(one)
        elif phase in (Phase.PROBE, Phase.REPROBE):
            self.proved.add("target" if phase is Phase.PROBE else "previous")
        elif phase is Phase.FLIP:
            self.route = "none" if stops else "target"
        elif phase is Phase.STOP:
            self.up.discard("previous")
            self.proved.discard("previous")
        elif phase is Phase.UNSTART:
            self.up.discard("target")
            self.proved.discard("target")
        elif phase in (Phase.REOPEN, Phase.RETURN):
            self.route = "previous"

    def check(self, at: Position) -> None:
        """What must hold at every moment."""
        if self.route in ("previous", "target"):
            assert self.route in self.up, f"requests go to an engine that is down ({at})"
            assert self.route in self.proved, f"requests go to an unproved engine ({at})"
        if self.has_previous and at.kind is not Kind.STOP:
            held = self.route == "held"
            assert held or self.route in self.up, f"requests are refused ({at})"
            if self.mode is Mode.OVERLAP:
                assert not held, "an overlap holds nobody"


def ends_live(at: Position) -> str:
    """Which generation serves once it has ended: `target`, `previous` or `none`."""
    if at.kind is Kind.STOP:
        return "none"
    if not at.undoing:
        return "target"
    return "previous" if at.has_previous else "none"


EVENTS = st.lists(
    st.sampled_from(["ok", "ok", "ok", "crash-before", "crash-after", "fail", "cancel"])
)


def play(at: Position, world: World, events: list[str], *, mode: Mode) -> Position:
    """To the end under the events; after them everything goes well. The last position."""
    script = iter(events)
    for _turn in range(200):
        event = next(script, "ok")
        world.check(at)
        if event == "crash-before":
            continue  # another worker finds the same phase in the record
        if event == "fail" and may_turn_back(at):
            at = turn_back(at)
            continue
        if event == "cancel" and (may_turn_back(at) or may_return(at)):
            at = turn_back(at)
            continue
        world.do(at)
        world.check(at)
        if event == "crash-after":  # done, but not written down: it is done again
            if at.phase is Phase.FLIP:  # the route itself is the record of that
                at = replace(at, flipped=True)
            if at.phase is Phase.RETURN:
                at = replace(at, flipped=False)
            continue
        following = after(at, mode=mode if at.phase is Phase.PREFLIGHT else None)
        if following is None:
            return at
        at = following
    raise AssertionError("the activation does not end")


@given(
    kind=st.sampled_from(Kind),
    has_previous=st.booleans(),
    mode=st.sampled_from(Mode),
    events=EVENTS,
)
def test_it_ends_with_exactly_one_engine_whatever_happens(kind, has_previous, mode, events):
    """Live or restored; never two engines left over, never none where one had served."""
    mode = mode if has_previous else Mode.OVERLAP
    if kind is Kind.STOP and not has_previous:
        return
    world = World(has_previous, mode)
    ended = play(begin(kind, has_previous=has_previous), world, events, mode=mode)
    live = ends_live(ended)
    assert world.route == live
    assert world.up == ({live} if live != "none" else set())


@given(events=EVENTS)
def test_an_overlap_never_takes_the_old_one_down_before_the_new_one_serves(events):
    """Whatever fails, requests always have an engine that has proved itself."""
    world = World(has_previous=True, mode=Mode.OVERLAP)
    play(begin(Kind.ACTIVATE, has_previous=True), world, events, mode=Mode.OVERLAP)
    assert world.route in world.proved


def test_the_orders_are_those_of_the_book():
    """Word for word, so that a changed order is a changed test."""

    def walked(kind: Kind, mode: Mode) -> list[str]:
        at: Position | None = begin(kind, has_previous=True)
        phases = []
        while at is not None:
            phases.append(at.phase.value)
            at = after(at, mode=mode if at.phase is Phase.PREFLIGHT else None)
        return phases

    assert walked(Kind.ACTIVATE, Mode.OVERLAP) == [
        "preflight", "start", "probe", "flip", "drain", "stop", "retire",
    ]  # fmt: skip
    assert walked(Kind.ROLLBACK, Mode.SWAP) == [
        "preflight", "hold", "drain", "stop", "start", "probe", "flip", "retire", "examine",
    ]  # fmt: skip
    assert walked(Kind.STOP, Mode.OVERLAP) == ["flip", "drain", "stop", "retire"]
    assert set(MESSAGES) == set(Phase)


@pytest.mark.parametrize("mode", Mode)
def test_once_the_old_engine_ends_there_is_no_way_back(mode):
    """What serves is not taken down because an old engine would not stop."""
    at = replace(begin(Kind.ACTIVATE, has_previous=True), phase=Phase.FLIP, mode=mode)
    assert may_turn_back(at)
    flipped = after(at)
    assert flipped is not None
    assert not may_turn_back(flipped), "a failure never leads back"
    too_far = after(flipped) if mode is Mode.OVERLAP else flipped
    assert too_far is not None
    with pytest.raises(Conflict, match="too far"):
        turn_back(too_far)
    with pytest.raises(Conflict, match="too far"):
        turn_back(turn_back(at))


def test_while_an_overlap_drains_a_person_may_return():
    """The old engine still runs: it gets the requests, the new one finishes its own and ends."""
    drains = Position(Kind.ACTIVATE, has_previous=True, phase=Phase.DRAIN, flipped=True)
    assert may_return(drains)
    phases = []
    at: Position | None = turn_back(drains)
    while at is not None:
        phases.append(at.phase.value)
        at = after(at)
    assert phases == ["return", "redrain", "unstart"]
    for other in (
        replace(drains, phase=Phase.STOP),
        replace(drains, has_previous=False),
        replace(drains, mode=Mode.SWAP, phase=Phase.RETIRE),
        replace(drains, kind=Kind.STOP),
        turn_back(drains),
    ):
        assert not may_return(other)
        assert not may_cancel(other)


@pytest.mark.parametrize(("mode", "of_use"), [(Mode.OVERLAP, True), (Mode.SWAP, False)])
def test_a_cancel_in_the_middle_of_the_flip(mode, of_use):
    """The flip itself is done: an overlap may return from it."""
    at = Position(Kind.ACTIVATE, has_previous=True, phase=Phase.FLIP, mode=mode)
    assert may_cancel(at) is of_use


def test_a_failed_preflight_touches_nothing():
    """The mode is not known yet, the old engine runs: only the target's traces are removed."""
    back = turn_back(begin(Kind.ACTIVATE, has_previous=True))
    assert back.phase is Phase.UNSTART
    assert after(back) is None


@pytest.mark.parametrize(
    ("wanted", "has_previous", "fits", "mode"),
    [
        ("auto", False, False, Mode.OVERLAP),
        ("swap", False, False, Mode.OVERLAP),
        ("auto", True, True, Mode.OVERLAP),
        ("auto", True, False, Mode.SWAP),
        ("swap", True, True, Mode.SWAP),
        ("overlap", True, True, Mode.OVERLAP),
    ],
)
def test_the_mode_is_what_is_wanted_where_memory_allows_it(wanted, has_previous, fits, mode):
    """Memory decides, the file may insist on a swap."""
    assert choose_mode(wanted, has_previous=has_previous, fits_beside=fits) is mode


def test_an_overlap_that_does_not_fit_is_refused():
    """Rather than surprising people with a pause."""
    with pytest.raises(Conflict, match="no room"):
        choose_mode("overlap", has_previous=True, fits_beside=False)


def test_a_phase_of_another_way_is_refused():
    """A record that makes no sense stops instead of guessing."""
    with pytest.raises(Conflict, match="hold is not a phase"):
        after(replace(begin(Kind.ACTIVATE, has_previous=True), phase=Phase.HOLD))
