"""The endpoints: what a client may call, and nothing else.

A path is allowed when its raw bytes are one of these names, so there is no normalisation to get
wrong: `//metrics`, `/v1/../metrics` and percent-encoded spellings match nothing. An address that
comes close is refused with the one that was probably meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from mmadmin.core.access import ENDPOINTS
from mmadmin.gate.refusal import Dialect


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One thing that an engine can be asked for."""

    name: str
    """The name that key scopes and usage records use (`access.ENDPOINTS`)."""
    upstream: str
    """The engine's path."""
    dialect: Dialect = "openai"
    body: Literal["json", "form"] = "json"
    streams: bool = False
    asks_usage: bool = False
    """Streams carry usage only when `stream_options.include_usage` asks for it."""
    takes_slot: bool = True
    """False = cheap for the engine: does not wait in the queue."""
    caps: tuple[str, ...] = ()
    """The API's fields of which one bounds the answer."""
    prompts: str = ""
    """The field that may hold several prompts."""
    needs_model: bool = True
    """False = without `model`, the only one that the key may use."""


_ALL = (
    Endpoint(
        "chat",
        "/v1/chat/completions",
        streams=True,
        asks_usage=True,
        caps=("max_completion_tokens", "max_tokens"),
    ),
    Endpoint(
        "completions",
        "/v1/completions",
        streams=True,
        asks_usage=True,
        caps=("max_tokens",),
        prompts="prompt",
    ),
    Endpoint("embeddings", "/v1/embeddings", prompts="input"),
    Endpoint(
        "responses",
        "/v1/responses",
        dialect="responses",
        streams=True,
        caps=("max_output_tokens",),
    ),
    Endpoint("chat", "/v1/chat/completions/input_tokens", takes_slot=False),
    Endpoint("responses", "/v1/responses/input_tokens", takes_slot=False),
    Endpoint("rerank", "/v1/rerank", prompts="documents"),
    Endpoint("tokenize", "/tokenize", takes_slot=False, needs_model=False),
    Endpoint("tokenize", "/detokenize", takes_slot=False, needs_model=False),
    Endpoint("messages", "/v1/messages", dialect="anthropic", streams=True, caps=("max_tokens",)),
    Endpoint("messages", "/v1/messages/count_tokens", dialect="anthropic", takes_slot=False),
    Endpoint("audio", "/v1/audio/transcriptions", body="form", streams=True),
    Endpoint("audio", "/v1/audio/translations", body="form"),
    Endpoint("audio", "/v1/audio/speech", streams=True),
    Endpoint("images", "/v1/images/generations", streams=True),
    Endpoint("images", "/v1/images/edits", body="form", streams=True),
)
POSTS: dict[bytes, Endpoint] = {endpoint.upstream.encode(): endpoint for endpoint in _ALL}
"""By the raw path of the request."""
POSTS[b"/v1/tokenize"] = POSTS[b"/tokenize"]
POSTS[b"/v1/detokenize"] = POSTS[b"/detokenize"]

MODELS = b"/v1/models"
MODEL = b"/v1/models/"
"""Followed by one model's name, percent-encoded; never reaches an engine."""

HEALTH = b"/health"
"""For load balancers, without a key; never reaches an engine."""
_MEANT = {name.removeprefix("/v1"): name for name in (*(e.upstream for e in _ALL), "/v1/models")}
_MEANT |= {"/api/chat": "/v1/chat/completions", "/api/generate": "/v1/completions"}
"""What stands behind `/v1` in an address, and common addresses of other servers."""
_PREFIX = re.compile(r"^(?:/openai|/api|/v\d+)+(?=/)")


def meant_by(path: str) -> str:
    """The address that was probably meant by one that is not served; empty = any."""
    tail = re.sub(r"/+", "/", path[:256].lower()).rstrip("/")
    if tail in _MEANT:
        return _MEANT[tail]
    tail = _PREFIX.sub("", tail)
    near = get_close_matches(tail, _MEANT, n=1, cutoff=0.8)
    return _MEANT[near[0]] if near else ""


if {endpoint.name for endpoint in _ALL} != set(ENDPOINTS):
    raise AssertionError("the endpoints and access.ENDPOINTS differ")
