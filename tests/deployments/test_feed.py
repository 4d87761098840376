"""What the gate is told: complete, in order, at once, and without the broker too."""

from __future__ import annotations

import json
import stat
import threading
from datetime import timedelta

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from deployments import actions
from deployments.broker import feed
from deployments.models import ClientKey, Deployment, Generation, Host, Replica
from mmadmin.core.access import key_matches
from mmadmin.core.engines.llama_server.questions import QUESTIONS
from mmadmin.core.snapshot import (
    NUDGE_CHANNEL,
    REVOKE_CHANNEL,
    SNAPSHOT_KEY,
    ErrorPatterns,
    Snapshot,
    snapshot_from_json,
)
from tests.deployments.conftest import People
from tests.deployments.processes import PATIENCE_S

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.database,
    pytest.mark.usefixtures("toy_machine"),
]


def in_redis(broker) -> Snapshot:
    """The snapshot that a gate elsewhere reads."""
    return snapshot_from_json(broker.get(SNAPSHOT_KEY))


def heard(nudges) -> dict:
    """The next message."""
    message = nudges.get_message(timeout=PATIENCE_S)
    assert message is not None
    return message


def in_file(settings) -> Snapshot:
    """The snapshot that the gate on this machine reads."""
    return snapshot_from_json((settings.HOME.gate / "snapshot.json").read_bytes())


def serving(people: People, host: Host) -> Deployment:
    """A deployment with a live generation that has an engine."""
    deployment = Deployment.objects.create(name="smol", public_name="smol-chat", host=host)
    generation = Generation.objects.create(
        deployment=deployment, number=3, author=people.bob, spec_toml="", state="live"
    )
    Replica.objects.create(uid="u1", generation=generation, host=host, state="ready", slots=2)
    deployment.live = generation
    deployment.save()
    return deployment


@pytest.fixture
def served(people: People, host: Host) -> Deployment:
    """What `serving` makes."""
    return serving(people, host)


def test_a_key_reaches_the_gate_at_once(people: People, broker, settings) -> None:
    """Issued, suspended, revoked: each change is in value, nudge and file when the action ends."""
    nudges = broker.pubsub()
    nudges.subscribe(NUDGE_CHANNEL, REVOKE_CHANNEL)
    assert [heard(nudges)["type"] for _ in range(2)] == ["subscribe"] * 2
    key, text = actions.issue_key(people.alice, owner="x", rpm=7)
    for snapshot in (in_redis(broker), in_file(settings)):
        record = snapshot.keys[key.key_id]
        assert (record.state, record.rpm) == ("active", 7)
        assert key_matches(text, record.digest, settings.KEY_PEPPER)
    assert int(heard(nudges)["data"]) == in_redis(broker).version
    actions.suspend_key(people.alice, key.key_id, on=True)
    assert in_redis(broker).keys[key.key_id].state == "suspended"
    assert int(heard(nudges)["data"]) == in_redis(broker).version
    actions.revoke_key(people.alice, key.key_id)
    assert in_file(settings).keys[key.key_id].state == "revoked"
    first, then = heard(nudges), heard(nudges)
    assert (first["channel"], first["data"]) == (REVOKE_CHANNEL.encode(), key.key_id.encode())
    assert then["channel"] == NUDGE_CHANNEL.encode()
    assert int(then["data"]) == in_redis(broker).version
    nudges.close()


def test_no_key_text_anywhere(people: People, broker, settings) -> None:
    """Neither rows nor snapshot nor file hold a key's text."""
    _, text = actions.issue_key(people.alice, owner="x")
    assert text.encode() not in broker.get(SNAPSHOT_KEY)
    assert text not in (settings.HOME.gate / "snapshot.json").read_text()
    assert text not in json.dumps(list(ClientKey.objects.values()), default=str)


def test_routes(people: People, host: Host, broker, settings) -> None:
    """Open with the live generation's engines, hold while a swap lasts, else closed."""
    deployment = serving(people, host)
    Deployment.objects.create(name="idle", public_name="idle", host=host)
    feed.publish_snapshot()
    routes = in_redis(broker).routes
    assert set(routes) == {"smol-chat", "idle"}
    route = routes["smol-chat"]
    assert (route.mode, route.generation, route.generation_uid) == ("open", 3, "smol/3")
    socket = str(settings.HOME.engine_socket("u1"))
    assert [(r.uid, r.socket, r.slots) for r in route.replicas] == [("u1", socket, 2)]
    assert (routes["idle"].mode, routes["idle"].generation) == ("closed", None)
    deployment.hold_until = timezone.now() + timedelta(seconds=60)
    deployment.save()
    feed.publish_snapshot()
    held = in_redis(broker).routes["smol-chat"]
    assert held.mode == "hold"
    assert held.hold_until == int(deployment.hold_until.timestamp())
    deployment.archived_at = timezone.now()
    deployment.save()
    feed.publish_snapshot()
    assert "smol-chat" not in in_redis(broker).routes


@pytest.mark.parametrize(
    ("launch", "errors"),
    [
        ({"engine_kind": "llama-server"}, QUESTIONS.error_patterns),
        ({"engine_kind": "removed"}, ErrorPatterns()),
        ({}, ErrorPatterns()),
    ],
)
@pytest.mark.usefixtures("broker")
def test_the_gate_learns_how_the_engine_words_its_errors(
    served: Deployment, settings, launch, errors
) -> None:
    """By the launch's record."""
    Replica.objects.update(launch=launch)
    feed.publish_snapshot()
    assert in_file(settings).routes["smol-chat"].errors == errors


def test_without_the_broker(people: People, settings) -> None:
    """The file is written all the same; the timer brings the broker up to date."""
    key, _ = actions.issue_key(people.alice, owner="x")
    path = settings.HOME.gate / "snapshot.json"
    assert in_file(settings).keys[key.key_id].state == "active"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_timer_mends_and_writes_nothing_for_nothing(people: People, broker, settings) -> None:
    """Same content: same version; a broker or file that lost it gets it again."""
    version = feed.publish_snapshot()
    assert feed.publish_snapshot(force=False) == version
    broker.flushall()
    assert feed.publish_snapshot(force=False) == version
    assert in_redis(broker).version == version
    (settings.HOME.gate / "snapshot.json").unlink()
    feed.publish_snapshot(force=False)
    assert in_file(settings).version == version


def test_an_older_snapshot_never_wins(people: People, broker, settings) -> None:
    """Publishers at the same moment: versions are unique, and the newest one stays."""
    versions: list[int] = []

    def publish() -> None:
        try:
            versions.append(feed.publish_snapshot())
        finally:
            connections.close_all()

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(versions)) == 8
    assert in_redis(broker).version == max(versions) == in_file(settings).version
    feed._to_redis("{}", min(versions))
    assert in_redis(broker).version == max(versions)


def test_ten_thousand_keys(people: People, broker) -> None:
    """A revocation among ten thousand keys asks the database no more than one among ten."""
    made = [ClientKey(key_id=f"k{n:09}", digest="0" * 64, owner="x") for n in range(10_000)]
    asked = []
    for batch in (made[:1], made[1:10], made[10:]):  # the first one fills what is kept in memory
        ClientKey.objects.bulk_create(batch)
        with CaptureQueriesContext(connection) as queries:
            actions.revoke_key(people.alice, batch[0].key_id)
        assert in_redis(broker).keys[batch[0].key_id].state == "revoked"
        asked.append(len(queries))
    assert asked[1] == asked[2]
