"""How a request ends: its line in the books, its figures, its line in the access log.

A flight is settled exactly once, before the last byte of its answer leaves the gate. Token counts
are the engine's own; where a stream was cut before the engine said them, they are an estimate and
marked as one. Requests without a proven key are counted in the figures and logged, not booked.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Literal

import orjson

from mmadmin.core.access import redact
from mmadmin.core.snapshot import Usage
from mmadmin.gate.flight import Flight
from mmadmin.gate.meter import BYTES_A_TOKEN, Tokens, tokens_of_events
from mmadmin.gate.metrics import Metrics

if TYPE_CHECKING:
    from mmadmin.gate.rates import Rates

Outcome = Literal["ok", "refused", "failed", "cancelled"]


class AccessLog:
    """Structured lines, written in blocks, off the hot path."""

    __slots__ = ("_lines", "enabled")

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._lines: list[bytes] = []

    def add(self, flight: Flight, usage: Usage, now: float) -> None:
        """Take note of one request. No key text, no prompt, no answer."""
        self._lines.append(
            orjson.dumps(
                {
                    "at": round(time.time(), 3),
                    "request": flight.request_id,
                    "client_request": redact(flight.client_request_id) or None,
                    "key": flight.key.key_id if flight.key else None,
                    "from": flight.client[0] if flight.client else None,
                    "path": redact(flight.path[:200]) if flight.endpoint is None else flight.path,
                    "model": (
                        flight.route.public_name if flight.route else redact(flight.model[:128])
                    )
                    or None,
                    "generation": flight.generation_uid or None,
                    "status": usage.status,
                    "outcome": usage.outcome,
                    "why": flight.stopped.value if flight.stopped else None,
                    "stream": flight.streamed,
                    "ms": round((now - flight.started) * 1000, 1),
                    "queue_ms": round(flight.queued_s * 1000, 1),
                    "ttft_ms": round((flight.first_at - flight.started) * 1000, 1)
                    if flight.first_at
                    else None,
                    "prompt": usage.prompt_tokens,
                    "completion": usage.completion_tokens,
                }
            )
        )

    def flush(self) -> None:
        """Write what has gathered (blocks for the pipe)."""
        if self._lines:
            lines, self._lines = self._lines, []
            sys.stdout.buffer.write(b"\n".join(lines) + b"\n")
            sys.stdout.buffer.flush()


def tokens_of(flight: Flight) -> tuple[Tokens, bool]:
    """What the flight cost, and whether the engine said so."""
    if flight.tokens is not None:
        return flight.tokens, True
    tap = flight.tap
    if tap is not None:
        said = tokens_of_events(tap.notes)
        if said is not None and (tap.ended or said.completion):
            return said, True
    if flight.upstream is None:
        return Tokens(), True
    limit = flight.route.context_per_slot if flight.route else 0
    prompt = max(flight.body_bytes // BYTES_A_TOKEN, 1)
    return (
        Tokens(
            prompt=min(prompt, limit) if limit else prompt,
            completion=tap.events if tap is not None else 0,
        ),
        False,
    )


def usage_of(
    flight: Flight, status: int, outcome: Outcome, tokens: Tokens, *, exact: bool, now: float
) -> Usage:
    """The line for the books."""
    duration = now - flight.started
    generating = now - flight.first_at if flight.first_at else 0.0
    speed = tokens.per_s_milli
    if not speed and tokens.completion > 1 and generating > 0:
        speed = min(int((tokens.completion - 1) / generating * 1000), 2**31 - 1)
    return Usage(
        id=flight.request_id,
        at=time.time(),
        key_id=flight.key.key_id if flight.key else "",
        deployment=flight.route.deployment if flight.route else "",
        generation=flight.generation,
        endpoint=flight.endpoint.name if flight.endpoint else "",
        status=status,
        outcome=outcome,
        streamed=flight.streamed,
        prompt_tokens=tokens.prompt,
        completion_tokens=tokens.completion,
        cached_tokens=tokens.cached,
        reasoning_tokens=tokens.reasoning,
        exact=exact,
        queue_ms=int(flight.queued_s * 1000),
        ttft_ms=int((flight.first_at - flight.started) * 1000) if flight.first_at else 0,
        duration_ms=int(duration * 1000),
        tokens_per_s_milli=speed,
    )


def count(metrics: Metrics, usage: Usage, flight: Flight, now: float) -> None:
    """Put one request into the figures."""
    series = metrics.of((usage.deployment, str(usage.generation), usage.endpoint))
    ending = (usage.status, usage.outcome)
    series.requests[ending] = series.requests.get(ending, 0) + 1
    series.duration.observe(now - flight.started)
    if flight.upstream is None:
        return
    series.prompt += usage.prompt_tokens
    series.completion += usage.completion_tokens
    series.cached += usage.cached_tokens
    series.reasoning += usage.reasoning_tokens
    series.queued.observe(flight.queued_s)
    if flight.first_at:
        series.ttft.observe(flight.first_at - flight.started)
    if usage.tokens_per_s_milli:
        series.speed.observe(usage.tokens_per_s_milli / 1000)


def note_rate(rates: Rates, usage: Usage) -> None:
    """For people who watch: who uses what, now."""
    rates.add(usage.deployment, usage.key_id, usage.prompt_tokens, usage.completion_tokens)
