"""Client keys: format, check digits, digest, redaction; engine secrets."""

import hmac

from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.access import (
    ALPHABET,
    engine_secret,
    key_digest,
    key_matches,
    new_key,
    parse_key,
    prefix,
    redact,
)

PEPPER = b"pepper"
KEY = new_key(PEPPER)


def test_a_new_key_is_well_formed_and_matches_its_digest() -> None:
    """Its id is public, its text is proven by the digest alone."""
    assert parse_key(KEY.text) == KEY.key_id
    assert KEY.text.startswith(prefix(KEY.key_id) + "-")
    assert key_matches(KEY.text, KEY.digest, PEPPER)
    assert not key_matches(KEY.text, key_digest(KEY.text, b"other pepper"), PEPPER)
    assert KEY.text not in KEY.digest
    assert len({new_key(PEPPER).text for _ in range(100)}) == 100


@given(
    st.binary(min_size=1, max_size=200),
    st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" ")),
)
def test_the_digest_is_hmac_sha256(pepper: bytes, text: str) -> None:
    """Written out for speed, equal to the library's for every pepper and text."""
    assert text.isprintable()
    assert key_digest(text, pepper) == hmac.new(pepper, text.encode(), "sha256").hexdigest()


def test_every_single_slip_is_noticed() -> None:
    """Any one character changed, dropped, doubled, or two neighbours swapped."""
    text = KEY.text
    for at in range(len("sk-mm-"), len(text)):
        for other in ALPHABET:
            if other != text[at]:
                assert parse_key(text[:at] + other + text[at + 1 :]) is None
        assert parse_key(text[:at] + text[at + 1 :]) is None
        assert parse_key(text[:at] + text[at] + text[at:]) is None
        if at + 1 < len(text) and text[at] != text[at + 1]:
            assert parse_key(text[:at] + text[at + 1] + text[at] + text[at + 2 :]) is None


@given(st.text(max_size=80))
def test_other_texts_are_no_keys(text: str) -> None:
    """Anything at all may come in a header."""
    assert parse_key(text) is None


@given(st.text(max_size=20), st.text(max_size=20))
def test_redaction_leaves_no_secret(before: str, after: str) -> None:
    """Wherever a key stands in a text, its secret part goes and its id stays."""
    shown = redact(f"{before}{KEY.text}{after}")
    assert KEY.text[len(prefix(KEY.key_id)) + 1 :][:8] not in shown
    assert prefix(KEY.key_id) in shown


def test_engine_secrets_differ_and_repeat() -> None:
    """One a replica, from the master alone."""
    assert engine_secret(b"m", "a/1") == engine_secret(b"m", "a/1")
    assert len({engine_secret(m, u) for m in (b"m", b"n") for u in ("a", "b")}) == 4
