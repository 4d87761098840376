"""The record of a generation that comes from elsewhere: each field has the type that is read later.

A bundle and an exported history are files that anybody may have written. What is taken over once
stays in the history, so a field of a wrong type is refused before anything is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmadmin.core.build.derivation import graph_from_json
from mmadmin.core.errors import InvalidInput, MmError
from mmadmin.core.spec.lock import lock_from_json
from mmadmin.core.spec.spec import parse_spec

LARGEST_SIZE = (1 << 63) - 1
"""What a database takes."""


def check_record(fields: Mapping[str, Any], where: str) -> None:
    """Raise `InvalidInput`, naming the field, unless each known field has its type."""
    for name, check in CHECKS.items():
        if name not in fields:
            continue
        try:
            check(fields[name])
        except MmError as error:
            raise _invalid(where, name, error.message) from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise _invalid(where, name, str(error)) from error


def _invalid(where: str, name: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"{where}: the field {name} is invalid: {why}",
        remedy="export it again with `mm export` or `mm history --export`",
        field=name,
    )


def _text(value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError("it must be text")


def _count(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_SIZE:
        raise TypeError("it must be a whole number, 0 or more")


def _texts(value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError("it must be a list of texts")


def _table(value: Any) -> None:
    if not isinstance(value, dict):
        raise TypeError("it must be a table")


def _renders(value: Any) -> None:
    _table(value)
    for name, render in value.items():
        known = isinstance(render, dict) and render.keys() & {"output", "error"}
        if not known or not all(isinstance(text, str) for text in render.values()):
            raise TypeError(f"{name!r} must be a table with the text of an output or error")


def _lock(value: Any) -> None:
    _table(value)
    lock_from_json(value)


def _spec(value: Any) -> None:
    _text(value)
    parse_spec(value)


def _if_known(check: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda value: None if value is None else check(value)


CHECKS: Mapping[str, Callable[[Any], object]] = {
    "name": _text,
    "number": _count,
    "author": _text,
    "reason": _text,
    "spec_toml": _spec,
    "lock": _lock,
    "graph": graph_from_json,
    "size_bytes": _count,
    "host_facts": _if_known(_table),
    "command": _if_known(_texts),
    "template": _if_known(_text),
    "rendering": _if_known(_table),
    "model_report": _if_known(_table),
    "renders": _if_known(_renders),
}
