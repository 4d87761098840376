"""What the gates report: which snapshot they serve from, and which requests are under way.

Every gate worker writes its presence to the broker about once a second, with an expiry. Absence
proves nothing while the broker is down or just restarted, so "no gate" counts only after the
broker has been up long enough for every running gate to have reported.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import redis

from deployments.broker import feed
from mmadmin.core.snapshot import GATE_PRESENCE_PREFIX

log = logging.getLogger(__name__)

QUIET_S = 6
"""A broker that has been up for this long has a report from every running gate."""
POLL_S = 0.004
"""Between the first two looks: a gate takes up a route within milliseconds, and clients wait."""
LONGEST_POLL_S = 0.05
"""Between two looks once it takes longer."""

Sleep = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class GateView:
    """What the gates said last."""

    versions: Mapping[str, int]
    inflight: Mapping[str, int]
    """Requests by generation uid, over all gates."""
    held: Mapping[str, int]
    """Requests that wait, by deployment."""


def look() -> GateView | None:
    """What the gates said last; None when that cannot be known now."""
    try:
        client = feed.client()
        names = list(client.scan_iter(match=f"{GATE_PRESENCE_PREFIX}*", count=500))
        values = client.mget(names) if names else []
        up_s = int(client.info("server")["uptime_in_seconds"])
    except redis.RedisError as error:
        log.warning("the gates' reports cannot be read: %s", error)
        return None
    versions: dict[str, int] = {}
    inflight: dict[str, int] = {}
    held: dict[str, int] = {}
    for name, value in zip(names, values, strict=True):
        if value is None:
            continue
        said = json.loads(value)
        versions[name.decode()] = int(said["version"])
        for uid, count in said.get("inflight", {}).items():
            inflight[uid] = inflight.get(uid, 0) + int(count)
        for deployment, count in said.get("held", {}).items():
            held[deployment] = held.get(deployment, 0) + int(count)
    if up_s < QUIET_S:
        return None
    return GateView(versions, inflight, held)


def wait_seen(version: int, *, timeout_s: float, sleep: Sleep) -> bool:
    """Wait until every gate serves from `version` or later; False when the time is over."""
    return _until(
        lambda view: all(seen >= version for seen in view.versions.values()), timeout_s, sleep
    )


def wait_idle(uid: str, version: int, *, timeout_s: float, sleep: Sleep) -> bool:
    """Wait until no gate sends or has anything for the generation; False when time is over."""
    return _until(
        lambda view: (
            all(seen >= version for seen in view.versions.values())
            and not view.inflight.get(uid, 0)
        ),
        timeout_s,
        sleep,
    )


def _until(holds: Callable[[GateView], bool], timeout_s: float, sleep: Sleep) -> bool:
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S
    while True:
        view = look()
        if view is not None and holds(view):
            return True
        if time.monotonic() >= deadline:
            return False
        sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_POLL_S)
