"""What the gate adds to a request and takes from an answer, besides the bytes that pass."""

from __future__ import annotations

from typing import Any

import orjson

from mmadmin.gate.flight import Flight
from mmadmin.gate.limits import DEFAULT_ANSWER_TOKENS
from mmadmin.gate.meter import BYTES_A_TOKEN
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
    sent `stream_options` of its own without asking for usage gets its body written anew.
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
    return body, False  # nonsense: the engine says so in its own words


def asked_tokens(payload: dict[str, Any]) -> int:
    """The most that the client allows the engine to write; 0 = not said."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = payload.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def worst_case(flight: Flight, payload: dict[str, Any]) -> int:
    """Tokens to reserve: the prompt by its size, the answer by what the client allows."""
    tokens = max(flight.body_bytes // BYTES_A_TOKEN, 1)
    if flight.endpoint is not None and flight.endpoint.streams:
        tokens += asked_tokens(payload) or DEFAULT_ANSWER_TOKENS
    limit = flight.route.context_per_slot if flight.route else 0
    return min(tokens, limit) if limit else tokens


def headers_of(connection: Connection) -> tuple[bytes, list[tuple[bytes, bytes]]]:
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


def queue_marks(flight: Flight) -> list[tuple[bytes, bytes]]:
    """Where it stood in the line, and for how long."""
    if flight.ticket is None:
        return []
    return [
        (b"x-mm-queue-position", str(flight.ticket.position).encode()),
        (b"x-mm-queue-ms", str(int(flight.queued_s * 1000)).encode()),
    ]
