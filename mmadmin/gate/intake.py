"""Reading requests: headers, bodies, the model that they name; and how `/v1/models` shows one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import orjson

from mmadmin.core.snapshot import Route
from mmadmin.gate.endpoints import HEALTH, POSTS, meant_by
from mmadmin.gate.refusal import Refusal

_FORM_MODEL = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n--')

_CLIENT_ID = re.compile(rb"[!-~]{1,128}")
_PASSED_ON = (b"content-type", b"accept", b"anthropic-version", b"anthropic-beta", b"traceparent")
"""What of a request's headers reaches the engine; never a credential."""


class Head:
    """What the gate reads out of a request's headers, in one pass."""

    __slots__ = (
        "body_bytes",
        "client_id",
        "key_text",
        "packed",
        "passed_on",
        "size",
    )

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.key_text: str | None = None
        """The credential: `Authorization: Bearer`, else `x-api-key`."""
        self.size = 0
        """Bytes of all names and values together."""
        self.body_bytes = 0
        """As announced; 0 = not announced."""
        self.packed = False
        """The body has a content encoding."""
        self.passed_on = b""
        """Header lines that go on to the engine."""
        self.client_id = ""
        """The client's own id for its request."""
        bearer = False
        for name, value in headers:
            self.size += len(name) + len(value)
            if name == b"authorization":
                scheme, _, text = value.partition(b" ")
                if not bearer and scheme.lower() == b"bearer":
                    bearer = True
                    self.key_text = text.strip().decode("latin-1")
            elif name in _PASSED_ON:
                self.passed_on += name + b": " + value + b"\r\n"
            elif name == b"content-length":
                self.body_bytes = int(value)
            elif name == b"content-encoding":
                self.packed = self.packed or value.lower() != b"identity"
            elif name == b"x-api-key":
                if not bearer:
                    self.key_text = value.strip().decode("latin-1")
            elif name == b"x-client-request-id" and _CLIENT_ID.fullmatch(value):
                self.client_id = value.decode()

    @property
    def is_anthropic(self) -> bool:
        """Whether the client speaks Anthropic's API."""
        return b"anthropic-version: " in self.passed_on


def model_of_form(body: bytes | bytearray) -> str | None:
    """The field `model` of a multipart form."""
    found = _FORM_MODEL.search(body)
    return found[1].decode(errors="replace") if found else None


def model_list(routes: Iterable[Route], *, anthropic: bool) -> dict[str, object]:
    """`/v1/models`, in the shape of the client's API."""
    cards = [model_card(route, anthropic=anthropic) for route in routes]
    if not anthropic:
        return {"object": "list", "data": cards}
    ends = [card["id"] for card in (cards[:1] + cards[-1:])] or [None, None]
    return {"data": cards, "has_more": False, "first_id": ends[0], "last_id": ends[-1]}


def model_card(route: Route, *, anthropic: bool) -> dict[str, object]:
    """One model."""
    name = route.public_name
    if anthropic:
        created = datetime.fromtimestamp(route.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "model", "id": name, "display_name": name, "created_at": created}
    card: dict[str, object] = {
        "id": name,
        "object": "model",
        "created": route.created,
        "owned_by": "mmadmin",
    }
    if route.context_per_slot:
        card["context_length"] = route.context_per_slot
    return card


def refusal_of_address(
    asked: str, path: bytes, method: str, offered: bytes, *, about_models: bool
) -> Refusal:
    """Why nothing is served there: 426 for a WebSocket, 405, or 404 with what was meant.

    `offered` is the protocol to which the client would like to upgrade.
    """
    if offered.lower() == b"websocket" and method == "GET":
        refusal = Refusal(
            426,
            "WebSockets are not supported. Send the request with POST over HTTP.",
            reason="websocket_not_supported",
        )
        refusal.headers.append((b"upgrade", b"HTTP/1.1"))
        return refusal
    allowed = b"POST" if path in POSTS else b"GET, HEAD" if about_models or path == HEALTH else b""
    if allowed:
        refusal = Refusal(
            405,
            f"This URL does not allow {method[:16]}. Use {allowed.decode()}.",
            reason="method_not_allowed",
        )
        refusal.headers.append((b"allow", allowed))
        return refusal
    meant = meant_by(asked)
    return Refusal(
        404,
        f"Unknown URL. Did you mean `{meant}`?"
        if meant
        else "Unknown URL. The API is under `/v1`, for example `/v1/chat/completions`.",
        reason="unknown_url",
    )


def payload_of(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a body; `Refusal` (400) when it is something else."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(
            400, f"The request body is not valid JSON: {error}.", reason="invalid_json"
        ) from error
    if not isinstance(payload, dict):
        raise Refusal(400, "The request body must be a JSON object.", reason="invalid_json")
    return payload


def too_large(limit: int) -> Refusal:
    """A body over the limit, in bytes."""
    return Refusal(
        413,
        f"The request body is larger than {limit // (1024 * 1024)} MiB. Send a smaller one.",
        reason="request_too_large",
    )
