"""What the gate changes in a request, and which headers of a response it passes on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import orjson

from mmadmin.core.snapshot import Route
from mmadmin.gate.endpoints import Endpoint
from mmadmin.gate.limits import DEFAULT_ANSWER_TOKENS
from mmadmin.gate.refusal import Refusal
from mmadmin.gate.request import BodyParts, QueueEntry
from mmadmin.gate.tokens import BYTES_A_TOKEN
from mmadmin.gate.upstream import Connection

_OURS = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"date",
        b"server",
        b"set-cookie",
        b"www-authenticate",
        b"x-request-id",
        b"x-mm-generation",
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
    }
)
"""Headers of an engine's answer that do not pass: of this connection only, or the gate's own."""


def with_usage(body: bytes | bytearray, payload: dict[str, Any]) -> tuple[BodyParts, bool]:
    """The body that asks for usage, and whether the usage event must be hidden from the client.

    The client's bytes stay as they are; the option is put in front of them. Only a client that
    sent its own `stream_options` without asking for usage gets a rewritten body.
    """
    options = payload.get("stream_options")
    if options is None and "stream_options" not in payload:
        at = body.index(b"{") + 1
        first = bytes(body[:at]) + b'"stream_options":{"include_usage":true},'
        return (first, memoryview(body)[at:]), True
    if isinstance(options, dict) and options.get("include_usage") is True:
        return (b"", body), False
    if options is None or isinstance(options, dict):
        asked = {**(options or {}), "include_usage": True}
        return (b"", orjson.dumps({**payload, "stream_options": asked})), True
    return (b"", body), False  # invalid: the engine refuses it


def answers_asked(endpoint: Endpoint, route: Route, payload: dict[str, Any]) -> int:
    """Prompts times answers to each; `Refusal` (400) above what a replica runs at once."""
    prompts = payload.get(endpoint.prompts) if endpoint.prompts else None
    count = 1
    if isinstance(prompts, list) and not any(isinstance(item, (int, float)) for item in prompts):
        count = max(len(prompts), 1)
    if not endpoint.streams:
        return count
    each = _largest(payload, route.answers.choices) or 1
    slots = max((replica.slots for replica in route.replicas), default=0)
    if count * each > max(slots, 1) and route.replicas:
        raise Refusal(
            400,
            f"This request asks for {count * each} completions at once; this model runs {slots} "
            "at a time. Send fewer prompts, or a smaller `n`, in one request.",
            reason="too_many_completions",
            param="n" if each > 1 else endpoint.prompts,
        )
    return int(count * each)


def worst_case(
    endpoint: Endpoint, route: Route, body_bytes: int, payload: dict[str, Any], answers: int
) -> int:
    """Tokens to reserve: the prompt by its size, the response by what bounds it at the engine."""
    tokens = max(body_bytes // BYTES_A_TOKEN, _token_ids(payload.get(endpoint.prompts)), 1)
    limit = route.context_per_slot * answers
    if not endpoint.streams:
        return min(tokens, limit) if limit else tokens
    caps = route.answers.caps.get(endpoint.upstream, endpoint.caps)
    cap = _largest(payload, caps)
    if cap is None:  # to the end of the context
        return limit or tokens + DEFAULT_ANSWER_TOKENS * answers
    return int(min(tokens + cap * answers, limit or math.inf))


def _largest(payload: dict[str, Any], names: Iterable[str]) -> int | None:
    """The largest of these numbers; None where none is given, or one that bounds nothing.

    Which of several an engine obeys differs, so that only the largest is a bound. Engines take the
    whole part of a fraction.
    """
    largest: int | None = None
    for name in names:
        value = payload.get(name)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or value <= 0:
            return None
        largest = max(largest or 0, math.ceil(min(value, 2**31)))
    return largest


def _token_ids(prompts: object) -> int:
    """The tokens of prompts that are sent as token ids."""
    if not isinstance(prompts, list):
        return 0
    return sum(len(item) if isinstance(item, list) else 1 for item in prompts)


def passed_headers(connection: Connection) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The content type, and the headers that pass."""
    kind = b""
    passed: list[tuple[bytes, bytes]] = []
    listed: set[bytes] = set()
    for pair in connection.headers:
        name, value = pair
        if name == b"content-type":
            kind = value.lower()
        elif name == b"connection":
            listed.update(part.strip().lower() for part in value.split(b","))
        if name not in _OURS:
            passed.append(pair)
    if listed:
        passed = [pair for pair in passed if pair[0] not in listed]
    return kind, passed


def queue_headers(entry: QueueEntry) -> list[tuple[bytes, bytes]]:
    """A request's position in the queue on arrival, and its wait; none when it did not wait."""
    if entry.place is None:
        return []
    return [
        (b"x-mm-queue-position", str(entry.place.position).encode()),
        (b"x-mm-queue-ms", str(int(entry.waited_s * 1000)).encode()),
    ]
