"""The rule that says which generations stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.generations.lifecycle import GenerationState as S
from mmadmin.core.generations.retention import DAY_S, SETTLED, Candidate, keep

NOW = 1_000_000_000.0

candidates = st.lists(
    st.builds(
        Candidate,
        uid=st.just(""),
        deployment=st.sampled_from("abc"),
        number=st.integers(1, 50),
        state=st.sampled_from(S),
        pinned=st.booleans(),
        last_live_at=st.none() | st.floats(0, NOW),
        last=st.integers(0, 4),
        on_trial=st.booleans(),
        days=st.integers(0, 20_000),
    ),
    unique_by=lambda c: (c.deployment, c.number),
    max_size=20,
).map(lambda rows: [Candidate(f"{c.deployment}/{c.number}", c.deployment, c.number, c.state, c.pinned, c.last_live_at, c.last, c.days, c.on_trial) for c in rows])  # fmt: skip


@given(candidates)
def test_nothing_that_matters_is_let_go(rows: list[Candidate]) -> None:
    """Whatever is going on, pinned, recently live, or among the last N stays; the rest goes."""
    kept = keep(rows, now=NOW)
    for one in rows:
        newer = sum(c.deployment == one.deployment and c.number > one.number for c in rows)
        recent = one.last_live_at is not None and NOW - one.last_live_at < one.days * DAY_S
        used = one.state not in SETTLED or one.on_trial
        must = used or one.pinned or recent or newer < one.last
        assert (one.uid in kept) == must
    assert all(kept.values())


def test_reasons_are_in_words() -> None:
    """A person reads why something is kept."""
    rows = [
        Candidate("a/0", "a", 0, S.RETIRED, last=1, on_trial=True),
        Candidate("a/1", "a", 1, S.RETIRED, last=1),
        Candidate("a/2", "a", 2, S.RETIRED, pinned=True, last=1),
        Candidate("a/3", "a", 3, S.RETIRED, last_live_at=NOW - 5, last=1, days=7),
        Candidate("a/4", "a", 4, S.LIVE, last=1),
        Candidate("a/5", "a", 5, S.BUILT, last=1),
    ]
    assert keep(rows, now=NOW) == {
        "a/0": "it is on trial",
        "a/2": "pinned",
        "a/3": "live within the last 7 days",
        "a/4": "it is live",
        "a/5": "one of the last 1 of a",
    }
