"""`mm top`: what the gate is doing now, by deployment: requests, queue, speed.

Reads the gate's own figures (its metrics port), so it works while panel, database and broker are
down. Rates are those of the time between two looks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from mmadmin.cli.output import JsonFlag, console, emit_json
from mmadmin.core.errors import Unreachable
from mmadmin.core.home import Ports

WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The gate's counters at one moment, summed over its workers."""

    at: float
    samples: dict[str, dict[str, float]]
    """Sample name → deployment (or reason) → sum."""

    def value(self, name: str, label: str) -> float:
        """One sum; 0 when there is none."""
        return self.samples.get(name, {}).get(label, 0.0)

    def labels(self) -> list[str]:
        """The deployments that have any figure."""
        names = ("mm_gate_running", "mm_gate_waiting", "mm_gate_requests_total")
        return sorted({label for name in names for label in self.samples.get(name, {})})


def look(url: str) -> Figures:
    """Read the gate's metrics; `Unreachable` when it does not answer."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=5.0, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise Unreachable(
            f"the gate's metrics do not answer: {error}", remedy="is it up? mm status"
        ) from error
    return parse(answer.text, time.monotonic())


def parse(text: str, at: float) -> Figures:
    """Sum an exposition by deployment; tokens by deployment and kind."""
    samples: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                continue
            name = sample.name
            if name == "mm_gate_tokens_total":
                name = f"{name}:{sample.labels['kind']}"
            label = sample.labels.get("deployment") or sample.labels.get("reason") or ""
            samples[name][label] += sample.value
    return Figures(at=at, samples={name: dict(sums) for name, sums in samples.items()})


def rows(before: Figures, after: Figures) -> list[dict[str, Any]]:
    """One row a deployment: what is going on, and the rates between the two looks."""
    span = max(after.at - before.at, 1e-6)

    def rate(name: str, label: str) -> float:
        return (after.value(name, label) - before.value(name, label)) / span

    found = []
    for label in after.labels():
        started = rate("mm_gate_ttft_seconds_count", label) * span
        waited = rate("mm_gate_ttft_seconds_sum", label) * span
        found.append(
            {
                "deployment": label,
                "running": int(after.value("mm_gate_running", label)),
                "waiting": int(after.value("mm_gate_waiting", label)),
                "requests": int(after.value("mm_gate_requests_total", label)),
                "requests_per_s": round(rate("mm_gate_requests_total", label), 2),
                "tokens_per_s": round(rate("mm_gate_tokens_total:completion", label), 1),
                "prompt_tokens_per_s": round(rate("mm_gate_tokens_total:prompt", label), 1),
                "ttft_ms": round(1000 * waited / started) if started else None,
            }
        )
    return found


def _picture(found: list[dict[str, Any]]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    heads = ("deployment", "running", "waiting", "requests", "per s", "tok/s", "prompt/s", "TTFT")
    for n, head in enumerate(heads):
        shown.add_column(head, justify="left" if n == 0 else "right")
    for row in found:
        ttft = f"{row['ttft_ms']} ms" if row["ttft_ms"] is not None else ""
        shown.add_row(
            escape(row["deployment"]),
            str(row["running"]),
            str(row["waiting"]),
            str(row["requests"]),
            str(row["requests_per_s"]),
            str(row["tokens_per_s"]),
            str(row["prompt_tokens_per_s"]),
            ttft,
        )
    return shown


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Look for one second, then end.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show live requests, queue and tokens a second by deployment, until interrupted.

    Example: mm top --once --json
    """
    url = f"http://127.0.0.1:{Ports.from_env().metrics}"
    before = look(url)
    if once or as_json or not console.is_terminal:
        time.sleep(WINDOW_S)
        found = rows(before, look(url))
        if as_json:
            emit_json({"window_s": WINDOW_S, "deployments": found})
        else:
            console.print(_picture(found) if found else "no requests yet")
        return
    with Live(_picture([]), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WINDOW_S)
            after = look(url)
            live.update(_picture(rows(before, after)), refresh=True)
            before = after
