"""kill -9 of every program at every phase of an activation, under load: `make bench-kills`.

The demo model is activated again and again while plain and streamed requests go through the gate;
at each phase of each way (overlap, swap, and the ways back of a generation that fails) one program
is killed: worker, panel, broker, supervisor, gate. Looked at afterwards: exactly one engine runs,
the one that the records call live, and answers; nothing is half-way; no request failed except those
that a killed gate or supervisor cut; the next activation succeeds. Prints a table, then one line;
ends with 1 and the cases that fall short.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.installation import installation
from tests.e2e.kills import MODES, VICTIMS, Glimpse, Outcome, cases, town_in
from tests.support.engine import engine_store


def told(outcome: Outcome) -> str:
    """A cell of the table."""
    if outcome.faults:
        return "WRONG"
    cut = f", {outcome.cut} cut" if outcome.cut else ""
    return f"{outcome.end} {outcome.settled_s:.1f} s{cut}"


def table(outcomes: Sequence[Outcome], victims: Sequence[str]) -> str:
    """Phases by victims, as Markdown."""
    rows: dict[tuple[str, str, bool], dict[str, str]] = {}
    for outcome in outcomes:
        case = outcome.case
        rows.setdefault((case.mode, case.phase, case.back), {})[case.victim] = told(outcome)
    lines = [f"| way | phase | {' | '.join(victims)} |", "|---|---|" + "---|" * len(victims)]
    for (mode, phase, back), cells in rows.items():
        way = f"{mode}, back" if back else mode
        lines.append(f"| {way} | {phase} | {' | '.join(cells.get(v, '') for v in victims)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill; prints the table."""
    parser = argparse.ArgumentParser(prog="bench.kills", description=__doc__)
    parser.add_argument("--victims", nargs="*", default=list(VICTIMS), choices=VICTIMS)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--phases", nargs="*", default=[])
    parser.add_argument("--clients", type=int, default=2)
    options = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mm-kills-") as folder:
        run = installation(Path(folder) / "home", engine_store())
        site = next(run)
        try:
            trap, clients = Glimpse(site), options.clients
            with town_in(site, Path(folder), options.modes, trap, clients=clients) as town:
                for case in cases(options.victims, options.modes, options.phases):
                    outcome = town.run(case)
                    outcomes.append(outcome)
                    print(f"{case}: {told(outcome)} ({outcome.tries} tries)", file=sys.stderr)
                    for fault in outcome.faults:
                        print(f"    {fault}", file=sys.stderr)
        finally:
            next(run, None)
    print(table(outcomes, options.victims))
    wrong = [str(o.case) for o in outcomes if o.faults]
    cut = sum(outcome.cut for outcome in outcomes)
    print(
        f"\n{len(outcomes)} kills in {time.monotonic() - began:.0f} s; of {len(town.load.asked)}"
        f" requests {cut} cut by the killed program;"
        f" {'wrong: ' + ', '.join(wrong) if wrong else 'none went wrong'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
