"""Refusals: how the gate says no, in the shape that the client's own library understands.

One error value, two dialects (OpenAI's and Anthropic's), three places: a whole response, an
event inside a stream whose head has been sent, and the usage record.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import orjson

from mmadmin.core.errors import MmError

Dialect = Literal["openai", "responses", "anthropic"]

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    426: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
"""OpenAI's `type` by status; a status that is not listed is a `server_error`."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
"""Anthropic's `type` by status; a status that is not listed is an `api_error`."""


class Refusal(MmError):
    """A request that gets an error instead of an answer."""

    code: ClassVar[str] = "request_refused"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str | None = None,
        param: str | None = None,
        kind: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        """OpenAI's `code`, stable."""
        self.param = param
        self.kind = kind or _TYPES.get(status, "server_error")
        """OpenAI's `type`."""
        self.retry_after_s = retry_after_s
        self.headers: list[tuple[bytes, bytes]] = []

    def body(self, dialect: Dialect, request_id: str) -> bytes:
        """The whole response's body."""
        if dialect == "anthropic":
            return orjson.dumps(self._anthropic(request_id))
        return orjson.dumps({"error": self._openai()})

    def event(self, dialect: Dialect, request_id: str) -> bytes:
        """The event that ends a stream. No `[DONE]` follows: the answer is not whole."""
        if dialect == "anthropic":
            return b"event: error\ndata: " + orjson.dumps(self._anthropic(request_id)) + b"\n\n"
        if dialect == "responses":
            data = {"type": "error", **self._openai(), "sequence_number": 0}
            data["type"] = "error"
            return b"event: error\ndata: " + orjson.dumps(data) + b"\n\n"
        return b"data: " + orjson.dumps({"error": self._openai()}) + b"\n\n"

    def _openai(self) -> dict[str, str | None]:
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.reason,
        }

    def _anthropic(self, request_id: str) -> dict[str, object]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {
            "type": "error",
            "error": {"type": kind, "message": self.message},
            "request_id": request_id,
        }


def wrong_key() -> Refusal:
    """The one answer for a key that is missing from the snapshot, wrong, or revoked."""
    return Refusal(
        401,
        "Incorrect API key provided. Check that the whole key was sent and that it is still valid.",
        reason="invalid_api_key",
    )


def ended_key(state: str) -> Refusal:
    """A key that was valid when its request began was revoked, or is suspended."""
    if state == "suspended":
        return Refusal(
            401,
            "This API key is suspended. Ask its owner to resume it.",
            reason="api_key_suspended",
        )
    return Refusal(401, "This API key was revoked. Use a new one.", reason="invalid_api_key")


def no_key() -> Refusal:
    """The request has no credential."""
    return Refusal(
        401,
        "You did not provide an API key. Send it as `Authorization: Bearer sk-mm-...`.",
        reason="invalid_api_key",
    )


def no_model(name: str) -> Refusal:
    """The model is unknown, or the key may not use it: the same message for both."""
    return Refusal(
        404,
        f"The model `{name[:128]}` does not exist or you do not have access to it. "
        "`GET /v1/models` lists the models that you can use.",
        reason="model_not_found",
        param="model",
    )


def not_served(name: str, retry_after_s: int = 30) -> Refusal:
    """The model is known, but no engine answers for it now."""
    return Refusal(
        503,
        f"The model `{name[:128]}` is not being served at the moment. "
        f"Retry in {retry_after_s} seconds.",
        reason="model_unavailable",
        retry_after_s=retry_after_s,
    )


def upstream_lost() -> Refusal:
    """The engine closed the connection before its answer was whole."""
    return Refusal(
        502,
        "The engine stopped before the answer was complete. Retry the request.",
        reason="upstream_error",
    )
