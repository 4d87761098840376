"""What the gate knows: the snapshot it serves from and the usage that it reports.

The panel's side publishes a `Snapshot` (Redis value + nudge, and a file where they share a host);
the gate keeps the last good one on disk. No secret is in it: client keys are HMAC digests, and an
engine's secret is derived from the installation's engine master key (`access.engine_secret`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SNAPSHOT_FORMAT = 1
SNAPSHOT_KEY = "mm:snapshot"
"""Redis string: the newest snapshot as JSON."""
NUDGE_CHANNEL = "mm:nudge"
"""Redis channel: the version number of a snapshot that was just published."""
USAGE_STREAM = "mm:usage"
"""Redis stream of usage events; the field `event` is the JSON of a `Usage`."""
USAGE_ACK_KEY = "mm:usage:ack"
"""Redis hash: gate spool id → last spool sequence number that is safely in the database."""
GATE_PRESENCE_PREFIX = "mm:gate:"
"""Redis string a gate worker (with expiry): JSON of `{"version", "inflight": {generation uid: n},
"held": {deployment: n}, "at"}`; an activation waits for every gate to have seen its version."""

RouteMode = Literal["open", "hold", "closed"]


@dataclass(frozen=True, slots=True)
class ReplicaRoute:
    """One engine process that answers for a generation."""

    uid: str
    """The replica's uid; its secret is derived from it."""
    url: str
    """`http://127.0.0.1:21000`, no trailing slash."""
    slots: int


@dataclass(frozen=True, slots=True)
class Route:
    """What a public model name leads to."""

    deployment: str
    """The deployment's name: scopes of keys and books use it."""
    public_name: str
    """The model name that clients send."""
    mode: RouteMode
    generation: int | None
    """The live generation's number; None when nothing is live."""
    generation_uid: str | None
    """`<deployment>/<number>`: the `x-mm-generation` header."""
    replicas: Sequence[ReplicaRoute]
    queue_limit: int = 64
    """Requests that may wait; one more is refused with 429."""
    hold_until: int = 0
    """Unix seconds until which a held request may wait (mode "hold")."""
    created: int = 0
    """Unix seconds, for `/v1/models`."""
    context_per_slot: int = 0
    endpoints: Sequence[str] = ()
    """Endpoint names that the engine offers; empty = all."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A client key as the gate knows it."""

    key_id: str
    digest: str
    """Hex HMAC-SHA256 of the whole key under the installation's pepper."""
    state: Literal["active", "suspended", "revoked"]
    expires_at: int = 0
    """Unix seconds; 0 = never."""
    deployments: Sequence[str] = ()
    """Names the key may use; empty = all."""
    endpoints: Sequence[str] = ()
    """Endpoint names the key may use; empty = all."""
    rpm: int = 0
    tpm: int = 0
    concurrency: int = 0
    tokens_per_day: int = 0
    tokens_per_month: int = 0
    """Limits; 0 = none."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the gate needs to answer, immutable; newer versions replace older ones."""

    version: int
    """Grows with every publication; milliseconds since the epoch at publication, made unique."""
    routes: Mapping[str, Route]
    """By public name."""
    keys: Mapping[str, KeyRecord]
    """By key id."""
    format: int = SNAPSHOT_FORMAT


@dataclass(frozen=True, slots=True)
class Usage:
    """One finished request, for the books. Holds no prompt, answer or key text."""

    id: str
    """The request id: unique, the books' idempotency key."""
    at: float
    """Unix seconds when the request ended."""
    key_id: str
    deployment: str
    generation: int
    endpoint: str
    status: int
    """HTTP status sent; 499 = the client left first."""
    outcome: Literal["ok", "refused", "failed", "cancelled"]
    streamed: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    exact: bool = True
    """False = token counts are an estimate."""
    queue_ms: int = 0
    ttft_ms: int = 0
    duration_ms: int = 0
    tokens_per_s_milli: int = 0
    """Generation speed, thousandths of a token per second."""
    gate: str = ""
    """Spool id of the gate worker."""
    seq: int = 0
    """Position in that spool."""
