"""The codec of snapshots and usage events."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.errors import InvalidInput
from mmadmin.core.snapshot import (
    ErrorPatterns,
    KeyRecord,
    ReplicaRoute,
    Route,
    Snapshot,
    Usage,
    snapshot_from_json,
    snapshot_to_json,
    usage_from_json,
)
from tests.support.usage import usage_to_json

_ROUTE = Route(
    deployment="smollm2",
    public_name="smollm2-135m",
    mode="hold",
    generation=3,
    generation_uid="smollm2/3",
    replicas=(ReplicaRoute(uid="r1", socket="/run/a/engine.sock", slots=4),),
    hold_until=1_800_000_000,
    created=1_700_000_000,
    context_per_slot=2048,
    errors=ErrorPatterns(template="Template: ", request="bad"),
)
_TRIAL = Route(
    deployment="smollm2",
    public_name="smollm2/4",
    mode="open",
    generation=4,
    generation_uid="smollm2/4",
    replicas=(ReplicaRoute(uid="r2", socket="/run/b/engine.sock", slots=1),),
    trial=True,
)
_KEY = KeyRecord(
    key_id="k", digest="ab", state="active", deployments=("smollm2",), rpm=3, trials=True
)
_SNAPSHOT = Snapshot(
    version=7, routes={"smollm2-135m": _ROUTE}, keys={"k": _KEY}, trials={"smollm2/4": _TRIAL}
)


def test_a_snapshot_survives_the_round_trip() -> None:
    """What is published is what the gate serves from."""
    assert snapshot_from_json(snapshot_to_json(_SNAPSHOT)) == _SNAPSHOT


def test_engines_of_an_earlier_version_are_held() -> None:
    """A snapshot on disk whose engines listen on TCP ports: their requests wait for new ones."""
    data = json.loads(snapshot_to_json(_SNAPSHOT))
    old = {"uid": "r1", "url": "http://127.0.0.1:21000", "slots": 4}
    data["routes"]["smollm2-135m"] |= {"mode": "open", "hold_until": 0, "replicas": [old]}
    route = snapshot_from_json(json.dumps(data)).routes["smollm2-135m"]
    assert (route.mode, route.replicas, route.is_served) == ("hold", (), True)
    assert route.hold_until > time.time()


def test_a_newer_panel_may_add_fields() -> None:
    """Unknown fields are ignored, at every level."""
    data = json.loads(snapshot_to_json(_SNAPSHOT))
    data["extra"] = data["routes"]["smollm2-135m"]["extra"] = data["keys"]["k"]["extra"] = [1]
    assert snapshot_from_json(json.dumps(data)) == _SNAPSHOT


def test_an_older_snapshot_knows_no_trials() -> None:
    """What lies on disk from before is read: no trial runs, and no key may ask one."""
    data = json.loads(snapshot_to_json(_SNAPSHOT))
    del data["trials"], data["routes"]["smollm2-135m"]["trial"], data["keys"]["k"]["trials"]
    old = snapshot_from_json(json.dumps(data))
    assert (old.trials, old.keys["k"].trials) == ({}, False)
    assert old.routes == _SNAPSHOT.routes


def test_a_gate_of_before_offers_no_trial() -> None:
    """Trials stand apart from the routes, which is all that it reads."""
    assert set(json.loads(snapshot_to_json(_SNAPSHOT))["routes"]) == {"smollm2-135m"}


def test_a_trial_and_its_deployment_are_looked_up_apart() -> None:
    """Each is found among its own kind, and waits in a line of its own."""
    assert _SNAPSHOT.now(_ROUTE) is _ROUTE
    assert _SNAPSHOT.now(_TRIAL) is _TRIAL
    assert Snapshot(version=8, routes={"smollm2/4": _ROUTE}, keys={}).now(_TRIAL) is None
    other = replace(_ROUTE, deployment="other")
    renamed = replace(_ROUTE, public_name="small")
    later = Snapshot(version=8, routes={_ROUTE.public_name: other, "small": renamed}, keys={})
    assert later.now(_ROUTE) is renamed, "its deployment counts, not the name"
    assert Snapshot(version=8, routes={_ROUTE.public_name: other}, keys={}).now(_ROUTE) is None
    assert (_ROUTE.queue_name, _TRIAL.queue_name) == ("smollm2", "smollm2/4")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-5],
        lambda text: "[]",
        lambda text: text.replace('"format":1', '"format":2'),
        lambda text: text.replace('"hold"', '"ajar"'),
        lambda text: text.replace('"active"', '"asleep"'),
        lambda text: text.replace('"slots":4', '"slots":"4"'),
        lambda text: text.replace('["smollm2"]', '"smollm2"'),
        lambda text: text.replace('"request":"bad"', '"request":"(bad"'),
        lambda text: text.replace('"request":"bad"', '"request":7'),
        lambda text: text.replace('"digest"', '"digits"'),
        lambda text: text.replace('"trial":true', '"trial":1'),
        lambda text: text.replace('"trials":true', '"trials":"yes"'),
    ],
)
def test_a_damaged_snapshot_is_refused(damage) -> None:
    """A gate keeps its last good snapshot instead of serving half of a bad one."""
    with pytest.raises(InvalidInput):
        snapshot_from_json(damage(snapshot_to_json(_SNAPSHOT)))


@given(
    st.builds(
        Usage,
        id=st.text(min_size=1),
        at=st.floats(0, 1e10),
        key_id=st.text(),
        deployment=st.text(),
        endpoint=st.text(),
        generation=st.integers(0, 2**31),
        status=st.integers(100, 599),
        outcome=st.sampled_from(["ok", "refused", "failed", "cancelled"]),
        exact=st.booleans(),
        seq=st.integers(0, 2**53),
    )
)
def test_a_usage_event_survives_the_round_trip(usage: Usage) -> None:
    """Nothing is lost between the spool and the usage records."""
    assert usage_from_json(usage_to_json(usage)) == usage


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"id":1}', "null"])
def test_a_damaged_usage_event_is_refused(text: str) -> None:
    """A torn line of the spool does not enter the usage records."""
    with pytest.raises(InvalidInput):
        usage_from_json(text)


def test_a_usage_event_with_a_wrong_type_is_refused() -> None:
    """A count that is no number does not enter the usage records."""
    usage = Usage(
        id="r", at=1.0, key_id="k", deployment="d", generation=1, endpoint="chat", status=200,
        outcome="ok",
    )  # fmt: skip
    good = json.loads(usage_to_json(usage))
    for field, value in (("prompt_tokens", "3"), ("exact", 1), ("status", True), ("outcome", 4)):
        with pytest.raises(InvalidInput):
            usage_from_json(json.dumps({**good, field: value}))
