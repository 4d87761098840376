"""What an engine's error means to a client.

Engines answer errors in shapes of their own, some with the wrong status. The client gets the shape
of its dialect, the engine's own message where it concerns the request, and never the engine's 401,
which is about the gate's credential and not about the client's. The route carries the patterns by
which an engine's errors are recognised.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from mmadmin.core.snapshot import ErrorPatterns
from mmadmin.gate.refusal import Refusal

_SHOWN = 2000
"""Longest engine message that is passed on, in characters."""


def refusal_of_response(  # noqa: C901, PLR0911 (a table of cases)
    status: int, headers: list[tuple[bytes, bytes]], body: bytes, patterns: ErrorPatterns
) -> Refusal:
    """The client's error for an engine's response that is not a success."""
    error = _error_of(body)
    message = _message_of(error, body)[:_SHOWN]
    if patterns.advice:
        message = re.sub(patterns.advice, "", message)
    if status in (401, 403):
        return Refusal(
            502,
            "The engine refused the gateway's credential. Report this to the operator.",
            reason="upstream_error",
        )
    mark = patterns.template
    if mark and (at := message.find(mark)) >= 0:
        reason = message[at + len(mark) :].strip() or "The chat template rejected the request."
        return Refusal(400, reason, reason="template_refused", param="messages")
    if patterns.no_input and (without := re.search(patterns.no_input, message)) is not None:
        return Refusal(
            400,
            f"This model does not accept {without[1]} input.",
            reason="input_not_supported",
            param="messages",
        )
    if status == 500 and patterns.request and re.match(patterns.request, message):  # noqa: PLR2004
        return Refusal(400, message)
    kind = error.get("type") if isinstance(error.get("type"), str) else None
    if _is_context_error(kind, message, patterns):
        return Refusal(400, message, reason="context_length_exceeded", param="messages")
    if status == 503:  # noqa: PLR2004 (loading, or out of slots)
        return Refusal(
            503,
            message or "The engine is not ready. Retry later.",
            reason="model_unavailable",
            retry_after_s=_retry_after(headers) or 5,
        )
    if status in (404, 501):  # the engine lacks the endpoint, or it is off, or the model cannot
        return Refusal(
            400,
            "This model does not offer this endpoint. Use another one.",
            reason="not_supported",
        )
    if status == 429:  # noqa: PLR2004
        return Refusal(429, message, reason="overloaded", retry_after_s=_retry_after(headers) or 1)
    if 400 <= status < 500:  # noqa: PLR2004
        param = error.get("param")
        code = error.get("code")
        return Refusal(
            status,
            message or "The engine rejected the request.",
            reason=code if isinstance(code, str) else None,
            param=param if isinstance(param, str) else None,
        )
    return Refusal(
        500 if status == 500 else 502,  # noqa: PLR2004
        message or "The engine failed. Retry the request.",
        reason="upstream_error",
    )


def _is_context_error(kind: str | None, message: str, patterns: ErrorPatterns) -> bool:
    if patterns.context_type and kind == patterns.context_type:
        return True
    return "context length" in message.lower()


def _error_of(body: bytes) -> dict[str, Any]:
    """The error object, in any of the usual shapes; empty when there is none."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(data, dict):
        return {}
    error = data.get("error", data)
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}


def _message_of(error: dict[str, Any], body: bytes) -> str:
    for name in ("message", "detail"):
        value = error.get(name)
        if isinstance(value, str):
            return value
        if value is not None:
            return orjson.dumps(value).decode()
    text = body.decode(errors="replace").strip()
    return "" if text.startswith(("{", "<")) else text


def _retry_after(headers: list[tuple[bytes, bytes]]) -> int | None:
    for name, value in headers:
        if name == b"retry-after" and value.isdigit():
            return min(int(value), 3600)
    return None
