"""Taking requests in: bodies, the model that they name, and what a model looks like to clients."""

from __future__ import annotations

import re
from typing import Any

import orjson

from mmadmin.core.snapshot import Route
from mmadmin.gate.refusal import Refusal

_FORM_MODEL = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n--')


def model_of_form(body: bytes) -> str | None:
    """The field `model` of a multipart form."""
    found = _FORM_MODEL.search(body)
    return found[1].decode(errors="replace") if found else None


def answers(route: Route) -> bool:
    """Whether somebody answers for it, now or when a hold ends."""
    return route.mode == "hold" or (route.generation_uid is not None and bool(route.replicas))


def model_card(route: Route) -> dict[str, object]:
    """One entry of `/v1/models`."""
    card: dict[str, object] = {
        "id": route.public_name,
        "object": "model",
        "created": route.created,
        "owned_by": "mmadmin",
    }
    if route.context_per_slot:
        card["context_length"] = route.context_per_slot
    return card


def payload_of(body: bytes) -> dict[str, Any]:
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
        f"The request body is larger than the limit of {limit // (1024 * 1024)} MiB.",
        reason="request_too_large",
    )
