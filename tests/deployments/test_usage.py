"""Usage records: each finished request once, whatever is repeated, lost, or out of order."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections

from deployments import queries
from deployments.jobs import usage
from deployments.models import ClientKey, UsageBucket, UsageEvent
from mmadmin.core.errors import Refused
from mmadmin.core.snapshot import USAGE_ACK_KEY, USAGE_STREAM, Usage
from tests.deployments.conftest import People
from tests.support.usage import usage_to_json

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

AT = datetime(2026, 5, 1, 12, 59, 59, tzinfo=UTC).timestamp()


def finished(seq: int, **values: object) -> Usage:
    """A finished request of gate g1."""
    plain = Usage(
        id=f"r{seq}",
        at=AT,
        key_id="k1",
        deployment="smol",
        generation=1,
        endpoint="chat",
        status=200,
        outcome="ok",
        prompt_tokens=10,
        completion_tokens=5,
        ttft_ms=100,
        duration_ms=400,
        gate="g1",
        seq=seq,
    )
    return replace(plain, **values)


def send(broker, *usages: Usage) -> None:
    """Put usage into the stream, as a gate does."""
    for one in usages:
        broker.xadd(USAGE_STREAM, {"event": usage_to_json(one)})


def acks(broker) -> dict[str, int]:
    """What the gates are told."""
    return {gate.decode(): int(seq) for gate, seq in broker.hgetall(USAGE_ACK_KEY).items()}


def test_usage_is_recorded(people: People, broker) -> None:
    """Events, hourly sums, the key's last use, the ack, an empty stream."""
    ClientKey.objects.create(key_id="k1", owner="x")
    send(broker, finished(1), finished(2, outcome="failed", status=502), finished(3, at=AT + 1))
    assert usage.collect() == 3
    assert UsageEvent.objects.count() == 3
    first, second = UsageBucket.objects.order_by("hour")
    assert (first.requests, first.failed, first.prompt_tokens) == (2, 1, 20)
    assert (first.ttft_ms, first.duration_ms) == (200, 800)
    assert (second.requests, second.hour.hour) == (1, 13)
    assert ClientKey.objects.get().last_used_at.timestamp() == AT + 1
    assert acks(broker) == {"g1": 3}
    assert broker.xlen(USAGE_STREAM) == 0


def test_refused_and_cancelled_requests_are_counted_apart(people: People, broker) -> None:
    """Refusals are not among the requests and add to no time; owners are the sums of their keys."""
    for key_id, owner in (("k1", "ann"), ("k2", "ann"), ("k3", "ben")):
        ClientKey.objects.create(key_id=key_id, owner=owner)
    send(
        broker,
        finished(1),
        finished(2, key_id="k2", outcome="cancelled", status=499),
        finished(3, outcome="refused", status=429, prompt_tokens=0, completion_tokens=0),
        finished(4, key_id="k3", outcome="refused", status=404, deployment="", generation=0),
        finished(5, key_id="k3", outcome="failed", status=502),
    )
    usage.collect()
    day = datetime(2026, 5, 1, tzinfo=UTC)
    for until in (day + timedelta(days=1), day + timedelta(hours=23)):  # by days, by hours
        span = {"since": day, "until": until}
        ann, ben = queries.usage(people.bob, by="owner", **span)
        names = ("owner", "requests", "failed", "refused", "cancelled", "duration_ms")
        assert [ann[name] for name in names] == ["ann", 2, 0, 1, 1, 800]
        assert [ben[name] for name in names] == ["ben", 1, 1, 1, 0, 400]
        keys = queries.usage(people.bob, by="key", **span)
        assert [(row["key_id"], row["owner"]) for row in keys] == [
            ("k1", "ann"),
            ("k2", "ann"),
            ("k3", "ben"),
        ]
        table = queries.usage_csv(queries.usage(people.bob, by="owner", **span), "owner")
        assert table.splitlines()[1].startswith("ann,2,0,20,10,")
        with pytest.raises(Refused):
            queries.usage(people.carol, by="owner", **span)


def test_what_is_sent_again_counts_once(people: People, broker) -> None:
    """A gate that was not told, or a broker that kept its entries: no sum changes."""
    send(broker, finished(1), finished(2))
    usage.collect()
    send(broker, finished(1), finished(2), finished(2), finished(3))
    assert usage.collect() == 1
    assert UsageBucket.objects.get().requests == 3
    assert acks(broker) == {"g1": 3}


def test_a_gap_holds_the_ack_back(people: People, broker) -> None:
    """Entries that the broker lost: the gate is told only what is there without a gap."""
    send(broker, finished(1), finished(4), finished(5))
    usage.collect()
    assert acks(broker) == {"g1": 1}
    assert UsageBucket.objects.get().requests == 3
    send(broker, *[finished(seq) for seq in range(2, 7)])
    usage.collect()
    assert acks(broker) == {"g1": 6}
    assert UsageBucket.objects.get().requests == 6


def test_a_crash_before_the_ack(people: People, broker, monkeypatch) -> None:
    """Committed but neither acked nor deleted: the next run acks, and counts nothing twice."""
    send(broker, finished(1), finished(2))
    real = usage.enter

    def then_die(usages: object) -> object:
        real(usages)
        raise KeyboardInterrupt

    monkeypatch.setattr(usage, "enter", then_die)
    with pytest.raises(KeyboardInterrupt):
        usage.collect()
    monkeypatch.setattr(usage, "enter", real)
    assert usage.collect() == 0
    assert UsageBucket.objects.get().requests == 2
    assert acks(broker) == {"g1": 2}


def test_a_damaged_entry_stops_nothing(people: People, broker, caplog) -> None:
    """It is logged and dropped; the others are counted."""
    broker.xadd(USAGE_STREAM, {"event": "{"})
    send(broker, finished(1))
    assert usage.collect() == 1
    assert "cannot be read" in caplog.text


def test_four_collectors_at_once(people: People, broker) -> None:
    """Two thousand entries, four workers: every request once."""
    pipe = broker.pipeline()
    for seq in range(1, 2001):
        pipe.xadd(USAGE_STREAM, {"event": usage_to_json(finished(seq, key_id=f"k{seq % 7}"))})
    pipe.execute()
    errors: list[BaseException] = []

    def collect() -> None:
        try:
            usage.collect()
        except BaseException as error:  # noqa: BLE001 (shown below)
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=collect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert UsageEvent.objects.count() == 2000
    assert sum(UsageBucket.objects.values_list("requests", flat=True)) == 2000
    assert acks(broker) == {"g1": 2000}
