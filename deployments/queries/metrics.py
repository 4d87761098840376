"""The installation's records as metrics for Prometheus; the gate has its own, of the requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.db.models import Count
from django.utils import timezone
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deployments.models import (
    Activation,
    Alarm,
    AlarmKind,
    Build,
    ClientKey,
    Deployment,
    Host,
    HostTask,
    Replica,
    ReplicaState,
    Role,
    Trial,
    User,
)
from deployments.queries.paging import require
from deployments.queries.usage_records import budgets
from mmadmin.core.generations.lifecycle import ACTIVE_JOB


class _Records(Collector):
    """Read when it is asked."""

    def __init__(self, actor: User) -> None:
        self._actor = actor

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        yield from _deployments()
        yield from _jobs()
        yield from _hosts()
        if self._actor.at_least(Role.OPERATOR):
            yield from _keys(self._actor)


def metrics(actor: User) -> bytes:
    """The exposition; budgets of keys only for operators."""
    require(actor)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Records(actor))
    return generate_latest(registry)


def _gauge(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[Iterable[str], float]]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(list(values), value)
    return family


def _deployments() -> Iterator[Metric]:
    found = Deployment.objects.filter(archived_at=None).select_related("live", "host")
    yield _gauge(
        "mm_deployment_live",
        "The live generation's number; 0 = none.",
        ("deployment", "host"),
        (((d.name, d.host.name), d.live.number if d.live else 0) for d in found),
    )
    engines = Replica.objects.exclude(state=ReplicaState.STOPPED)
    counted = engines.values_list("generation__deployment__name", "host__name", "state")
    yield _gauge(
        "mm_engines",
        "Engines by state.",
        ("deployment", "host", "state"),
        ((row[:3], row[3]) for row in counted.order_by().annotate(count=Count("pk"))),
    )
    open_ = dict(
        Alarm.objects.filter(cleared_at=None)
        .order_by()
        .values_list("kind")
        .annotate(count=Count("pk"))
    )
    yield _gauge(
        "mm_alarms",
        "Open alarms.",
        ("kind",),
        (((kind.value,), open_.get(kind.value, 0)) for kind in AlarmKind),
    )


def _jobs() -> Iterator[Metric]:
    rows = []
    for kind in (Build, Activation, HostTask, Trial):
        by_state = dict(
            kind.objects.filter(state__in=ACTIVE_JOB)
            .order_by()
            .values_list("state")
            .annotate(count=Count("pk"))
        )
        rows += [((kind.noun, state), by_state.get(state, 0)) for state in sorted(ACTIVE_JOB)]
    yield _gauge("mm_jobs", "Jobs that have not ended.", ("kind", "state"), rows)


def _hosts() -> Iterator[Metric]:
    hosts, now = list(Host.objects.order_by("name")), timezone.now()
    yield _gauge(
        "mm_worker_seen_seconds",
        "Seconds since the host's worker reported.",
        ("host",),
        (((h.name,), (now - h.seen_at).total_seconds()) for h in hosts if h.seen_at),
    )
    for name, text, fact in (
        ("mm_host_disk_free_bytes", "Free on the disk of the store.", "disk_free_bytes"),
        ("mm_host_disk_total_bytes", "Size of the disk of the store.", "disk_total_bytes"),
        ("mm_host_memory_available_bytes", "Available memory.", "memory_available_bytes"),
        ("mm_host_memory_total_bytes", "Memory.", "memory_total_bytes"),
    ):
        yield _gauge(
            name, text, ("host",), (((h.name,), h.facts[fact]) for h in hosts if fact in h.facts)
        )
    for name, text, fact in (
        ("mm_gpu_memory_free_bytes", "Free memory of a GPU.", "memory_free_bytes"),
        ("mm_gpu_memory_total_bytes", "Memory of a GPU.", "memory_total_bytes"),
    ):
        rows = ((h.name, gpu) for h in hosts for gpu in h.facts.get("gpus", ()))
        yield _gauge(
            name,
            text,
            ("host", "gpu"),
            (((n, str(gpu["index"])), gpu[fact]) for n, gpu in rows if fact in gpu),
        )


def _keys(actor: User) -> Iterator[Metric]:
    """Keys with budgets, as far as they still work."""
    found = [
        key
        for key in ClientKey.objects.filter(revoked_at=None)
        if key.state == "active" and (key.tokens_per_day or key.tokens_per_month)
    ]
    spent = budgets(actor, [key.key_id for key in found])
    limits, used = [], []
    for key in found:
        for at, (period, limit) in enumerate(
            (("day", key.tokens_per_day), ("month", key.tokens_per_month))
        ):
            if limit:
                labels = (key.key_id, key.owner, period)
                limits.append((labels, limit))
                used.append((labels, spent[key.key_id][at]))
    names = ("key", "owner", "period")
    yield _gauge("mm_key_budget_tokens", "Tokens that a key may use.", names, limits)
    yield _gauge("mm_key_used_tokens", "Tokens that it has used of them.", names, used)
