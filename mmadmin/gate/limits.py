"""Limits of a key (placeholder until the next commit)."""

from __future__ import annotations

from mmadmin.core.snapshot import KeyRecord
from mmadmin.gate.flight import Flight


class Limiter:
    """Knows what a key may still use."""

    def limits(self, key: KeyRecord | None) -> bool:
        """Whether the key has any limit."""
        del key
        return False

    async def reserve(self, flight: Flight) -> None:
        """Take what the request may use, or refuse it."""

    def settle(self, reservation: object, tokens: int) -> None:
        """Give back what it did not use."""
