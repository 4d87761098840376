"""Metrics for Prometheus: plain integers on the hot path, made into families when read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SPEEDS = (1, 2, 5, 10, 15, 20, 30, 40, 60, 80, 120, 200, 400)
"""Tokens per second."""


class Histogram:
    """Counts by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus wants them."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, running))
        return rows


@dataclass(slots=True)
class Series:
    """Metrics of one deployment, generation and endpoint."""

    requests: dict[tuple[int, str], int] = field(default_factory=dict)
    """By status and outcome."""
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    duration: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queued: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    speed: Histogram = field(default_factory=lambda: Histogram(SPEEDS))


Labels = tuple[str, str, str]
_NAMES = ("worker", "deployment", "generation", "endpoint")


class Metrics(Collector):
    """All metrics of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self.series: dict[Labels, Series] = {}
        self.refusals: dict[tuple[str, str], int] = {}
        """By deployment (empty where none was reached) and reason."""
        self.unrouted: dict[tuple[int, str], int] = {}
        """Requests that led to no deployment, by status and outcome."""
        self.gauges: Callable[[], Mapping[str, tuple[str, float]]] = dict
        """Name → (help, value), read with the metrics."""
        self.queues: Callable[[], Mapping[str, tuple[int, int]]] = dict
        """Deployment → (running, waiting), read with the metrics."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def of(self, labels: Labels) -> Series:
        """The series of one deployment, generation and endpoint."""
        series = self.series.get(labels)
        if series is None:
            series = self.series[labels] = Series()
        return series

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Families in a fixed order, so that the texts of workers can be merged."""
        requests = CounterMetricFamily(
            "mm_gate_requests", "Requests ended.", labels=(*_NAMES, "status", "outcome")
        )
        tokens = CounterMetricFamily("mm_gate_tokens", "Tokens.", labels=(*_NAMES, "kind"))
        ttft = HistogramMetricFamily("mm_gate_ttft_seconds", "To the first event.", labels=_NAMES)
        duration = HistogramMetricFamily("mm_gate_duration_seconds", "Whole.", labels=_NAMES)
        queued = HistogramMetricFamily("mm_gate_queue_seconds", "Time in the queue.", labels=_NAMES)
        speed = HistogramMetricFamily(
            "mm_gate_tokens_per_second", "Generation speed.", labels=_NAMES
        )
        for labels, series in self.series.items():
            row = [self._worker, *labels]
            for (status, outcome), count in series.requests.items():
                requests.add_metric([*row, str(status), outcome], count)
            for kind in ("prompt", "completion", "cached", "reasoning"):
                tokens.add_metric([*row, kind], getattr(series, kind))
            for family, histogram in (
                (ttft, series.ttft),
                (duration, series.duration),
                (queued, series.queued),
                (speed, series.speed),
            ):
                family.add_metric(row, histogram.buckets(), histogram.total)
        yield from (requests, tokens, ttft, duration, queued, speed)
        yield from self._refusals()
        running = GaugeMetricFamily(
            "mm_gate_running", "Requests at the engine.", labels=("worker", "deployment")
        )
        waiting = GaugeMetricFamily(
            "mm_gate_waiting", "Requests in the line.", labels=("worker", "deployment")
        )
        for deployment, (now_running, now_waiting) in self.queues().items():
            running.add_metric([self._worker, deployment], now_running)
            waiting.add_metric([self._worker, deployment], now_waiting)
        yield from (running, waiting)
        for name, (text, value) in self.gauges().items():
            gauge = GaugeMetricFamily(name, text, labels=("worker",))
            gauge.add_metric([self._worker], value)
            yield gauge

    def _refusals(self) -> Iterable[Metric]:
        """What ended without an engine's answer."""
        refusals = CounterMetricFamily(
            "mm_gate_refusals",
            "Requests that got an error from the gate.",
            labels=("worker", "deployment", "reason"),
        )
        for (deployment, reason), count in self.refusals.items():
            refusals.add_metric([self._worker, deployment or "none", reason], count)
        yield refusals
        templates = CounterMetricFamily(
            "mm_gate_template_refusals",
            "Conversations that the chat template refused.",
            labels=("worker", "deployment"),
        )
        for (deployment, reason), count in self.refusals.items():
            if reason == "template_refused":
                templates.add_metric([self._worker, deployment], count)
        yield templates
        unrouted = CounterMetricFamily(
            "mm_gate_unrouted",
            "Requests that led to no deployment.",
            labels=("worker", "status", "outcome"),
        )
        for (status, outcome), count in self.unrouted.items():
            unrouted.add_metric([self._worker, str(status), outcome], count)
        yield unrouted


def merge(texts: Iterable[bytes]) -> bytes:
    """One exposition out of several workers': each family's head once, all samples under it."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                if family not in heads:
                    heads[family] = [line]
            elif line.startswith("# TYPE "):
                family = line.split(" ", 3)[2]
                if len(heads.setdefault(family, [])) < 2:  # noqa: PLR2004 (HELP and TYPE)
                    heads[family].append(line)
            elif line:
                samples.setdefault(family, []).append(line)
    lines: list[str] = []
    for family, head in heads.items():
        lines += head + samples.get(family, [])
    return ("\n".join(lines) + "\n").encode()
