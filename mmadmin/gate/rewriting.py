"""What the gate changes in a request, and which headers of a response it passes on."""

from __future__ import annotations

from typing import Any

import orjson

from mmadmin.core.snapshot import Route
from mmadmin.gate.endpoints import Endpoint
from mmadmin.gate.limits import DEFAULT_ANSWER_TOKENS
from mmadmin.gate.request import Request
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


def with_usage(body: bytes, payload: dict[str, Any]) -> tuple[bytes, bool]:
    """The body that asks for usage, and whether the usage event must be hidden from the client.

    The client's bytes stay as they are; the option is put in front of them. Only a client that
    sent its own `stream_options` without asking for usage gets a rewritten body.
    """
    options = payload.get("stream_options")
    if options is None and "stream_options" not in payload:
        at = body.index(b"{") + 1
        return body[:at] + b'"stream_options":{"include_usage":true},' + body[at:], True
    if isinstance(options, dict) and options.get("include_usage") is True:
        return body, False
    if options is None or isinstance(options, dict):
        asked = {**(options or {}), "include_usage": True}
        return orjson.dumps({**payload, "stream_options": asked}), True
    return body, False  # invalid: the engine refuses it


def asked_tokens(payload: dict[str, Any]) -> int:
    """The most that the client allows the engine to write; 0 = not set."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = payload.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def worst_case(endpoint: Endpoint, route: Route, body_bytes: int, payload: dict[str, Any]) -> int:
    """Tokens to reserve: the prompt by its size, the response by what the client allows."""
    tokens = max(body_bytes // BYTES_A_TOKEN, 1)
    if endpoint.streams:
        tokens += asked_tokens(payload) or DEFAULT_ANSWER_TOKENS
    limit = route.context_per_slot
    return min(tokens, limit) if limit else tokens


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


def queue_headers(request: Request) -> list[tuple[bytes, bytes]]:
    """Its position in the queue on arrival, and how long it waited; none when it did not wait."""
    if request.place is None:
        return []
    return [
        (b"x-mm-queue-position", str(request.place.position).encode()),
        (b"x-mm-queue-ms", str(int(request.queued_s * 1000)).encode()),
    ]
