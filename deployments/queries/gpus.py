"""The GPUs of the hosts, and what holds their memory, as each worker last reported it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.models import Host, Replica, User
from deployments.queries.overview import DeploymentRow
from deployments.queries.paging import require

OTHERS = "driver and other processes"


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that holds memory of a GPU."""

    name: str
    """A generation's uid, a build step, a process, or `OTHERS`."""
    memory_bytes: int
    ours: bool
    """True for an engine or a build step of mmadmin."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU of a host."""

    host: str
    index: int
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    used_by: list[Holder]


def gpus(actor: User, rows: Iterable[DeploymentRow]) -> list[GpuRow]:
    """Every GPU of every host; `rows` name the engines that hold memory."""
    require(actor)
    by_host: dict[int, list[Replica]] = {}
    for row in rows:
        for replica in row.replicas:
            by_host.setdefault(replica.host_id, []).append(replica)
    return [
        gpu
        for host in Host.objects.order_by("name").only("name", "facts")
        for gpu in gpus_of(host.name, host.facts, by_host.get(host.pk, ()))
    ]


def gpus_of(host: str, facts: Mapping[str, Any], replicas: Iterable[Replica]) -> list[GpuRow]:
    """The GPUs of one host by its facts, with the engines that run there."""
    engines = {replica.pid: replica.generation.uid for replica in replicas if replica.pid}
    return [
        GpuRow(
            host=host,
            index=int(gpu["index"]),
            name=str(gpu.get("name", "")),
            memory_total_bytes=int(gpu["memory_total_bytes"]),
            memory_free_bytes=int(gpu["memory_free_bytes"]),
            used_by=_holders(gpu, engines),
        )
        for gpu in facts.get("gpus") or ()
    ]


def _holders(gpu: Mapping[str, Any], engines: Mapping[int, str]) -> list[Holder]:
    """What holds its memory, known by a process or one that it descends from."""
    known = {lease["pid"]: lease["owner"] for lease in gpu.get("leases") or ()} | dict(engines)
    found = []
    for process in gpu.get("processes") or ():
        family = (process["pid"], *process.get("ancestors", ()))
        name = next((known[pid] for pid in family if pid in known), "")
        found.append(
            Holder(name or f"pid {process['pid']}", int(process["memory_bytes"]), bool(name))
        )
    held = sum(one.memory_bytes for one in found)
    rest = int(gpu["memory_total_bytes"]) - int(gpu["memory_free_bytes"]) - held
    return [*found, Holder(OTHERS, rest, ours=False)] if rest > 0 else found
