"""How long `mm` takes to answer: `make bench-cli`.

Each command runs many times in a process of its own, taking turns with the same command of an
earlier commit (`--before`, checked out beside this one), so that both meet the same machine; the
processor's time says what is left of the clock's where others compute beside it. The
folder is an installation with a few generations, whose system is built; nothing runs there. Then
each command runs once more with `-X importtime`, and the packages that take longest are listed.

A table, and one line at the end; exit 1 names what falls short of its limit. `--before` takes a
commit, or the folder of a checkout (with its own `.venv`, if it has one); `--before ''` leaves the
comparison out. `--rounds`, `--json FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmadmin.core.store import Store
from tests.support.engine import engine_store

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "f4faad0"
NAME = "smollm2-135m"
FILE = f"deployments/catalog/{NAME}.toml"
GENERATIONS = 3
RUN = "import sys; sys.argv[0] = 'mm'; from mmadmin.cli.entry import main; main()"
ANSWER_S, PLAN_S = 0.4, 0.6
PACKAGES_SHOWN = 10


@dataclass
class Row:
    """One command's times."""

    command: str
    limit_s: float
    now_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """User and system time of the same runs."""
    before_s: list[float] = field(default_factory=list)
    imports_ms: dict[str, float] = field(default_factory=dict)
    """By package, longest first."""

    @property
    def median_s(self) -> float:
        """What counts."""
        return statistics.median(self.now_s)

    @property
    def ok(self) -> bool:
        """True when it holds."""
        return self.median_s <= self.limit_s


COMMANDS = (
    ("--help", ANSWER_S),
    ("status", ANSWER_S),
    (f"history {NAME}", ANSWER_S),
    ("keys issue --owner bench", ANSWER_S),
    (f"plan {FILE}", PLAN_S),
    (f"build {FILE}", PLAN_S),
)


@dataclass(frozen=True)
class Checkout:
    """One state of the code, and an installation that it made."""

    code: Path
    python: str
    home: Path

    def run(self, command: str, *options: str) -> tuple[float, subprocess.CompletedProcess[str]]:
        """Run `mm`; seconds, and what it said."""
        began = time.perf_counter()
        done = subprocess.run(
            [self.python, *options, "-c", RUN, *command.split()],
            cwd=self.code,
            env={
                "PATH": os.environ["PATH"],
                "HOME": os.environ.get("HOME", "/"),
                "MM_HOME": str(self.home),
                "PYTHONPATH": str(self.code),
                "COLUMNS": "120",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return time.perf_counter() - began, done

    def must(self, command: str) -> None:
        """Run `mm` to set up."""
        _, done = self.run(command)
        if done.returncode:
            raise SystemExit(f"{self.code}: mm {command}\n{done.stdout}\n{done.stderr}")

    def set_up(self) -> None:
        """An installation with generations, and their system in the store."""
        self.must("init")
        engine_store().seed(Store(self.home / "store"))
        self.must(f"build {FILE}")
        for _ in range(GENERATIONS):
            self.must(f"deploy {FILE} --detach")


@contextmanager
def checked_out(before: str) -> Iterator[Path]:
    """The folder of an earlier commit."""
    if Path(before).is_dir():
        yield Path(before).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="mm-before-") as folder:
        code = Path(folder) / "code"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(code), before], check=True)
        try:
            yield code
        finally:
            subprocess.run([*git, "remove", "--force", str(code)], check=True)


def checkout(code: Path, home: Path) -> Checkout:
    """A checkout with an installation of its own."""
    own = code / ".venv" / "bin" / "python"
    found = Checkout(code, str(own) if own.exists() else sys.executable, home)
    found.set_up()
    return found


def imports_of(now: Checkout, command: str) -> dict[str, float]:
    """Milliseconds by package that a command's imports take themselves, longest first."""
    _, done = now.run(command, "-X", "importtime")
    took: Counter[str] = Counter()
    for own_us, module in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", done.stderr):
        took[module.partition(".")[0]] += int(own_us)
    return {package: us / 1000 for package, us in took.most_common(PACKAGES_SHOWN)}


def children_cpu_s() -> float:
    """User and system time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(now: Checkout, before: Checkout | None, rounds: int) -> list[Row]:
    """Every command, old and new in turns; a command that fails there has no time."""
    rows = [Row(command, limit) for command, limit in COMMANDS]
    for _ in range(rounds + 1):  # the first is not counted: it writes the .pyc files
        for row in rows:
            cpu_s = children_cpu_s()
            took, done = now.run(row.command)
            row.cpu_s.append(children_cpu_s() - cpu_s)
            if done.returncode:
                raise SystemExit(f"mm {row.command}\n{done.stdout}\n{done.stderr}")
            row.now_s.append(took)
            if before is not None:
                took, done = before.run(row.command)
                if done.returncode == 0:
                    row.before_s.append(took)
    for row in rows:
        del row.now_s[0], row.cpu_s[0], row.before_s[:1]
        row.imports_ms = imports_of(now, row.command)
    return rows


def show(rows: Sequence[Row]) -> None:
    """The tables."""
    for row in rows:
        was = statistics.median(row.before_s) if row.before_s else 0.0
        before = f"before {was:5.2f} s, {was / row.median_s:.1f} times as long" if was else ""
        word = "ok  " if row.ok else "MISS"
        limit, cpu = f"(limit {row.limit_s:g})", statistics.median(row.cpu_s)
        print(
            f"{word} mm {row.command:46} {row.median_s:5.2f} s {limit:12} cpu {cpu:4.2f} s {before}"
        )
    for row in rows:
        parts = ", ".join(f"{package} {ms:.0f}" for package, ms in row.imports_ms.items())
        print(f"     mm {row.command}: imports in ms: {parts}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and end with one line."""
    parser = argparse.ArgumentParser(prog="bench.cli", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", default=BEFORE, help="a commit, or the folder of a checkout")
    parser.add_argument("--json", type=Path, help="write all that was measured there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mm-cli-") as folder:
        now = checkout(ROOT, Path(folder) / "now")
        if options.before:
            with checked_out(options.before) as code:
                rows = measure(now, checkout(code, Path(folder) / "before"), options.rounds)
        else:
            rows = measure(now, None, options.rounds)
    show(rows)
    if options.json:
        data: list[dict[str, Any]] = [asdict(row) | {"ok": row.ok} for row in rows]
        options.json.write_text(json.dumps(data, indent=2), encoding="utf-8")
    short = [f"mm {row.command} took {row.median_s:.2f} s" for row in rows if not row.ok]
    print(
        f"bench-cli: {len(rows) - len(short)} of {len(rows)} commands answer in time"
        + (f"; short: {', '.join(short)}" if short else "")
    )
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
