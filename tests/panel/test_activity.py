"""What the gates say of themselves, added up for a page."""

from __future__ import annotations

import json

from deployments.broker import activity


def said(running: int, waiting: int, speed: float) -> str:
    """One gate worker's word."""
    rate = {"deployment": "smol", "key": "k", "completion_tokens_per_s": speed}
    line = {"running": running, "waiting": waiting, "slots": 4}
    return json.dumps({"rates": [rate, rate], "queues": {"smol": line}, "requests": []})


def test_gates_are_added_up() -> None:
    """Requests and speed add up; slots are the engine's and do not."""
    found = activity.added_up([said(1, 2, 10.0), said(2, 0, 1.5).encode()])
    assert found == {"smol": activity.Line(running=3, waiting=2, slots=4, tokens_per_s=23.0)}


def test_without_a_broker_there_is_no_news(settings) -> None:
    """And no error, and no long wait."""
    settings.REDIS_URL = "unix:///nowhere/broker.sock"
    assert activity.lines() == {}
