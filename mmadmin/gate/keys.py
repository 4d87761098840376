"""Who is asking: a client key checked against the snapshot.

The check digits are tried first, so that a mistyped key costs no look-up. Unknown and revoked keys
take the same path, the same time and get the same answer. A key that has proved itself is known
again by its text until the next snapshot: only who holds the whole key can tell that it is faster.
"""

from __future__ import annotations

import hmac
import time

from mmadmin.core.access import key_digest, parse_key
from mmadmin.core.snapshot import KeyRecord, Snapshot
from mmadmin.gate.refusal import Refusal, ended_key, no_key, wrong_key

_NOBODY = "0" * 64
"""A digest that no key has: compared with, so that unknown keys take as long as known ones."""


class KeyRing:
    """The keys of one snapshot, and which of them have proved themselves."""

    __slots__ = ("_pepper", "_proven", "_snapshot")

    def __init__(self, snapshot: Snapshot, pepper: bytes) -> None:
        self._snapshot = snapshot
        self._pepper = pepper
        self._proven: dict[str, KeyRecord] = {}
        """By the key's text: at most one for each key of the snapshot."""

    def check(self, text: str | None) -> KeyRecord:
        """The key's record when it may be used now; `Refusal` (401) otherwise."""
        if text is None:
            raise no_key()
        record = self._proven.get(text)
        if record is None:
            record = _record_of(text, self._snapshot, self._pepper)
            self._proven[text] = record
        if record.state == "suspended":
            raise ended_key("suspended")
        if record.expires_at and record.expires_at <= time.time():
            raise Refusal(401, "This API key has expired. Use a new one.", reason="api_key_expired")
        return record


def _record_of(text: str, snapshot: Snapshot, pepper: bytes) -> KeyRecord:
    """The record of a key that is known and not revoked; `Refusal` (401) otherwise."""
    key_id = parse_key(text)
    if key_id is None:
        raise wrong_key()
    record = snapshot.keys.get(key_id)
    digest = key_digest(text, pepper)
    if (
        not hmac.compare_digest(digest, record.digest if record else _NOBODY)
        or record is None
        or record.state == "revoked"
    ):
        raise wrong_key()
    return record
