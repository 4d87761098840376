"""Canonical JSON: the committed vectors, and what has no canonical form."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.canonical import MAX_INTEGER, canonical, digest, parse
from mmadmin.core.errors import InvalidDerivation

GOLDEN = json.loads((Path(__file__).parent / "golden" / "canonical.json").read_text("utf-8"))

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | text
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(text, v, max_size=4), max_leaves=20
)


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: v["name"])
def test_golden_vectors_never_change(vector: dict[str, Any]) -> None:
    """A committed value has the committed bytes and digest, on every machine and Python."""
    assert canonical(vector["value"]) == vector["canonical"].encode()
    assert digest(vector["domain"], vector["value"]) == vector["digest"]


@given(values)
def test_parse_inverts_canonical(value: Any) -> None:
    """What was written is read back, and writing it again gives the same bytes."""
    data = canonical(value)
    assert parse(data) == value
    assert canonical(parse(data)) == data


@given(st.dictionaries(text, values, max_size=6), st.randoms(use_true_random=False))
def test_key_order_does_not_matter(value: dict[str, Any], rnd: random.Random) -> None:
    """Two mappings that are equal have the same bytes, however they were filled."""
    items = list(value.items())
    rnd.shuffle(items)
    assert canonical(dict(items)) == canonical(value)


@given(values, values)
def test_different_values_have_different_bytes(one: Any, other: Any) -> None:
    """The form loses nothing: distinct JSON values are told apart, `True` and `1` too."""
    same = canonical(one) == canonical(other)
    assert same == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


def test_keys_are_sorted_by_code_point() -> None:
    """Neither case, locale nor UTF-16 order: U+FFFF comes before U+10000."""
    assert canonical({"\U00010000": 1, "\uffff": 2, "a": 3, "B": 4, "é": 5}) == (
        '{"B":4,"a":3,"é":5,"\uffff":2,"\U00010000":1}'.encode()
    )


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        {"a": [0.5]},
        float("nan"),
        2**53 + 1,
        -(2**53) - 1,
        {1: 2},
        b"x",
        {"a"},
        "\ud800",
        {"\udfff": 1},
        object(),
    ],
    ids=repr,
)
def test_what_has_no_form_is_refused(value: Any) -> None:
    """Floats, large integers, foreign keys and types, and lone surrogates have no bytes."""
    with pytest.raises(InvalidDerivation):
        canonical(value)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":1}',
        b'{"x":{"a":1,"b":2,"a":3}}',
        b"1.0",
        b"1e3",
        b"NaN",
        b"[Infinity]",
        b"9007199254740993",
        b"1" * 100_000,
        b'"\\ud800"',
        b"\xff",
        b"{",
        b"",
        b"[" * 100_000,
    ],
    ids=lambda d: repr(d[:24]),
)
def test_parse_refuses(data: bytes) -> None:
    """Duplicate keys, numbers that are no integers, and damaged text are refused, in words."""
    with pytest.raises(InvalidDerivation):
        parse(data)


def test_the_place_is_named() -> None:
    """A refusal says where in the value it lies."""
    with pytest.raises(InvalidDerivation, match=r"\$\.options\[1\]"):
        canonical({"options": [1, 0.5]})


def test_too_deep_is_refused() -> None:
    """Nesting has a limit, so that hostile input is an error in words."""
    value: Any = 1
    for _ in range(100):
        value = [value]
    with pytest.raises(InvalidDerivation, match="deeper"):
        canonical(value)


def test_domains_keep_digests_apart() -> None:
    """The same value in two domains has two digests; a domain is a plain word."""
    assert digest("a", 1) != digest("b", 1)
    for domain in ("", "a\0b", "ä"):
        with pytest.raises(InvalidDerivation):
            digest(domain, 1)


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "77", "LC_ALL": "tr_TR.UTF-8"},
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
    ],
)
def test_neither_hash_seed_nor_locale_matters(env: dict[str, str]) -> None:
    """Another process with another hash seed and locale makes the same digests."""
    code = (
        "import json,sys; from mmadmin.core.canonical import digest\n"
        "for v in json.load(open(sys.argv[1], encoding='utf-8')): print(digest(v['domain'], v['value']))"
    )
    path = Path(__file__).parent / "golden" / "canonical.json"
    out = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, **env},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert out.split() == [v["digest"] for v in GOLDEN]
