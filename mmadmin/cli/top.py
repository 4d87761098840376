"""`mm top`: what the gate is doing now, by deployment and by key: requests, queue, speed.

Reads the gate's own figures (its metrics port), so it works while panel, database and broker are
down; rates are those of the time between two looks. Single requests and keys come through the
broker, while that is up.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group

from mmadmin.cli.output import JsonFlag, console, emit_json, escape, seconds_text
from mmadmin.cli.tables import Column, live_table
from mmadmin.core.errors import MmError, Unreachable
from mmadmin.core.home import Home, Ports

WINDOW_S = 1.0
SHOWN = 30
"""Single requests on the screen at most."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The gate's counters at one moment, summed over its workers."""

    at: float
    samples: dict[str, dict[str, float]]
    """Sample name → deployment → sum."""

    def value(self, name: str, label: str) -> float:
        """One sum; 0 when there is none."""
        return self.samples.get(name, {}).get(label, 0.0)

    def labels(self) -> list[str]:
        """The deployments that have any figure."""
        names = ("mm_gate_running", "mm_gate_waiting", "mm_gate_requests_total")
        return sorted({label for name in names for label in self.samples.get(name, {})} - {""})


def look(url: str) -> Figures:
    """Read the gate's metrics; `Unreachable` when it does not answer."""
    import httpx2

    try:
        answer = httpx2.get(f"{url}/metrics", timeout=5.0, trust_env=False)
        answer.raise_for_status()
    except httpx2.HTTPError as error:
        raise Unreachable(
            f"the gate's metrics do not answer: {error}", remedy="is it up? mm status"
        ) from error
    return parse(answer.text, time.monotonic())


def parse(text: str, at: float) -> Figures:
    """Sum an exposition by deployment; tokens by deployment and kind."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                continue
            name = sample.name
            if name == "mm_gate_tokens_total":
                name = f"{name}:{sample.labels['kind']}"
            samples[name][sample.labels.get("deployment", "")] += sample.value
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


def requests_now(url: str) -> list[dict[str, Any]]:
    """The single requests that the gate's workers are at, oldest first; [] without a broker."""
    import redis

    from mmadmin.core.snapshot import GATE_WATCH_PREFIX

    client = redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)
    found: list[dict[str, Any]] = []
    try:
        for key in client.scan_iter(f"{GATE_WATCH_PREFIX}*"):
            text = client.get(key)
            if isinstance(text, bytes):
                found += json.loads(text)["requests"]
    except (redis.RedisError, OSError):
        return []
    return sorted(found, key=lambda request: -float(request["age_s"]))


def owners_of(requests: list[dict[str, Any]]) -> dict[str, str]:
    """Whose keys these are; nobody's while the database is down, or for who may not see keys."""
    from django.db import Error

    from mmadmin.cli.records import actor

    try:
        person = actor()
        from deployments import queries

        return queries.key_owners(person, {str(request["key"]) for request in requests})
    except (MmError, Error):
        return {}


def _picture(
    found: list[dict[str, Any]], requests: list[dict[str, Any]], owners: dict[str, str]
) -> Group:
    from mmadmin.core.access import prefix

    deployments = live_table(
        [
            Column("deployment", whole=True),
            *(Column(h, whole=True, right=True) for h in ("running", "waiting")),
            Column("requests", whole=True, right=True, drop=3),
            Column("per s", whole=True, right=True, drop=1),
            Column("tok/s", whole=True, right=True),
            Column("prompt/s", whole=True, right=True, drop=2),
            Column("TTFT", whole=True, right=True),
        ],
        [
            [
                escape(row["deployment"]),
                *(str(row[name]) for name in ("running", "waiting", "requests", "requests_per_s")),
                str(row["tokens_per_s"]),
                str(row["prompt_tokens_per_s"]),
                f"{row['ttft_ms']} ms" if row["ttft_ms"] is not None else "",
            ]
            for row in found
        ],
    )
    single = live_table(
        [
            Column("key", whole=True),
            Column("generation", whole=True),
            Column("endpoint", whole=True, drop=1),
            Column("state", whole=True),
            Column("age", whole=True, right=True),
            Column("events", whole=True, right=True, drop=2),
        ],
        [
            [
                f"{prefix(str(r['key']))} {escape(owners.get(str(r['key']), ''))}".rstrip(),
                escape(str(r["generation"] or r["deployment"] or "-")),
                escape(str(r["endpoint"])),
                escape(str(r["state"])),
                seconds_text(float(r["age_s"])),
                str(r["events"]),
            ]
            for r in requests[:SHOWN]
        ],
    )
    return Group(deployments, "", single) if requests else Group(deployments)


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Look for one second, then end.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show live requests, queue and tokens a second by deployment and key, until interrupted.

    Example: mm top --once --json
    """
    from rich.live import Live

    url = f"http://127.0.0.1:{Ports.from_env().metrics}"
    broker = os.environ.get("REDIS_URL") or Home.from_env().broker_url
    before = look(url)
    if once or as_json or not console.is_terminal:
        time.sleep(WINDOW_S)
        found, requests = rows(before, look(url)), requests_now(broker)
        owners = owners_of(requests)
        if as_json:
            told = [r | {"owner": owners.get(str(r["key"]), "")} for r in requests]
            emit_json({"window_s": WINDOW_S, "deployments": found, "requests": told})
        else:
            console.print(_picture(found, requests, owners) if found else "no requests yet")
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WINDOW_S)
            after = look(url)
            requests = requests_now(broker)
            live.update(_picture(rows(before, after), requests, owners_of(requests)), refresh=True)
            before = after
