"""What goes on at the gates right now, for pages: requests running and waiting, by deployment.

The gates say it in the broker, a few times a second. It is news, not a record: where the broker is
away, pages are shown without it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import redis
from django.conf import settings

from mmadmin.core.snapshot import GATE_WATCH_PREFIX

log = logging.getLogger(__name__)

PATIENCE_S = 0.3
"""A page does not wait longer than this for news."""


@dataclass(frozen=True, slots=True)
class Line:
    """One deployment's queue, over all gates."""

    running: int
    waiting: int
    slots: int
    tokens_per_s: float
    """Answer tokens, all requests together."""


@cache
def _broker(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S)


def lines() -> dict[str, Line]:
    """By deployment; empty when the broker does not answer or no gate is up."""
    broker = _broker(settings.REDIS_URL)
    try:
        names = list(broker.scan_iter(match=f"{GATE_WATCH_PREFIX}*", count=1000))
        texts = broker.mget(names) if names else []
    except redis.RedisError as error:
        log.info("no news of the gates: %s", error)
        return {}
    assert isinstance(texts, list)  # noqa: S101 (the client's types cover its asynchronous form)
    return added_up(text for text in texts if text)


def added_up(texts: Iterable[bytes | str]) -> dict[str, Line]:
    """The gates' figures as one; slots are the engine's, so each gate says the same of them."""
    found: dict[str, Line] = {}
    for text in texts:
        said = json.loads(text)
        speed: dict[str, float] = {}
        for rate in said.get("rates", []):
            name = rate["deployment"]
            speed[name] = speed.get(name, 0.0) + rate["completion_tokens_per_s"]
        for name, line in said.get("queues", {}).items():
            known = found.get(name, Line(0, 0, 0, 0.0))
            found[name] = Line(
                running=known.running + line["running"],
                waiting=known.waiting + line["waiting"],
                slots=max(known.slots, line["slots"]),
                tokens_per_s=known.tokens_per_s + speed.get(name, 0.0),
            )
    return found
