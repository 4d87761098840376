"""What the gate knows: the snapshot it serves from and the usage that it reports.

The panel's side publishes a `Snapshot` (Redis value + nudge, and a file where they share a host);
the gate keeps the last good one on disk. No secret is in it: client keys are HMAC digests, and an
engine's secret is derived from the installation's engine master key (`access.engine_secret`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from mmadmin.core.errors import InvalidInput

SNAPSHOT_FORMAT = 1
SNAPSHOT_KEY = "mm:snapshot"
"""Redis string: the newest snapshot as JSON."""
NUDGE_CHANNEL = "mm:nudge"
"""Redis channel: the version number of a snapshot that was just published."""
REVOKE_CHANNEL = "mm:revoke"
"""Redis channel: the id of a key that was just revoked, published ahead of its snapshot."""
USAGE_STREAM = "mm:usage"
"""Redis stream of usage events; the field `event` is the JSON of a `Usage`."""
USAGE_ACK_KEY = "mm:usage:ack"
"""Redis hash: gate spool id → last spool sequence number that is safely in the database."""
GATE_PRESENCE_PREFIX = "mm:gate:"
"""Redis string a gate worker (with expiry): JSON of `{"version", "inflight": {generation uid: n},
"held": {deployment: n}, "at"}`; an activation waits for every gate to have seen its version."""
GATE_WATCH_PREFIX = "mm:top:"
"""Redis string a gate worker (with expiry): JSON of `{"at", "rates": [{"deployment", "key",
"requests_per_s", "prompt_tokens_per_s", "completion_tokens_per_s"}], "queues": {deployment:
{"running", "waiting", "slots"}}, "requests": [{"id", "key", "deployment", "generation", "endpoint",
"state", "stream", "age_s", "events"}]}`: what is going on now, for people who watch."""

UPGRADE_HOLD_S = 300
"""How long requests wait for engines that an earlier version had started."""

RouteMode = Literal["open", "hold", "closed"]


@dataclass(frozen=True, slots=True)
class ErrorPatterns:
    """How an engine words its errors, as regular expressions; empty = it does not."""

    template: str = ""
    """Plain text before the message of a chat template that rejected the request."""
    no_input: str = ""
    """Matches somewhere in the message; its first group is the kind of input that is refused."""
    request: str = ""
    """Matches the beginning of messages that are about the request although the status is 500."""
    context_type: str = ""
    """The error's `type` when the request is longer than the context."""
    advice: str = ""
    """Matches what a message advises the operator to do; clients do not see it."""


@dataclass(frozen=True, slots=True)
class AnswerFields:
    """What an engine reads in a request about the size of its answer, and how it counts it."""

    caps: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By path: the fields of which one bounds the answer. Without: those of the API."""
    choices: Sequence[str] = ("n",)
    """The fields of which one is the number of answers to a prompt."""
    usage_of_one: bool = False
    """The usage that it reports is that of one answer, however many there are."""


@dataclass(frozen=True, slots=True)
class ReplicaRoute:
    """One engine process that answers for a generation."""

    uid: str
    """The replica's uid; its secret is derived from it."""
    socket: str
    """The Unix socket on which it answers."""
    slots: int


@dataclass(frozen=True, slots=True)
class Route:
    """What a public model name leads to."""

    deployment: str
    """The deployment's name: scopes of keys and usage records use it."""
    public_name: str
    """The model name that clients send."""
    mode: RouteMode
    generation: int | None
    """The live generation's number; None when nothing is live."""
    generation_uid: str | None
    """`<deployment>/<number>`: the `x-mm-generation` header."""
    replicas: Sequence[ReplicaRoute]
    hold_until: int = 0
    """Unix seconds until which a held request may wait (mode "hold")."""
    created: int = 0
    """Unix seconds, for `/v1/models`."""
    context_per_slot: int = 0
    errors: ErrorPatterns = ErrorPatterns()
    """How its engine words errors."""
    answers: AnswerFields = AnswerFields()
    """What its engine reads about the size of an answer."""
    trial: bool = False
    """It leads to a generation that runs beside the live one for a while; `public_name` is the
    generation's uid, and only keys with `trials` know of it."""

    @property
    def queue_name(self) -> str:
        """The queue of its requests: a trial has its own slots, and so its own queue."""
        return self.public_name if self.trial else self.deployment

    @property
    def is_served(self) -> bool:
        """Whether an engine answers for it, now or when a hold ends."""
        if self.mode == "hold":
            return True
        return self.mode == "open" and self.generation_uid is not None and bool(self.replicas)


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
    trials: bool = False
    """It may ask generations on trial, of the deployments that it may use."""


KEY_LIMITS = ("rpm", "tpm", "concurrency", "tokens_per_day", "tokens_per_month")
"""The limits of a key by the names of their fields, here and in the panel's records."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the gate needs to answer, immutable; newer versions replace older ones."""

    version: int
    """Grows with every publication; milliseconds since the epoch at publication, made unique."""
    routes: Mapping[str, Route]
    """By public name."""
    keys: Mapping[str, KeyRecord]
    """By key id."""
    trials: Mapping[str, Route] = field(default_factory=dict)
    """By generation uid. Apart from `routes`, so that a gate of before knows none of them instead
    of offering them to everybody."""
    format: int = SNAPSHOT_FORMAT

    def now(self, route: Route) -> Route | None:
        """The route as it is in this snapshot, whatever it is called now; None = it is gone."""
        if route.trial:
            return self.trials.get(route.public_name)
        found = self.routes.get(route.public_name)
        if found is not None and found.deployment == route.deployment:
            return found
        return next((r for r in self.routes.values() if r.deployment == route.deployment), None)


@dataclass(frozen=True, slots=True)
class Usage:
    """One finished request, for the usage records. Holds no prompt, answer or key text."""

    id: str
    """The request id: unique, the idempotency key of the usage record."""
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


def snapshot_to_json(snapshot: Snapshot) -> str:
    """The published form: compact JSON, the version first, so that a reader sees it early."""
    return json.dumps(
        {
            "version": snapshot.version,
            "format": snapshot.format,
            "routes": {name: asdict(route) for name, route in snapshot.routes.items()},
            "trials": {name: asdict(route) for name, route in snapshot.trials.items()},
            "keys": {
                key_id: {name: getattr(key, name) for name in KeyRecord.__dataclass_fields__}
                for key_id, key in snapshot.keys.items()
            },
        },
        separators=(",", ":"),
        ensure_ascii=False,
    )


def snapshot_from_json(text: str | bytes) -> Snapshot:
    """Read a published snapshot; `InvalidInput` when it is damaged or of another format.

    Fields that this version does not know are ignored, so that a newer panel may add some.
    """
    try:
        data = json.loads(text)
        if data["format"] != SNAPSHOT_FORMAT:
            raise InvalidInput(
                f"the snapshot has format {data['format']}, this gate reads {SNAPSHOT_FORMAT}",
                remedy="run panel and gate of the same release",
            )
        return Snapshot(
            version=_int(data["version"]),
            routes={str(name): _route(value) for name, value in data["routes"].items()},
            keys={str(key_id): _key(value) for key_id, value in data["keys"].items()},
            trials={str(name): _route(value) for name, value in data.get("trials", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(
            f"the snapshot is damaged: {type(error).__name__}: {error}",
            remedy="publish it again (any change in the panel does)",
        ) from error


def usage_from_json(text: str | bytes) -> Usage:
    """Read one usage event; `InvalidInput` when it is damaged."""
    try:
        data = json.loads(text)
        known = {name: data[name] for name in _USAGE_FIELDS if name in data}
        usage = Usage(**known)
        for name, kind in _USAGE_FIELDS.items():
            value = getattr(usage, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TypeError(f"{name} is {type(value).__name__}")  # noqa: TRY301 (one exit)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"a usage event is damaged: {type(error).__name__}: {error}") from error
    return usage


_USAGE_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (float, int),
    "bool": bool,
}
_USAGE_FIELDS = {
    field.name: _USAGE_KINDS.get(str(field.type), str) for field in fields(Usage)
}  # `outcome` is a literal: a str


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not a truth value")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{value!r} is not a list of strings")
    return tuple(value)


def _route(value: Any) -> Route:
    if value["mode"] not in ("open", "hold", "closed"):
        raise ValueError(f"unknown route mode {value['mode']!r}")
    replicas = [item for item in value["replicas"] if "socket" in item]
    if value["mode"] == "open" and len(replicas) < len(value["replicas"]):
        # Written by version 0.1 about engines on TCP ports, which are restarted on sockets.
        value = value | {"mode": "hold", "hold_until": int(time.time()) + UPGRADE_HOLD_S}
    return Route(
        deployment=value["deployment"],
        public_name=value["public_name"],
        mode=value["mode"],
        generation=value["generation"],
        generation_uid=value["generation_uid"],
        replicas=tuple(
            ReplicaRoute(uid=item["uid"], socket=item["socket"], slots=_int(item["slots"]))
            for item in replicas
        ),
        hold_until=_int(value.get("hold_until", 0)),
        created=_int(value.get("created", 0)),
        context_per_slot=_int(value.get("context_per_slot", 0)),
        errors=_errors(value.get("errors", {})),
        answers=_answers(value.get("answers", {})),
        trial=_bool(value.get("trial", False)),
    )


def _errors(value: Any) -> ErrorPatterns:
    known = {f.name: value[f.name] for f in fields(ErrorPatterns) if f.name in value}
    for pattern in known.values():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression") from error
    return ErrorPatterns(**known)


def _answers(value: Any) -> AnswerFields:
    usual = AnswerFields()
    return AnswerFields(
        caps={str(path): _strings(names) for path, names in value.get("caps", {}).items()},
        choices=_strings(value.get("choices", usual.choices)),
        usage_of_one=_bool(value.get("usage_of_one", usual.usage_of_one)),
    )


def _key(value: Any) -> KeyRecord:
    if value["state"] not in ("active", "suspended", "revoked"):
        raise ValueError(f"unknown key state {value['state']!r}")
    return KeyRecord(
        key_id=value["key_id"],
        digest=value["digest"],
        state=value["state"],
        expires_at=_int(value.get("expires_at", 0)),
        deployments=_strings(value.get("deployments", ())),
        endpoints=_strings(value.get("endpoints", ())),
        rpm=_int(value.get("rpm", 0)),
        tpm=_int(value.get("tpm", 0)),
        concurrency=_int(value.get("concurrency", 0)),
        tokens_per_day=_int(value.get("tokens_per_day", 0)),
        tokens_per_month=_int(value.get("tokens_per_month", 0)),
        trials=_bool(value.get("trials", False)),
    )
