"""kill -9 of each program while an activation is in a phase, and cancels, all under load.

The worker is held in the phase, so that nothing is left to chance. `make bench-kills` kills every
program at every phase.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.holds import Hold, held_worker
from tests.e2e.installation import Installation
from tests.e2e.kills import CANCEL, Case, Town, town_in

KILLS = [
    Case("worker", "start", "overlap", back=False),
    Case("panel", "probe", "overlap", back=False),
    Case("broker", "flip", "overlap", back=False),
    Case("gate", "drain", "overlap", back=False),
    Case("supervisor", "unstart", "overlap", back=True),
    Case("gate", "hold", "swap", back=False),
    Case("worker", "stop", "swap", back=False),
    Case("supervisor", "start", "swap", back=False),
    Case("worker", "restart", "swap", back=True),
]
CANCELS = [Case(CANCEL, "probe", "swap", back=False), Case(CANCEL, "drain", "overlap", back=False)]


@pytest.fixture(scope="module")
def town(site: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    """Generations that take turns, under a load of plain and streamed requests."""
    folder = tmp_path_factory.mktemp("town")
    with (
        held_worker(site),
        town_in(site, folder, ("overlap", "swap"), Hold(site), clients=2) as town,
    ):
        yield town
    site.run("stop", "kills", "--reason", "tidy")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", KILLS, ids=str)
def test_killed_at_a_phase_of_an_activation(town: Town, case: Case) -> None:
    """It ends live, or failed and restored: one engine, no request lost, the next one succeeds."""
    assert town.run(case).faults == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CANCELS, ids=str)
def test_cancelled_at_a_phase_of_an_activation(town: Town, case: Case) -> None:
    """The old generation is back, from the store or at once; no request lost, the next succeeds."""
    assert town.run(case).faults == []
