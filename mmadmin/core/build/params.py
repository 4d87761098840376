"""Reading a recipe's params: each function names the field that is wrong, and what it wants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NoReturn

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidDerivation

Table = Mapping[str, Json]
CMAKE_VALUE = re.compile(r"[A-Za-z0-9_.,;+-]*|[A-Za-z0-9_.,:=+ -]*")
"""A word, a list of CMake, or a compiler's flags: a shell reads those, so no `;` stands in them."""
CMAKE_VALUE_TAKES = "letters, digits, spaces and _ . , : = + -, such as ON or -O2 -DNDEBUG"


def refuse(where: str, value: object, wanted: str) -> NoReturn:
    """Say what is wrong with a field."""
    raise InvalidDerivation(f"{where} is {value!r}", remedy=f"give {wanted}")


def fields(
    value: Table, where: str, *, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> None:
    """Refuse missing and unknown fields."""
    missing = [name for name in required if name not in value]
    if missing:
        raise InvalidDerivation(
            f"{where} lacks {', '.join(missing)}", remedy=f"it takes {', '.join(required)}"
        )
    unknown = sorted(set(value) - set(required) - set(optional))
    if unknown:
        raise InvalidDerivation(
            f"{where} has unknown fields: {', '.join(unknown)}",
            remedy=f"it takes {', '.join([*required, *optional])}",
        )


def table(value: Json, where: str) -> Table:
    """A JSON object."""
    if not isinstance(value, dict):
        refuse(where, value, "a table")
    return value


def text(value: Table, name: str, where: str, default: str | None = None) -> str:
    """A string; non-empty unless a default is given."""
    got = value.get(name, default)
    if not isinstance(got, str) or (not got and default is None):
        refuse(f"{where}.{name}", got, "a non-empty string" if default is None else "a string")
    return got


def number(value: Table, name: str, where: str, default: int | None = None) -> int:
    """A whole number ≥ 0."""
    got = value.get(name, default)
    if not isinstance(got, int) or isinstance(got, bool) or got < 0:
        refuse(f"{where}.{name}", got, "a whole number of at least 0")
    return got


def flag(value: Table, name: str, where: str, *, default: bool) -> bool:
    """True or false."""
    got = value.get(name, default)
    if not isinstance(got, bool):
        refuse(f"{where}.{name}", got, "true or false")
    return got


def items(value: Table, name: str, where: str) -> list[Json]:
    """A list; empty when absent."""
    got = value.get(name, [])
    if not isinstance(got, list):
        refuse(f"{where}.{name}", got, "a list")
    return got


def texts(value: Table, name: str, where: str) -> list[str]:
    """A list of non-empty strings; empty when absent."""
    got = items(value, name, where)
    for i, item in enumerate(got):
        if not isinstance(item, str) or not item:
            refuse(f"{where}.{name}[{i}]", item, "a non-empty string")
    return [str(item) for item in got]


def relative_path(value: str, where: str) -> str:
    """A relative POSIX path that stays where it is put."""
    path = PurePosixPath(value)
    clean = str(path)
    if (
        path.is_absolute()
        or clean != value
        or ".." in path.parts
        or clean == "."
        or "\\" in value
        or not value.isprintable()
    ):
        refuse(where, value, "a plain relative path")
    return value


def at_path(folder: Path, path: str) -> Path:
    """Where `path` lies below `folder`; its parent folders are made."""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def input_file(inputs: Mapping[str, Path], name: str, path: str) -> Path:
    """A file of an input object; raises `InvalidDerivation` when either is missing."""
    folder = input_folder(inputs, name)
    file = folder / relative_path(path, f"{name} file")
    if not file.is_file():
        there = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        raise InvalidDerivation(
            f"the input {name} has no file {path}",
            remedy=f"it holds {', '.join(there[:8]) or 'nothing'}",
        )
    return file


def input_folder(inputs: Mapping[str, Path], name: str) -> Path:
    """An input object's folder; raises `InvalidDerivation` when it is not given."""
    if name not in inputs:
        raise InvalidDerivation(f"the input {name} is missing", remedy="give it in `inputs`")
    return inputs[name]
