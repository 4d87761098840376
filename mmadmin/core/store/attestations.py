"""Signed attestations of other stores, and whose signatures count.

Content proves itself: its name is its hash. That a *derivation* produced it is attested by
signatures. What is signed is the canonical form of (key, hash, size, refs, closure) under the
domain `mmadmin-claim-v1`; a signature therefore fits no other step and no other output.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from mmadmin.core.build.derivation import NAME
from mmadmin.core.canonical import canonical, parse
from mmadmin.core.errors import InvalidDerivation, InvalidInput, StoreCorrupt, Untrusted
from mmadmin.core.store.layout import check_object_name, is_sha256

DOMAIN = b"mmadmin-claim-v1\0"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Attestation:
    """A statement that the derivation with this key produced this object."""

    resolved_key: str
    derivation: str
    object: str
    """Name; its hash is what is signed."""
    size: int
    closure: Mapping[str, tuple[str, ...]]
    """What it needs at run time: each object of its closure, itself included, with its refs."""
    signatures: Mapping[str, str] = field(default_factory=dict)
    """Base64 by key name."""

    def signed_bytes(self) -> bytes:
        """What a signature is made over."""
        return DOMAIN + canonical(
            {
                "key": self.resolved_key,
                "object": self.object,
                "hash": self.object[:64],
                "size": self.size,
                "refs": list(self.closure[self.object]),
                "closure": {name: list(refs) for name, refs in self.closure.items()},
            }
        )

    def same_statement(self, other: Attestation) -> bool:
        """True when both attest the same, whoever signed them."""
        return self.signed_bytes() == other.signed_bytes()

    def as_bytes(self) -> bytes:
        """The attestation as a file."""
        return canonical(
            {
                "version": VERSION,
                "resolved_key": self.resolved_key,
                "derivation": self.derivation,
                "object": self.object,
                "size": self.size,
                "closure": {name: list(refs) for name, refs in self.closure.items()},
                "signatures": dict(self.signatures),
            }
        )


def attestation_from_bytes(data: bytes, resolved_key: str) -> Attestation:
    """The attestation that a file holds; `StoreCorrupt` unless it is one, for that key."""
    try:
        value = parse(data)
        return _attestation(value, resolved_key)
    except (InvalidDerivation, InvalidInput, KeyError, TypeError, AttributeError) as error:
        raise StoreCorrupt(f"the attestation of {resolved_key[:12]} is damaged: {error}") from error


def _attestation(value: Any, resolved_key: str) -> Attestation:
    fields = {"version", "resolved_key", "derivation", "object", "size", "closure", "signatures"}
    if not isinstance(value, dict) or set(value) != fields or value["version"] != VERSION:
        raise InvalidInput("it has other fields than an attestation of this version")
    if value["resolved_key"] != resolved_key:
        raise InvalidInput("it is the attestation of another step")
    if not is_sha256(value["derivation"]) or not isinstance(value["size"], int):
        raise InvalidInput("its fields have other types")
    closure = {
        check_object_name(name): tuple(sorted(check_object_name(ref) for ref in refs))
        for name, refs in value["closure"].items()
    }
    name = check_object_name(value["object"])
    if name not in closure or any(ref not in closure for refs in closure.values() for ref in refs):
        raise InvalidInput("its closure has gaps")
    signatures = value["signatures"]
    if not all(isinstance(s, str) for s in signatures.values()):
        raise InvalidInput("its signatures are not text")
    return Attestation(
        resolved_key, value["derivation"], name, value["size"], closure, dict(signatures)
    )


class SigningKey:
    """A secret Ed25519 key with a name; its text is `<name>:<base64>`."""

    def __init__(self, name: str, key: Ed25519PrivateKey) -> None:
        if not NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} is not a valid key name", remedy="use a plain word")
        self.name = name
        self._key = key

    @classmethod
    def generate(cls, name: str) -> SigningKey:
        """A new key."""
        return cls(name, Ed25519PrivateKey.generate())

    @classmethod
    def from_text(cls, text: str) -> SigningKey:
        """The key that `secret_text` wrote."""
        name, raw = _key_text(text, "signing key")
        return cls(name, Ed25519PrivateKey.from_private_bytes(raw))

    def secret_text(self) -> str:
        """The secret: for a file of mode 0600, never for a log."""
        return f"{self.name}:{base64.b64encode(self._key.private_bytes_raw()).decode()}"

    def public_text(self) -> str:
        """What others put into their trust."""
        raw = self._key.public_key().public_bytes_raw()
        return f"{self.name}:{base64.b64encode(raw).decode()}"

    def sign(self, attestation: Attestation) -> Attestation:
        """The attestation with this key's signature added."""
        signature = base64.b64encode(self._key.sign(attestation.signed_bytes())).decode()
        return replace(attestation, signatures={**attestation.signatures, self.name: signature})

    def __repr__(self) -> str:
        return f"<SigningKey {self.name}>"


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose signatures count, and how many of them are needed."""

    keys: Mapping[str, Ed25519PublicKey]
    need: int = 1
    revoked: frozenset[str] = frozenset()
    """Names of keys that no longer count, whatever they signed before."""

    @classmethod
    def of(cls, texts: Iterable[str], *, need: int = 1, revoked: Iterable[str] = ()) -> Trust:
        """Trust in public keys given as `<name>:<base64>`."""
        keys = {}
        for text in texts:
            name, raw = _key_text(text, "public key")
            if name in keys:
                raise InvalidInput(f"two trusted keys are called {name}")
            keys[name] = Ed25519PublicKey.from_public_bytes(raw)
        if need < 1:
            raise InvalidInput("at least one trusted signature must be needed")
        return cls(keys, need, frozenset(revoked))

    def signers(self, attestation: Attestation) -> list[str]:
        """Names of trusted, unrevoked keys whose signature on the attestation is right.

        The same key under two names counts once.
        """
        found: dict[bytes, str] = {}
        message = attestation.signed_bytes()
        for name, signature in attestation.signatures.items():
            key = self.keys.get(name)
            if key is None or name in self.revoked:
                continue
            try:
                key.verify(base64.b64decode(signature, validate=True), message)
            except (InvalidSignature, binascii.Error):
                continue
            found.setdefault(key.public_bytes_raw(), name)
        return sorted(found.values())

    def check(self, attestation: Attestation) -> None:
        """Raise `Untrusted` unless enough trusted keys signed the attestation."""
        signers = self.signers(attestation)
        if len(signers) < self.need:
            given = ", ".join(sorted(attestation.signatures)) or "no one"
            revoked = sorted(self.revoked & set(attestation.signatures))
            raise Untrusted(
                f"the attestation of {attestation.object[65:]} is signed by {given}; "
                f"{len(signers)} of the {self.need} trusted signatures that are needed"
                + (f" ({', '.join(revoked)} revoked)" if revoked else ""),
                remedy="trust the signer's public key, or build it here",
            )


def _key_text(text: str, what: str) -> tuple[str, bytes]:
    name, _, encoded = text.strip().partition(":")
    try:
        raw = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raw = b""
    if not NAME.fullmatch(name) or len(raw) != 32:  # noqa: PLR2004 (RFC 8032: 32 bytes)
        raise InvalidInput(f"invalid {what}", remedy="it looks like <name>:<44 characters>")
    return name, raw
