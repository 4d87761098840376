"""Keys that have proved themselves: known again, and never longer than they may be used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmadmin.core.access import new_key
from mmadmin.core.snapshot import KeyRecord, Snapshot
from mmadmin.gate import keys
from mmadmin.gate.intake import Head
from mmadmin.gate.keys import KeyRing
from mmadmin.gate.refusal import Refusal

PEPPER = b"test-only-pepper"


def ring(*records: KeyRecord) -> KeyRing:
    """The keys of a snapshot."""
    found = {record.key_id: record for record in records}
    return KeyRing(Snapshot(version=1, routes={}, keys=found), PEPPER)


def test_a_proven_key_costs_no_second_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request with the same key is recognised by its text alone; another key is not."""
    key = new_key(PEPPER)
    record = KeyRecord(key_id=key.key_id, digest=key.digest, state="active")
    known = ring(record)
    assert known.check(key.text) is record

    def no_digest(_text: str, _pepper: bytes) -> str:
        raise AssertionError("a digest was made")

    monkeypatch.setattr(keys, "key_digest", no_digest)
    assert known.check(key.text) is record
    with pytest.raises(AssertionError):
        known.check(new_key(PEPPER).text)


def test_an_unknown_key_is_not_remembered() -> None:
    """Guesses take no memory and are refused every time."""
    known = ring()
    for text in (new_key(PEPPER).text, "sk-mm-nonsense", ""):
        for _ in range(2):
            with pytest.raises(Refusal) as refused:
                known.check(text)
            assert refused.value.status == 401
    assert not known._proven


def test_a_proven_key_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is looked at on every request."""
    key = new_key(PEPPER)
    record = KeyRecord(key_id=key.key_id, digest=key.digest, state="active", expires_at=1000)
    known = ring(record)
    now = 999.0
    monkeypatch.setattr("mmadmin.gate.keys.time.time", lambda: now)
    assert known.check(key.text) is record
    now = 1000.0
    with pytest.raises(Refusal, match="expired"):
        known.check(key.text)


def test_the_next_snapshot_starts_anew() -> None:
    """A key proven under one snapshot is nothing to the next one's ring."""
    key = new_key(PEPPER)
    record = KeyRecord(key_id=key.key_id, digest=key.digest, state="active")
    assert ring(record).check(key.text) is record
    for state in ("revoked", "suspended"):
        with pytest.raises(Refusal):
            ring(replace(record, state=state)).check(key.text)


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([(b"authorization", b"Bearer  a ")], "a"),
        ([(b"authorization", b"bearer a"), (b"x-api-key", b"b")], "a"),
        ([(b"x-api-key", b"b"), (b"authorization", b"Bearer a")], "a"),
        ([(b"authorization", b"Basic a"), (b"x-api-key", b"b")], "b"),
        ([(b"authorization", b"Basic a")], None),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], "a"),
        ([(b"x-api-key", b"\xff")], "ÿ"),
        ([], None),
    ],
)
def test_where_a_key_is_looked_for(headers: list[tuple[bytes, bytes]], text: str | None) -> None:
    """`Authorization: Bearer` first, else `x-api-key`."""
    assert Head(headers).key_text == text
