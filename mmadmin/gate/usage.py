"""What a finished request leaves: its usage record, its metrics, its line in the access log.

A request is settled exactly once, before the last byte of its response leaves the gate. Token
counts are the engine's own; where a stream was cut before the engine reported them, they are an
estimate and marked as one. Requests without a proven key appear in metrics and log but have no
usage record.
"""

from __future__ import annotations

import sys
import time
from typing import Literal

import orjson

from mmadmin.core.access import redact
from mmadmin.core.snapshot import Usage
from mmadmin.gate.metrics import Metrics
from mmadmin.gate.request import Request
from mmadmin.gate.tokens import BYTES_A_TOKEN, Tokens, sum_of_events, tokens_of_events

Outcome = Literal["ok", "refused", "failed", "cancelled"]


class AccessLog:
    """Structured lines, written in blocks, off the hot path."""

    __slots__ = ("_lines", "enabled")

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._lines: list[bytes] = []

    def add(self, request: Request, usage: Usage, now: float) -> None:
        """Note one request: no key text, no prompt, no response."""
        self._lines.append(
            orjson.dumps(
                {
                    "at": round(time.time(), 3),
                    "request": request.request_id,
                    "client_request": redact(request.client_request_id) or None,
                    "key": request.key.key_id if request.key else None,
                    "from": request.client[0] if request.client else None,
                    "path": redact(request.path[:200])
                    if request.endpoint is None
                    else request.path,
                    "model": (
                        request.route.public_name if request.route else redact(request.model[:128])
                    )
                    or None,
                    "generation": request.generation_uid or None,
                    "status": usage.status,
                    "outcome": usage.outcome,
                    "why": request.stopped.value if request.stopped else None,
                    "stream": request.response.streamed,
                    "ms": round((now - request.started) * 1000, 1),
                    "queue_ms": round(request.entry.waited_s * 1000, 1),
                    "ttft_ms": None if request.ttft_s is None else round(request.ttft_s * 1000, 1),
                    "prompt": usage.prompt_tokens,
                    "completion": usage.completion_tokens,
                }
            )
        )

    def flush(self) -> None:
        """Write the collected lines (blocks on the pipe)."""
        if self._lines:
            lines, self._lines = self._lines, []
            sys.stdout.buffer.write(b"\n".join(lines) + b"\n")
            sys.stdout.buffer.flush()


def tokens_of(request: Request) -> tuple[Tokens, bool]:
    """Tokens that the request used, and whether the engine reported them."""
    if request.response.tokens is not None:
        return request.response.tokens, request.response.tokens.exact
    tap = request.response.tap
    if tap is not None and tap.reports > 1:
        one_prompt = request.endpoint is None or not request.endpoint.prompts
        reported = sum_of_events(tap.notes, one_prompt=one_prompt)
        if reported is not None and tap.ended:
            return reported, True
    elif tap is not None:
        reported = tokens_of_events(tap.notes)
        if reported is not None and (tap.ended or reported.completion):
            return reported, True
    if request.engine.upstream is None:
        return Tokens(), True
    limit = request.route.context_per_slot if request.route else 0
    prompt = max(request.body.size_bytes // BYTES_A_TOKEN, 1)
    return (
        Tokens(
            prompt=min(prompt, limit) if limit else prompt,
            completion=tap.events if tap is not None else 0,
        ),
        False,
    )


def usage_of(
    request: Request, status: int, outcome: Outcome, tokens: Tokens, *, exact: bool, now: float
) -> Usage:
    """The usage record."""
    duration = now - request.started
    generating = now - request.response.first_at if request.response.first_at else 0.0
    speed = tokens.per_s_milli
    if not speed and tokens.completion > 1 and generating > 0:
        speed = min(int((tokens.completion - 1) / generating * 1000), 2**31 - 1)
    return Usage(
        id=request.request_id,
        at=time.time(),
        key_id=request.key.key_id if request.key else "",
        deployment=request.route.deployment if request.route else "",
        generation=request.generation,
        endpoint=request.endpoint.name if request.endpoint else "",
        status=status,
        outcome=outcome,
        streamed=request.response.streamed,
        prompt_tokens=tokens.prompt,
        completion_tokens=tokens.completion,
        cached_tokens=tokens.cached,
        reasoning_tokens=tokens.reasoning,
        exact=exact,
        queue_ms=int(request.entry.waited_s * 1000),
        ttft_ms=int((request.ttft_s or 0) * 1000),
        duration_ms=int(duration * 1000),
        tokens_per_s_milli=speed,
    )


def count(metrics: Metrics, usage: Usage, request: Request, now: float, *, at_engine: bool) -> None:
    """Add one request to the metrics; `at_engine` = it reached one."""
    if not usage.deployment:
        end = (usage.status, usage.outcome)
        metrics.unrouted[end] = metrics.unrouted.get(end, 0) + 1
        return
    series = metrics.of((usage.deployment, str(usage.generation), usage.endpoint))
    ending = (usage.status, usage.outcome)
    series.requests[ending] = series.requests.get(ending, 0) + 1
    series.duration.observe(now - request.started)
    if not at_engine:
        return
    series.prompt += usage.prompt_tokens
    series.completion += usage.completion_tokens
    series.cached += usage.cached_tokens
    series.reasoning += usage.reasoning_tokens
    series.queued.observe(request.entry.waited_s)
    if request.ttft_s is not None:
        series.ttft.observe(request.ttft_s)
    if usage.tokens_per_s_milli:
        series.speed.observe(usage.tokens_per_s_milli / 1000)
