"""What others are told: the gate's snapshot and the live events of open pages.

The snapshot goes to Redis (value and nudge) and to a file beside the gate, so that a gate on this
host needs neither Redis nor the database. Its version comes from one locked row that is taken
before the records are read: of two snapshots, the one with the higher version never knows less.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

import redis
from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone
from redis.backoff import NoBackoff
from redis.retry import Retry

from deployments.models import ClientKey, Deployment, Job, Publication, Replica, ReplicaState
from mmadmin.core.generations.lifecycle import ACTIVE_JOB
from mmadmin.core.generations.trial import Phase
from mmadmin.core.home import Home
from mmadmin.core.snapshot import (
    KEY_LIMITS,
    NUDGE_CHANNEL,
    REVOKE_CHANNEL,
    SNAPSHOT_KEY,
    AnswerFields,
    ErrorPatterns,
    KeyRecord,
    ReplicaRoute,
    Route,
    RouteMode,
    Snapshot,
    snapshot_to_json,
)

log = logging.getLogger(__name__)

EVENTS_CHANNEL = "mm:events"
SESSION = "session"
"""The kind of event by which open pages look whether their session has ended."""
REDIS_TIMEOUT_S = 1.0

KEY_FIELDS = (
    "key_id",
    "digest",
    "revoked_at",
    "suspended_at",
    "expires_at",
    "deployments",
    "endpoints",
    "playground",
)

SWEPT_KEY = "mm:swept"
SET_IF_NEWER = """
local now = redis.call('GET', KEYS[2])
if now and tonumber(now) > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[2])
return 1
"""
"""Value, version and nudge in one step; an older snapshot never replaces a newer one."""


@lru_cache(maxsize=4)
def _client(url: str, _pid: int) -> redis.Redis:
    return redis.Redis.from_url(
        url,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1),  # a connection from before the broker's restart
    )


def client() -> redis.Redis:
    """The broker as a Redis client, one a process."""
    return _client(settings.REDIS_URL, os.getpid())


def note_sweep() -> None:
    """Write down that the sweeper ran, best effort."""
    with suppress(redis.RedisError):
        client().set(SWEPT_KEY, int(time.time()))


def swept_at() -> int:
    """When the sweeper ran last, Unix time; 0 = never. Raises `redis.RedisError`."""
    return int(client().get(SWEPT_KEY) or 0)


def announce(
    kind: str,
    row_id: int | str,
    *,
    deployment: str = "",
    of_job: Mapping[str, int] | None = None,
) -> None:
    """Tell open pages that something changed: of which deployment, in which job's log.

    Best effort: pages also refresh on a timer.
    """
    event = {"kind": kind, "id": row_id, "deployment": deployment, **(of_job or {})}
    with suppress(redis.RedisError):
        client().publish(EVENTS_CHANNEL, json.dumps(event))


def announce_job(job: Job) -> None:
    """Tell open pages, once it is committed, that a job changed."""
    deployment, noun, pk = job.deployment_name, job.noun, job.pk
    transaction.on_commit(lambda: announce(noun, pk, deployment=deployment, of_job={noun: pk}))


def announce_revoked(key_id: str) -> None:
    """Tell every gate that a key is dead, ahead of the snapshot; call it once that is committed.

    Best effort: the snapshot that follows says the same.
    """
    with suppress(redis.RedisError):
        client().publish(REVOKE_CHANNEL, key_id)


def current_snapshot() -> Snapshot:
    """The records as the gate must see them now; its version is 0."""
    now = timezone.now()
    replicas: dict[int, list[ReplicaRoute]] = {}
    contexts: dict[int, int] = {}
    known: dict[int, EngineFacts] = {}
    for replica in Replica.objects.filter(state=ReplicaState.READY, trial=None):
        replicas.setdefault(replica.generation_id, []).append(_replica_route(replica))
        contexts[replica.generation_id] = replica.context_per_slot
        known[replica.generation_id] = _engine_facts(replica)
    routes: dict[str, Route] = {}
    deployments = Deployment.objects.filter(archived_at=None).select_related("live")
    # of two with the same model name at most one is live, and comes last
    for deployment in deployments.order_by(F("live").asc(nulls_first=True), "name"):
        live = deployment.live
        serving = replicas.get(live.pk, []) if live else []
        routes[deployment.public_name] = Route(
            deployment=deployment.name,
            public_name=deployment.public_name,
            mode=_mode(deployment, now, serving=bool(serving)),
            generation=live.number if live else None,
            generation_uid=f"{deployment.name}/{live.number}" if live else None,
            replicas=serving,
            hold_until=_unix(deployment.hold_until),
            created=_unix(deployment.created_at),
            context_per_slot=contexts.get(live.pk, 0) if live else 0,
            **known.get(live.pk, NO_FACTS) if live else NO_FACTS,
        )
    keys = {
        row["key_id"]: KeyRecord(
            key_id=row["key_id"],
            digest=row["digest"],
            state=(
                "revoked" if row["revoked_at"] else "suspended" if row["suspended_at"] else "active"
            ),
            expires_at=_unix(row["expires_at"]),
            deployments=row["deployments"],
            endpoints=row["endpoints"],
            trials=row["playground"],
            **{limit: row[limit] for limit in KEY_LIMITS},
        )
        for row in ClientKey.objects.values(*KEY_FIELDS, *KEY_LIMITS)
    }
    return Snapshot(version=0, routes=routes, keys=keys, trials=_trials())


def _trials() -> dict[str, Route]:
    """The generations that run beside a live one now, by their uids."""
    ready = Replica.objects.filter(
        state=ReplicaState.READY,
        trial__phase=Phase.OPEN,
        trial__state__in=ACTIVE_JOB,
    )
    found: dict[str, Route] = {}
    for replica in ready.select_related("generation__deployment", "trial").order_by("uid"):
        generation, trial = replica.generation, replica.trial
        found[generation.uid] = Route(
            deployment=generation.deployment.name,
            public_name=generation.uid,
            mode="open",
            generation=generation.number,
            generation_uid=generation.uid,
            replicas=[_replica_route(replica)],
            created=_unix(trial.opened_at if trial else None),
            context_per_slot=replica.context_per_slot,
            trial=True,
            **_engine_facts(replica),
        )
    return found


def _replica_route(replica: Replica) -> ReplicaRoute:
    return ReplicaRoute(
        uid=replica.uid,
        socket=str(settings.HOME.engine_socket(replica.uid)),
        slots=replica.slots,
    )


class EngineFacts(TypedDict, total=False):
    """What a route says about its engine's ways."""

    errors: ErrorPatterns
    answers: AnswerFields


NO_FACTS = EngineFacts()


def _engine_facts(replica: Replica) -> EngineFacts:
    """What the gate must know of its engine; nothing where the kind of engine is not known here."""
    from mmadmin.core import catalog

    engine = catalog.engines().get(replica.launch.get("engine_kind", ""))
    if engine is None:
        return NO_FACTS
    questions = engine.questions
    return EngineFacts(errors=questions.error_patterns, answers=questions.answer_fields)


def _unix(moment: datetime | None) -> int:
    return int(moment.timestamp()) if moment else 0


def _mode(deployment: Deployment, now: datetime, *, serving: bool) -> RouteMode:
    if deployment.hold_until is not None and deployment.hold_until > now:
        return "hold"
    return "open" if serving else "closed"


def publish_snapshot(*, force: bool = True) -> int:
    """Tell the gate what it must know; returns the snapshot's version.

    With `force` off, nothing is written when the gate was told the same already and Redis and the
    file still have it. Safe to call twice, from any process; a broker that is down is logged, the
    file is written all the same, and the timer repeats it.
    """
    with transaction.atomic():
        row, _ = Publication.objects.get_or_create(pk=1)
        row = Publication.objects.select_for_update().get(pk=1)
        text = snapshot_to_json(current_snapshot())
        digest = hashlib.sha256(text.encode()).hexdigest()
        same = digest == row.digest
        if not same or force:
            row.version = max(row.version + 1, time.time_ns() // 1_000_000)
            row.digest = digest
            row.save()
    text = text.replace('"version":0', f'"version":{row.version}', 1)
    _to_file(settings.HOME, text, row.version)
    if not same or force or _redis_version() != row.version:
        _to_redis(text, row.version)
    return row.version


def _redis_version() -> int | None:
    try:
        found = client().get(f"{SNAPSHOT_KEY}:version")
    except redis.RedisError:
        return None
    return int(found) if isinstance(found, bytes) else None


def _to_redis(text: str, version: int) -> None:
    try:
        client().eval(
            SET_IF_NEWER, 2, SNAPSHOT_KEY, f"{SNAPSHOT_KEY}:version", text, version, NUDGE_CHANNEL
        )
    except redis.RedisError as error:
        log.warning("the gate's snapshot %s did not reach the broker: %s", version, error)


def _to_file(home: Home, text: str, version: int) -> None:
    """Write `gate/snapshot.json` (0600) by rename, unless the file is as new."""
    folder = home.gate
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / "snapshot.json"
    with (folder / "snapshot.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _file_version(target) >= version:
            return
        handle, name = tempfile.mkstemp(dir=folder, prefix=".snapshot-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)


def _file_version(path: Path) -> int:
    """The version stands at the head, so that a large file need not be read."""
    try:
        with path.open("rb") as file:
            found = re.match(rb'\{"version":(\d+)', file.read(64))
    except OSError:
        return -1
    return int(found[1]) if found else -1
