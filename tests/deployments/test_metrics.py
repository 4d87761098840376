"""The records as metrics: what a monitoring system needs to raise its own alarms."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from deployments import actions, queries
from deployments.models import Alarm, Deployment, Host, UsageBucket
from mmadmin.gate.metrics import Metrics
from tests.deployments.conftest import People

pytestmark = pytest.mark.django_db
RULES = Path(__file__).parents[2] / "docs" / "prometheus-rules.yml"


def samples(text: bytes) -> dict[str, dict[str, float]]:
    """Name → the values of the labels → value."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[" ".join(sample.labels.values())] = sample.value
    return found


@pytest.fixture
def watched(people: People) -> Deployment:
    """A deployment with an alarm, on a host with a GPU, and a key with a budget in use."""
    facts = {
        "disk_free_bytes": 7,
        "disk_total_bytes": 70,
        "gpus": [{"index": 0, "memory_total_bytes": 80, "memory_free_bytes": 30}],
    }
    seen_at = timezone.now() - timedelta(seconds=90)
    host = Host.objects.create(name="gpu-1", facts=facts, seen_at=seen_at)
    deployment = Deployment.objects.create(name="tiny", public_name="tiny", host=host)
    Alarm.objects.create(deployment=deployment, kind="drift", subject="argv", message="x")
    key, _ = actions.issue_key(people.alice, owner="ann", tokens_per_day=100)
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    UsageBucket.objects.create(hour=hour, key_id=key.key_id, deployment="tiny", prompt_tokens=60)
    return deployment


def test_the_records_are_metrics(people: People, watched: Deployment) -> None:
    """Deployments, alarms, jobs, disks, GPUs, the worker, budgets."""
    found = samples(queries.metrics(people.bob))
    assert found["mm_deployment_live"] == {"tiny gpu-1": 0}
    assert found["mm_alarms"]["drift"] == 1
    assert found["mm_alarms"]["unhealthy"] == 0
    assert found["mm_jobs"]["build queued"] == 0
    assert found["mm_worker_seen_seconds"]["gpu-1"] >= 90
    assert found["mm_host_disk_free_bytes"] == {"gpu-1": 7}
    assert found["mm_gpu_memory_free_bytes"] == {"0 gpu-1": 30}
    ((labels, used),) = found["mm_key_used_tokens"].items()
    assert (labels.split()[1:], used) == (["ann", "day"], 60)
    assert list(found["mm_key_budget_tokens"].values()) == [100]


def test_viewers_see_no_keys(people: People, watched: Deployment) -> None:
    """Owners and budgets are for operators."""
    assert b"ann" not in queries.metrics(people.carol)


def test_the_rules_name_metrics_that_exist(people: People, watched: Deployment) -> None:
    """Every `mm_` name of the documented alert rules is one of ours."""
    metrics = Metrics("0")
    metrics.of(("tiny", "1", "chat")).requests[200, "ok"] = 1
    metrics.gauges = lambda: {"mm_gate_broker_up": ("x", 1.0), "mm_gate_spool_errors": ("x", 0.0)}
    known = set(samples(queries.metrics(people.bob))) | set(samples(metrics.text()))
    known |= {"mm_gate_waiting", "mm_gate_refusals_total", "mm_engines"}
    named = set(re.findall(r"\bmm_[a-z_]+", RULES.read_text()))
    assert named
    assert named <= known, named - known
