"""Hosts: what each machine has, what holds its memory, whether its worker answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from deployments import actions, queries
from deployments.models import Host, HostTask, Replica, TaskKind
from deployments.views.page import attempt, form_only, page, person, show

WHOLE_PROCESS = "main memory"
"""The part of a report that is all of an engine on a host without cards."""
COLOURS = ("s0", "s1", "s2", "s3")


@dataclass(frozen=True, slots=True)
class Memory:
    """One bar: a card or the main memory, with what holds it."""

    name: str
    total: int
    parts: list[tuple[str, int, str]]
    """(what, bytes, class)"""
    free: int

    @property
    def used(self) -> int:
        """Bytes in use."""
        return max(0, self.total - self.free)

    @property
    def summary(self) -> str:
        """What a screen reader says."""
        held = ", ".join(name for name, _, _ in self.parts)
        return (
            f"{self.name}: {self.used / 2**30:.1f} of {self.total / 2**30:.1f} GiB in use ({held})"
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """A host as its page shows it."""

    host: Host
    facts: dict[str, Any]
    memory: list[Memory]
    replicas: list[Replica]
    measured: list[tuple[str, list[dict[str, Any]]]]
    """Engines by their generation's uid, with what each was predicted and measured to hold."""
    away: bool
    examined: HostTask | None
    """Its newest examination."""


def machines(
    hosts: Iterable[Host],
    rows: Iterable[queries.DeploymentRow],
    measured: Mapping[int, list[dict[str, Any]]],
    examined: Mapping[int, HostTask] | None = None,
) -> list[Machine]:
    """The hosts with their memory and the replicas that hold it."""
    running: dict[int, list[Replica]] = {}
    for row in rows:
        for replica in row.replicas:
            running.setdefault(replica.host_id, []).append(replica)
    return [
        Machine(
            host=host,
            facts=host.facts,
            memory=memory(host.facts, running.get(host.pk, []), measured),
            replicas=running.get(host.pk, []),
            measured=[
                (replica.generation.uid, held)
                for replica in running.get(host.pk, [])
                if (held := measured.get(replica.generation_id))
            ],
            away=host.seen_at is None or host.is_away,
            examined=(examined or {}).get(host.pk),
        )
        for host in hosts
    ]


def memory(
    facts: dict[str, Any],
    replicas: list[Replica],
    measured: Mapping[int, list[dict[str, Any]]],
) -> list[Memory]:
    """GPU cards where there are any, else the main memory."""
    if cards := [_card(gpu) for gpu in queries.gpus_of("", facts, replicas)]:
        return cards
    total = int(facts.get("memory_total_bytes") or 0)
    free = int(facts.get("memory_available_bytes") or 0)
    return [_main(total, free, replicas, measured)] if total else []


def _main(
    total: int,
    free: int,
    replicas: list[Replica],
    measured: Mapping[int, list[dict[str, Any]]],
) -> Memory:
    """The main memory, with what each engine was measured to hold when it started."""
    parts: list[tuple[str, int, str]] = []
    for replica in replicas:
        rows = measured.get(replica.generation_id, [])
        held = {row["part"]: int(row["measured"]) for row in rows}.get(WHOLE_PROCESS, 0)
        if held:
            css = COLOURS[len(parts) % len(COLOURS)]
            parts.append((replica.generation.uid, held, css))
    free = max(0, min(free, total - sum(size for _, size, _ in parts)))
    rest = total - free - sum(size for _, size, _ in parts)
    if rest > 0:
        parts.append(("other processes", rest, "other"))
    return Memory("Memory", total, parts, free)


def _card(gpu: queries.GpuRow) -> Memory:
    parts: list[tuple[str, int, str]] = []
    for holder in gpu.used_by:
        css = COLOURS[len(parts) % len(COLOURS)] if holder.ours else "other"
        parts.append((holder.name, holder.memory_bytes, css))
    return Memory(f"GPU {gpu.index}", gpu.memory_total_bytes, parts, gpu.memory_free_bytes)


@page
def hosts(request: HttpRequest) -> HttpResponse:
    """Every host."""
    me = person(request)
    examined = queries.examinations(me)
    rows = queries.deployments_overview(me)
    measured = queries.measured_memory(me, rows)
    found = machines(queries.hosts(me), rows, measured, examined)
    return show(
        request,
        "hosts/page.html",
        {"nav": "hosts", "machines": found},
        parts={"hosts": "hosts/_hosts.html"},
    )


@form_only
@page
def examine(request: HttpRequest, name: str) -> HttpResponse:
    """Have the host's worker go through the doctor's checks."""
    return attempt(
        request,
        lambda: actions.start_task(person(request), TaskKind.DOCTOR, host=name),
        f"Health check started on {name}. Results appear below.",
        reverse("hosts"),
    )
