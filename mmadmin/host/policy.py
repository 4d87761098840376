"""How hard and how politely the network is used; data only, so that it costs nothing to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """How hard and how politely to try."""

    connections: int = 4
    segment_bytes: int = 32 << 20
    stall_s: float = 60.0
    """A connection that brings less than `stall_bytes` in this time is replaced."""
    stall_bytes: int = 16 << 10
    attempts: int = 6
    """Failures in a row before giving up; connections that fail together count once."""
    backoff_s: float = 1.0
    wait_cap_s: float = 300.0
    """Longest Retry-After that we sit out."""
