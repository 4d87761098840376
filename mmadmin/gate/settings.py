"""The gate's settings: everything comes from the environment or from `MM_HOME`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmadmin.core.errors import InvalidInput
from mmadmin.core.home import Home, Ports

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/,\s]+")
MIB = 1024 * 1024
DEFAULT_BODY_LIMIT_MIB = 64
DEFAULT_STOP_S = 120
DEFAULT_QUEUE_LIMIT = 64
DEFAULT_QUEUE_TIMEOUT_S = 300
DEFAULT_REQUEST_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class GateSettings:
    """What one gate process needs to know."""

    home: Home
    pepper: bytes = field(repr=False)
    engine_master: bytes = field(repr=False)
    redis_url: str = field(default="", repr=False)
    """Empty = no broker: the gate serves from its files alone."""
    host: str = "127.0.0.1"
    port: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    workers: int = 1
    body_limit_bytes: int = DEFAULT_BODY_LIMIT_MIB * MIB
    silence_s: float = 10.0
    """A stream that is silent for this long gets a comment."""
    stop_s: int = DEFAULT_STOP_S
    """How long running streams may take to finish at shutdown."""
    queue_limit: int = DEFAULT_QUEUE_LIMIT
    """Requests of a deployment that may wait per worker; one more is refused with 429."""
    queue_timeout_s: int = DEFAULT_QUEUE_TIMEOUT_S
    request_timeout_s: int = DEFAULT_REQUEST_TIMEOUT_S
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the gate; `*` = all."""
    access_log: bool = True
    spool_fsync: bool = False
    """True = fsync every usage event before its answer ends; False = once a second."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> GateSettings:
        """Read the environment; `InvalidInput` names a missing secret or a bad number."""
        env = os.environ if env is None else env
        home = Home.from_env(env)
        ports = Ports.from_env(env)
        return cls(
            home=home,
            pepper=_secret(env, home, "key_pepper"),
            engine_master=_secret(env, home, "engine_master"),
            redis_url=env.get("REDIS_URL") or home.broker_url,
            host=env.get("MM_GATE_HOST") or env.get("MM_BIND") or "127.0.0.1",
            port=ports.gate,
            metrics_host=env.get("MM_METRICS_HOST") or "127.0.0.1",
            metrics_port=ports.metrics,
            workers=_positive(env, "MM_GATE_WORKERS", 1),
            body_limit_bytes=_positive(env, "MM_GATE_BODY_LIMIT_MIB", DEFAULT_BODY_LIMIT_MIB) * MIB,
            silence_s=_positive(env, "MM_GATE_SILENCE_S", 10),
            stop_s=_positive(env, "MM_GATE_STOP_S", DEFAULT_STOP_S),
            queue_limit=_positive(env, "MM_GATE_QUEUE_LIMIT", DEFAULT_QUEUE_LIMIT),
            queue_timeout_s=_positive(env, "MM_GATE_QUEUE_TIMEOUT_S", DEFAULT_QUEUE_TIMEOUT_S),
            request_timeout_s=_positive(
                env, "MM_GATE_REQUEST_TIMEOUT_S", DEFAULT_REQUEST_TIMEOUT_S
            ),
            cors_origins=_origins(env.get("MM_GATE_CORS_ORIGINS", "")),
            access_log=env.get("MM_GATE_ACCESS_LOG", "1") != "0",
            spool_fsync=env.get("MM_GATE_SPOOL_FSYNC") == "always",
        )


def _secret(env: Mapping[str, str], home: Home, name: str) -> bytes:
    """`MM_<NAME>_FILE`, `MM_<NAME>`, else the file that `mm up` generated; never empty."""
    variable = f"MM_{name.upper()}"
    value = env.get(variable, "").strip()
    if not value:
        path = Path(env.get(f"{variable}_FILE") or home.secrets / name)
        try:
            value = path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InvalidInput(
                f"the secret {name} cannot be read from {path}: {error.strerror}",
                remedy=f"run `mm up` once, or set {variable}_FILE",
            ) from error
    if not value:
        raise InvalidInput(
            f"the secret {name} is empty",
            remedy=f"put the installation's value there, or set {variable}_FILE",
        )
    return value.encode()


def _origins(text: str) -> tuple[str, ...]:
    """Origins with commas, as browsers send them."""
    found = tuple(word.strip().rstrip("/").lower() for word in text.split(",") if word.strip())
    for origin in found:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise InvalidInput(
                f"MM_GATE_CORS_ORIGINS names {origin!r}, which is not an origin",
                remedy="write scheme and host, for example https://app.example.org",
            )
    return found


def _positive(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise InvalidInput(f"{name} is {text!r}", remedy="set it to a whole number of at least 1")
    return int(text)
