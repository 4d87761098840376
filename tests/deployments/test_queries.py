"""Reads: right rows, and a number of queries that does not grow with them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from deployments import queries
from deployments.jobs import usage
from deployments.models import (
    Activation,
    AuditEvent,
    Build,
    BuildStep,
    ClientKey,
    Deployment,
    Generation,
    Host,
    Replica,
    Transition,
    UsageBucket,
    UsageDay,
    UsageEvent,
)
from deployments.schemas import history_document
from mmadmin.core.errors import NotFound, Refused
from mmadmin.core.snapshot import Usage
from tests.deployments.conftest import People
from tests.deployments.specs import spec
from tests.panel.seed import days_of

pytestmark = [pytest.mark.django_db, pytest.mark.database]

START = datetime(2026, 3, 1, tzinfo=UTC)


def fill(people: People, host: Host, deployments: int, generations: int) -> None:
    """So many deployments with so many generations, each with a build and an activation."""
    for d in range(deployments):
        deployment = Deployment.objects.create(name=f"d{d}", public_name=f"d{d}", host=host)
        parent = None
        for n in range(1, generations + 1):
            state = "live" if n == generations else "retired"
            parent = Generation.objects.create(
                deployment=deployment,
                number=n,
                parent=parent,
                author=people.bob,
                state=state,
                spec_toml=spec(name=f"d{d}", public_name=f"d{d}", context=1024 * n),
            )
            build = Build.objects.create(
                deployment=deployment, generation=parent, host=host, state="succeeded"
            )
            BuildStep.objects.create(build=build, position=0, derivation="0" * 64)
            Activation.objects.create(
                deployment=deployment, target=parent, kind="activate", state="succeeded", host=host
            )
            at = START + timedelta(hours=n)
            Transition.objects.create(generation=parent, before="probing", after="live", at=at)
            if state == "retired":
                later = at + timedelta(minutes=30)
                Transition.objects.create(
                    generation=parent, before="live", after="draining", at=later
                )
        Replica.objects.create(uid=f"d{d}", generation=parent, host=host, state="ready")
        Deployment.objects.filter(pk=deployment.pk).update(live=parent)
        ClientKey.objects.create(key_id=f"k{d}", owner=f"owner {d}", created_by=people.alice)
        AuditEvent.objects.create(actor=people.bob, verb="key.issue", subject=f"key:k{d}")
        UsageEvent.objects.create(
            id=f"e{d}",
            at=timezone.now(),
            key_id=f"k{d}",
            deployment=f"d{d}",
            endpoint="chat",
            status=200,
            outcome="ok",
            tokens_per_s_milli=2000 * (d + 1),
            ttft_ms=100,
        )


READS: list[tuple[str, int, Any]] = [
    ("deployments_overview", 10, lambda p: queries.deployments_overview(p.carol)),
    ("deployment", 10, lambda p: queries.deployment(p.carol, "d0")),
    ("history", 9, lambda p: queries.history(p.carol, "d0")),
    ("generation", 8, lambda p: queries.generation(p.carol, "d0", 2)),
    ("export_history", 11, lambda p: queries.export_history(p.carol, "d0")),
    ("measured", 4, lambda p: queries.measured(p.carol, "d0")),
    ("diff", 4, lambda p: queries.diff(p.carol, "d0", 1, 2)),
    ("builds", 2, lambda p: [(b.deployment, b.generation) for b in queries.builds(p.carol).rows]),
    ("activations", 2, lambda p: [a.target.uid for a in queries.activations(p.carol).rows]),
    ("keys", 2, lambda p: [k.created_by for k in queries.keys(p.bob).rows]),
    ("audit", 2, lambda p: [e.actor for e in queries.audit(p.bob).rows]),
    ("activity", 1, lambda p: queries.activity(p.carol)),
    ("users", 2, lambda p: queries.users(p.alice)),
    ("hosts", 1, lambda p: queries.hosts(p.carol)),
]


@pytest.mark.parametrize(("name", "ceiling", "read"), READS, ids=[name for name, *_ in READS])
def test_queries_do_not_grow_with_rows(  # noqa: PLR0917 (fixtures and a line of the table)
    people: People, host: Host, django_assert_num_queries, name: str, ceiling: int, read: Any
) -> None:
    """Five deployments with ten generations cost as many queries as one with two."""
    fill(people, host, 1, 2)
    with django_assert_num_queries(ceiling):
        read(people)
    Deployment.objects.update(live=None)
    for model in (Replica, Transition, Activation, BuildStep, Build):
        model._default_manager.all().delete()
    Generation.objects.update(parent=None)
    for model in (Generation, Deployment, ClientKey, AuditEvent, UsageEvent):
        model._default_manager.all().delete()
    fill(people, host, 5, 10)
    with django_assert_num_queries(ceiling):
        read(people)


def test_the_overview(people: People, host: Host) -> None:
    """What is live, since when, how many generations, how fast in the last hour."""
    fill(people, host, 2, 3)
    first, second = queries.deployments_overview(people.carol)
    assert (first.deployment.name, first.live.number, first.generations) == ("d0", 3, 3)
    assert first.live_since == START + timedelta(hours=3)
    assert first.state == "live"
    assert (first.tokens_per_s, second.tokens_per_s, first.ttft_ms) == (2.0, 4.0, 100)
    assert [r.uid for r in second.replicas] == ["d1"]
    assert queries.deployments_overview(people.carol, archived=True) == []


def test_live_spans(people: People, host: Host) -> None:
    """From going live until leaving it; the last one is open."""
    fill(people, host, 1, 2)
    newer, older = queries.history(people.carol, "d0").rows
    assert older.live_spans == [
        (START + timedelta(hours=1), START + timedelta(hours=1, minutes=30))
    ]
    assert older.live_s == 1800
    assert newer.live_spans == [(START + timedelta(hours=2), None)]
    assert newer.is_live
    assert not older.is_live


def test_differences(people: People, host: Host) -> None:
    """The changed field, before and after."""
    fill(people, host, 1, 2)
    rows = queries.diff(people.carol, "d0", 1, 2)
    assert [(r.section, r.field, r.before, r.after) for r in rows] == [
        ("spec", "serve.context", "1024", "2048")
    ]
    with pytest.raises(NotFound):
        queries.diff(people.carol, "d0", 1, 9)


def test_key_search(people: People, host: Host) -> None:
    """By owner, note or prefix; states from the dates."""
    now = timezone.now()
    for n, values in enumerate(
        [
            {"owner": "Ann Smith"},
            {"owner": "Ben", "note": "for smithy"},
            {"owner": "Cid", "revoked_at": now},
            {"owner": "Dan", "expires_at": now - timedelta(days=1)},
            {"owner": "Eli", "suspended_at": now},
        ]
    ):
        ClientKey.objects.create(key_id=f"abc{n}", **values)

    def found(**how: Any) -> list[str]:
        return [key.owner.split()[0] for key in queries.keys(people.bob, **how).rows]

    assert found(search="smith") == ["Ben", "Ann"]
    assert found(search="sk-mm-abc2") == ["Cid"]
    assert found(state="active") == ["Ben", "Ann"]
    assert found(state="revoked") == ["Cid"]
    assert found(state="expired") == ["Dan"]
    assert found(state="suspended") == ["Eli"]


def test_usage(people: People, db: None) -> None:
    """Sums by hour, day, key, deployment and generation, within a time."""
    buckets = [
        UsageBucket(
            hour=START + timedelta(hours=hour),
            key_id=key,
            deployment="d0",
            generation=1 + hour // 24,
            endpoint="chat",
            requests=2,
            prompt_tokens=10,
        )
        for hour in range(48)
        for key in ("a", "b")
    ]
    UsageBucket.objects.bulk_create(buckets)
    UsageDay.objects.bulk_create(days_of(buckets))

    def rows(**how: Any) -> list[dict[str, Any]]:
        until = START + timedelta(hours=48)
        return queries.usage(people.bob, **{"since": START, "until": until} | how)

    assert len(rows()) == 48
    assert rows()[0]["requests"] == 4
    assert [row["prompt_tokens"] for row in rows(by="day")] == [480, 480]
    assert [(row["key_id"], row["requests"]) for row in rows(by="key")] == [("a", 96), ("b", 96)]
    assert [row["generation"] for row in rows(by="generation")] == [1, 2]
    assert rows(by="deployment", key_id="a", generation=2)[0]["requests"] == 48
    assert rows(since=START + timedelta(hours=47), by="key")[0]["requests"] == 2


FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"deployment": "d0"},
    {"deployment": "d0", "generation": 1},
    {"generation": 1},
    {"key_id": "a"},
    {"deployment": "d1", "key_id": "a"},
)


@pytest.mark.parametrize("only", FILTERS, ids=str)
@pytest.mark.parametrize("by", ["day", "key", "deployment", "generation", "endpoint"])
def test_days_and_hours_say_the_same(
    people: People, db: None, monkeypatch: pytest.MonkeyPatch, by: Any, only: dict[str, Any]
) -> None:
    """Whole days are read from the rows of the days, with the sums that the hours add up to."""
    usage.enter(
        [
            Usage(
                id=f"r{n}",
                gate="g",
                seq=n + 1,
                at=(START + timedelta(hours=5 * n)).timestamp(),
                key_id="ab"[n % 2],
                deployment=f"d{n % 3}",
                generation=n % 2,
                endpoint=("chat", "embeddings")[n % 2],
                status=200,
                outcome="failed" if n % 4 == 0 else "ok",
                prompt_tokens=10 + n,
                completion_tokens=n,
                ttft_ms=100 * n,
                duration_ms=1000,
            )
            for n in range(24)
        ]
    )
    span = {"since": START, "until": START + timedelta(days=4)}
    of_days = queries.usage(people.bob, by=by, **span, **only)
    assert of_days
    monkeypatch.setattr("deployments.queries.usage_records._whole_days", lambda *_: None)
    assert _by_names(of_days) == _by_names(queries.usage(people.bob, by=by, **span, **only))


def _by_names(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=str)


def test_a_part_of_a_day_is_read_from_its_hours(people: People, db: None) -> None:
    """Only days that lie in the time as a whole are taken whole; the present one counts as such."""
    hours = [
        UsageBucket(hour=START + timedelta(hours=hour), key_id="a", deployment="d0", requests=1)
        for hour in range(48)
    ]
    UsageBucket.objects.bulk_create(hours)
    UsageDay.objects.bulk_create(days_of(hours))

    def requests(since: int, until: int) -> int:
        span = (START + timedelta(hours=hour) for hour in (since, until))
        rows = queries.usage(
            people.bob, by="key", **dict(zip(("since", "until"), span, strict=True))
        )
        return sum(row["requests"] for row in rows)

    assert requests(0, 48) == 48
    assert requests(1, 48) == 47
    assert requests(0, 30) == 30
    now = timezone.now()
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    UsageDay.objects.create(day=today, of="key", key_id="a", requests=7)
    soon = queries.usage(people.bob, by="key", since=today, until=now + timedelta(hours=1))
    assert [row["requests"] for row in soon] == [7]


def test_roles(people: People, host: Host) -> None:
    """Viewers see no keys and no audit log; a person who is switched off sees nothing."""
    for read in (queries.keys, queries.audit, queries.users):
        with pytest.raises(Refused):
            read(people.carol)
    for read in (queries.hosts, queries.deployments_overview, queries.builds):
        with pytest.raises(Refused):
            read(people.charlie)


def test_the_export_tells_everything(people: People, host: Host) -> None:
    """Plain JSON: generations with files, changes and spans, activations, who and when."""
    fill(people, host, 1, 2)
    data = json.loads(json.dumps(history_document(queries.export_history(people.carol, "d0"))))
    first, second = data["generations"]
    assert (first["number"], second["parent"], second["author"]) == (1, 1, "bob")
    assert second["changes"] == [
        {
            "section": "spec",
            "field": "serve.context",
            "before": "1024",
            "after": "2048",
            "label": "serve.context",
            "was": "1024",
            "now": "2048",
        }
    ]
    assert [step["derivation"] for step in second["builds"][0]["steps"]] == ["0" * 64]
    assert first["spec_toml"].startswith('name = "d0"')
    ended = datetime.fromisoformat(first["live_spans"][0]["until"])
    assert ended == START + timedelta(hours=1, minutes=30)
    assert [a["target"] for a in data["activations"]] == [1, 2]


def test_a_request_names_its_generation(people: People, host: Host) -> None:
    """By its id."""
    fill(people, host, 1, 1)
    assert queries.request(people.carol, "e0").deployment == "d0"
    with pytest.raises(NotFound):
        queries.request(people.carol, "none")
