"""What the sandbox costs an engine: `make bench-sandbox`.

The demo model on the real engine, once in the sandbox of this host and once plain, both under one
supervisor. Each round starts the two, and asks them in turns for the same tokens while the other is
idle, so that whatever else the machine does meets both; who is first alternates.
Start: from the order until the first healthy answer. Speed: the engine's own count of generated
tokens a second.

A table, and one line at the end; exit 1 names what falls short: the medians may differ by 1 % of
tokens a second and by 0.1 s of start. `--rounds`, `--requests`, `--tokens` shorten it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2

from mmadmin.core import catalog
from mmadmin.core.engines.protocol import LaunchSpec, Seat, System
from mmadmin.core.engines.system import read_system
from mmadmin.core.home import Home
from mmadmin.host import engine_process
from mmadmin.host.engine_client import EngineClient
from mmadmin.host.engine_sandbox import holds_here
from mmadmin.host.readiness import wait_ready
from mmadmin.host.supervisor import Supervisor
from tests.support.engine import engine_store

SLOWER_PERCENT = 1.0
LATER_S = 0.1
SECRET = "bench-sandbox"
PATIENCE_S = 120.0


@dataclass
class Way:
    """One of the two ways to run the engine, and what was measured of it."""

    name: str
    level: str
    start_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)

    def launch(self, home: Home, system: System) -> LaunchSpec:
        """Its engine's launch."""
        seat = Seat(str(home.engine_socket(self.name)))
        made = catalog.engine(system.engine_kind).launch(system, seat)
        return replace(made, readable=[str(part) for part in system.parts.values()])

    def start(self, home: Home, launch: LaunchSpec) -> None:
        """Start its engine and take the time until it is ready."""
        os.environ["MM_SANDBOX"] = self.level
        began = time.monotonic()
        engine_process.start(home, self.name, launch, SECRET)
        health = launch.questions.health.path
        with EngineClient(launch, SECRET) as client:
            while not _healthy(client, health):
                if time.monotonic() - began > PATIENCE_S:
                    raise SystemExit(f"{self.name}: not ready after {PATIENCE_S:.0f} s")
                time.sleep(0.002)
        self.start_s.append(time.monotonic() - began)
        wait_ready(home, self.name, launch, SECRET)

    def ask(self, launch: LaunchSpec, tokens: int) -> None:
        """One completion; the first one of an engine is not counted by the caller."""
        body = {"prompt": "Once upon a time", "n_predict": tokens, "ignore_eos": True}
        with EngineClient(launch, SECRET) as client:
            answer = client.post("/completion", {**body, "cache_prompt": False}, timeout_s=600)
        answer.raise_for_status()
        self.tokens_per_s.append(float(answer.json()["timings"]["predicted_per_second"]))


def _healthy(client: EngineClient, path: str) -> bool:
    try:
        return client.get(path).is_success
    except httpx2.HTTPError:
        return False


def measure(rounds: int, requests: int, tokens: int) -> tuple[Way, Way]:
    """The sandboxed and the plain engine, over all rounds."""
    fenced, plain = Way("fenced", holds_here().level), Way("plain", "none")
    system = read_system(engine_store().path("system"))
    with tempfile.TemporaryDirectory(prefix="mm-sandbox-") as folder:
        home = Home(Path(folder))
        supervisor = Supervisor(home)
        supervisor.launch()
        try:
            for number in range(rounds):
                ways = [fenced, plain] if number % 2 == 0 else [plain, fenced]
                launches = [way.launch(home, system) for way in ways]
                pairs = list(zip(ways, launches, strict=True))
                for way, launch in pairs:
                    way.start(home, launch)
                for way, launch in pairs:  # the caches of each are warm
                    way.ask(launch, tokens)
                    way.tokens_per_s.pop()
                for turn in range(requests):
                    for way, launch in pairs if turn % 2 == 0 else pairs[::-1]:
                        way.ask(launch, tokens)
                for way in ways:
                    engine_process.stop(home, way.name)
        finally:
            supervisor.shutdown(60, lambda _line: None)
    return fenced, plain


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=8, help="of each engine in a round")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    asked = parser.parse_args(argv)
    if holds_here().level == "none":
        raise SystemExit("this host has no sandbox to measure (mm doctor says why)")
    fenced, plain = measure(asked.rounds, asked.requests, asked.tokens)
    start = [statistics.median(way.start_s) for way in (fenced, plain)]
    speed = [statistics.median(way.tokens_per_s) for way in (fenced, plain)]
    ratios = [a / b for a, b in zip(fenced.tokens_per_s, plain.tokens_per_s, strict=True)]
    slower = 100 * (1 - statistics.median(ratios))
    later = start[0] - start[1]
    print(f"| | {fenced.level} | plain | difference | limit |")
    print("|---|---:|---:|---:|---:|")
    print(
        f"| generation, tokens/s, median of {len(ratios)} | {speed[0]:.1f} | {speed[1]:.1f} "
        f"| {-slower:+.2f} % | -{SLOWER_PERCENT:g} % |"
    )
    print(
        f"| start to ready, s, median of {asked.rounds} | {start[0]:.3f} | {start[1]:.3f} "
        f"| {later:+.3f} | +{LATER_S:g} |"
    )
    short = []
    if slower > SLOWER_PERCENT:
        short.append(f"generation is {slower:.2f} % slower")
    if later > LATER_S:
        short.append(f"the start takes {later:.3f} s longer")
    print(f"falls short: {'; '.join(short)}" if short else "the sandbox costs what it may")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
