"""Who is asking: a client key checked against the snapshot.

The check digits are tried first, so that a mistyped key costs no look-up. Unknown and revoked keys
take the same path, the same time and get the same answer.
"""

from __future__ import annotations

import hmac
import time

from mmadmin.core.access import key_digest, parse_key
from mmadmin.core.snapshot import KeyRecord, Snapshot
from mmadmin.gate.refusal import Refusal, no_key, wrong_key

_NOBODY = "0" * 64
"""A digest that no key has: compared with, so that unknown keys take as long as known ones."""


def presented_key(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The credential: `Authorization: Bearer`, else `x-api-key`."""
    other = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, text = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return text.strip().decode("latin-1")
        elif name == b"x-api-key":
            other = value.strip().decode("latin-1")
    return other


def check_key(text: str | None, snapshot: Snapshot, pepper: bytes) -> KeyRecord:
    """The key's record when it may be used now; `Refusal` (401) otherwise."""
    if text is None:
        raise no_key()
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
    if record.state == "suspended":
        raise Refusal(401, "This API key is suspended.", reason="api_key_suspended")
    if record.expires_at and record.expires_at <= time.time():
        raise Refusal(401, "This API key has expired.", reason="api_key_expired")
    return record
