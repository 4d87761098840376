"""Client keys and engine secrets: format, digest, derivation.

A key is `sk-mm-<id>-<secret><check>`: id 12 and secret 32 characters of Crockford's base32
alphabet in lower case (60 and 160 bits), check 7 characters of CRC-32 over all that stands before
it, so that a mistyped key is refused without a look-up. The id is public (`prefix`), the whole key
is kept only as HMAC-SHA256 under the installation's pepper.
"""

from __future__ import annotations

import binascii
import hmac
import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

ENDPOINTS = (
    "chat",
    "completions",
    "embeddings",
    "responses",
    "rerank",
    "tokenize",
    "messages",
    "audio",
    "images",
)
"""What a key's endpoint scope may name; `/v1/models` is open to every key."""

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
ID_LENGTH = 12
SECRET_LENGTH = 32
CHECK_LENGTH = 7
_KEY = re.compile(
    rf"sk-mm-([{ALPHABET}]{{{ID_LENGTH}}})-([{ALPHABET}]{{{SECRET_LENGTH}}})([{ALPHABET}]{{{CHECK_LENGTH}}})"
)
_PAIRS = [first + second for first in ALPHABET for second in ALPHABET]
_BLOCK = 64
"""SHA-256's block, bytes."""
_KEY_LIKE = re.compile(rf"(sk-mm-[{ALPHABET}]{{0,{ID_LENGTH}}})[-{ALPHABET}]*")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key just made: the only moment at which its text exists."""

    key_id: str
    text: str
    digest: str


def _check(body: str) -> str:
    """CRC-32 of `body` as 7 base32 digits."""
    value = binascii.crc32(body.encode())
    return (
        ALPHABET[value >> 30]
        + _PAIRS[value >> 20 & 1023]
        + _PAIRS[value >> 10 & 1023]
        + _PAIRS[value & 1023]
    )


@lru_cache(maxsize=4)
def _keyed(pepper: bytes) -> tuple[Any, Any]:
    """The two hashes of HMAC (RFC 2104), already fed with the padded pepper.

    The gate makes a digest a request: copying these costs a seventh of `hmac.digest`.
    """
    if len(pepper) > _BLOCK:
        pepper = sha256(pepper).digest()
    padded = pepper.ljust(_BLOCK, b"\0")
    return sha256(bytes(b ^ 0x36 for b in padded)), sha256(bytes(b ^ 0x5C for b in padded))


def key_digest(text: str, pepper: bytes) -> str:
    """Hex HMAC-SHA256 of the whole key."""
    inner, outer = _keyed(pepper)
    inner, outer = inner.copy(), outer.copy()
    inner.update(text.encode())
    outer.update(inner.digest())
    return str(outer.hexdigest())


def new_key(pepper: bytes) -> NewKey:
    """Make a key from the system's random source."""
    key_id = "".join(secrets.choice(ALPHABET) for _ in range(ID_LENGTH))
    secret = "".join(secrets.choice(ALPHABET) for _ in range(SECRET_LENGTH))
    body = f"sk-mm-{key_id}-{secret}"
    text = body + _check(body)
    return NewKey(key_id=key_id, text=text, digest=key_digest(text, pepper))


def parse_key(text: str) -> str | None:
    """The key's id when the text is well-formed and its check fits, else None."""
    match = _KEY.fullmatch(text)
    if match is None or not hmac.compare_digest(_check(text[:-CHECK_LENGTH]), match[3]):
        return None
    return match[1]


def key_matches(text: str, digest: str, pepper: bytes) -> bool:
    """Constant-time comparison of a key with its stored digest."""
    return hmac.compare_digest(key_digest(text, pepper), digest)


def prefix(key_id: str) -> str:
    """What is shown of a key ever after."""
    return f"sk-mm-{key_id}"


def redact(text: str) -> str:
    """`text` without the secret part of any client key in it, however cut."""
    return _KEY_LIKE.sub(lambda match: f"{match[1]}[redacted]", text)


def engine_secret(master: bytes, replica_uid: str) -> str:
    """The secret between gate and one replica: HMAC of the replica's uid, 64 hex characters."""
    return hmac.new(master, b"engine\0" + replica_uid.encode(), sha256).hexdigest()
