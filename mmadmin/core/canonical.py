r"""Canonical JSON: one value, one byte string, one digest, on every machine and Python.

The form: UTF-8, object keys sorted by code point, no whitespace, no floats, integers of at most
2^53 in magnitude, no lone surrogates. Strings are taken as they are (no Unicode normalisation);
only `"`, `\\` and the control characters below U+0020 are escaped. Every digest of a derivation,
a resolved key or an object is made here; `tests/core/golden/canonical.json` pins the form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidDerivation

MAX_INTEGER = 2**53
MAX_DEPTH = 64
"""Deepest nesting; keeps hostile input away from the interpreter's recursion limit."""


def canonical(value: Any) -> bytes:
    """The canonical bytes of a JSON value; mappings and tuples count as objects and arrays.

    Raises `InvalidDerivation` for what has no canonical form, naming where it lies.
    """
    return json.dumps(
        _plain(value, None, 0),
        ensure_ascii=False,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    ).encode("utf-8")


def digest(domain: str, value: Any) -> str:
    """Hex sha256 over the domain, a zero byte and the canonical bytes.

    The domain keeps digests of different kinds of things apart (`mmadmin-drv-v1`, …).
    """
    if not domain or not domain.isascii() or "\0" in domain:
        raise InvalidDerivation(
            f"{domain!r} is not a valid digest domain", remedy="use a short ASCII word"
        )
    return hashlib.sha256(domain.encode("ascii") + b"\0" + canonical(value)).hexdigest()


def parse(data: bytes) -> Json:
    """The value of some JSON text; refuses what `canonical` refuses, and duplicate keys.

    The text need not be in canonical form itself.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidDerivation(f"not UTF-8 (byte {error.start})") from error
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object_once,
            parse_float=_no_float,
            parse_int=_integer,
            parse_constant=_no_float,
        )
    except json.JSONDecodeError as error:
        raise InvalidDerivation(f"not JSON: {error.msg} (character {error.pos})") from error
    except RecursionError as error:
        raise InvalidDerivation(f"nested deeper than {MAX_DEPTH} levels") from error
    return _plain(value, None, 0)


Place = tuple["Place", str | int] | None
"""Where a value lies, innermost last; put into words only when something is wrong there."""


def _plain(value: Any, place: Place, depth: int) -> Json:
    """A copy made of dict, list, str, int, bool and None only."""
    if depth > MAX_DEPTH:
        raise InvalidDerivation(f"nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _check_text(value, place)
    if isinstance(value, int):
        return _check_integer(int(value), place)
    if isinstance(value, Mapping):
        return {
            _check_key(key, place): _plain(item, (place, key), depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, (place, i), depth + 1) for i, item in enumerate(value)]
    remedy = ""
    if isinstance(value, float):
        remedy = "write it as an integer in a smaller unit, or as text"
    raise InvalidDerivation(
        f"{_words(place)} is a {type(value).__name__}, which has no canonical form", remedy=remedy
    )


def _words(place: Place) -> str:
    if place is None:
        return "$"
    outer, key = place
    return _words(outer) + (f"[{key}]" if isinstance(key, int) else f".{key}")


def _check_integer(value: int, place: Place) -> int:
    if abs(value) > MAX_INTEGER:
        raise InvalidDerivation(
            f"{_words(place)} is an integer beyond 2^53", remedy="write it as text"
        )
    return value


def _check_text(value: str, place: Place) -> str:
    if value.isascii():
        return str(value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidDerivation(
            f"{_words(place)} holds a lone surrogate, which is not text"
        ) from error
    return str(value)


def _check_key(key: object, place: Place) -> str:
    if not isinstance(key, str):
        raise InvalidDerivation(f"{_words(place)} has a key that is not text: {key!r}")
    return _check_text(key, (place, "(a key)"))


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidDerivation(f"the key {key!r} is there twice")
        found[key] = value
    return found


def _no_float(text: str) -> Json:
    raise InvalidDerivation(
        f"the number {text} is not an integer",
        remedy="write it as an integer in a smaller unit, or as text",
    )


def _integer(text: str) -> int:
    digits = text.lstrip("-")
    if len(digits) > len(str(MAX_INTEGER)):  # int() of a million digits takes minutes
        raise InvalidDerivation("an integer is beyond 2^53", remedy="write it as text")
    return int(text)
