"""Tables of fields: one description that parser, docs and forms share.

A `Field` says what a key of a deployment file may hold; `read_table` checks a TOML table against
a list of them. Every refusal is an `InvalidSpec` that names the dotted field and the remedy.
Decimals are kept as text (`"0.7"`): canonical JSON has no floats.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, NoReturn

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidSpec

Kind = Literal[
    "string",
    "text",
    "integer",
    "decimal",
    "boolean",
    "choice",
    "strings",
    "integers",
    "decimals",
    "scalar",
    "scalars",
    "mapping",
    "tables",
]
"""`scalar` is a text, a whole number, true or false; `mapping` is a table of scalars with free
keys, `tables` a list of tables, whose own fields are checked elsewhere."""

_LARGEST = 2**53
_PLACES = 20
"""Most digits after the point: `1e-999999999` written out would be a gigabyte of zeros."""
_LISTED = 60
"""Most names that a message lists."""
_SHOWN = 80
"""Most characters of a value that a message repeats."""


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a table of a deployment file."""

    name: str
    kind: Kind
    help: str
    """One or two sentences for the form and the docs."""
    default: Json = None
    """What holds when the key is absent; None = nothing is set."""
    required: bool = False
    choices: tuple[str, ...] = ()
    minimum: Decimal | int | None = None
    maximum: Decimal | int | None = None
    pattern: str = ""
    """Regular expression that a string must match wholly."""
    remedy: str = ""
    """How to write it when the pattern does not match."""
    unit: str = ""
    example: Json = None
    only_for: tuple[str, ...] = ()
    """Values of the table's selecting key (`source`) for which this field makes sense."""
    flag: str = ""
    """The engine's command-line flag, when the field is one."""
    label: str = ""
    """One or two words for the form, where the key's own would not do."""
    often: bool = False
    """True for what most deployments set; a form folds the other options of an engine away."""

    def as_json(self) -> dict[str, Json]:
        """The field as data for forms and docs; empty properties are left out."""
        low, high = self.minimum, self.maximum
        properties: dict[str, Json] = {
            "name": self.name,
            "kind": self.kind,
            "help": self.help,
            "default": self.default,
            "required": self.required,
            "choices": list(self.choices),
            "minimum": None if low is None else str(low),
            "maximum": None if high is None else str(high),
            "unit": self.unit,
            "example": self.example,
            "only_for": list(self.only_for),
            "flag": self.flag,
            "label": self.label,
            "often": self.often or None,
        }
        kept = {"name", "kind", "help", "default", "required"}
        return {k: v for k, v in properties.items() if k in kept or v not in (None, [], "")}


def tuples(values: Mapping[str, Json]) -> dict[str, Any]:
    """The values of a table with lists as tuples, for frozen dataclasses."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def refuse(field: str, message: str, *, remedy: str) -> NoReturn:
    """Raise `InvalidSpec` for a field: the one shape of a spec's refusal."""
    raise InvalidSpec(f"{field}: {message}", remedy=remedy, field=field)


class Refusals:
    """What is wrong with a file: gathered, so that one look shows all of it."""

    def __init__(self) -> None:
        self.found: list[InvalidSpec] = []
        self.incomplete = False
        """True when a known field has no value: what builds on the tables cannot be checked."""

    @contextmanager
    def gathering(self, *, incomplete: bool = False) -> Iterator[None]:
        """Keep what the block refuses; `incomplete`: its value is then missing."""
        try:
            yield
        except InvalidSpec as error:
            self.incomplete |= incomplete
            parts = error.details.get("problems") or [error.as_json()]
            self.found += [
                InvalidSpec(part["message"], remedy=part["remedy"], **part["details"])
                for part in parts
            ]

    def raise_found(self) -> None:
        """Raise the only problem as it is, several as one with `details["problems"]`."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise InvalidSpec(
                "; ".join(map(str, self.found)),
                remedy=f"correct these {len(self.found)} fields",
                field=self.found[0].details.get("field", ""),
                problems=[error.as_json() for error in self.found],
            )


def suggestion(word: str, known: Iterable[str]) -> str:
    """`did you mean "x"?`, or the list of what is known, or what is nearest in a long one."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f'did you mean "{near[0]}"?'
    if len(names) > _LISTED:
        near = sorted(difflib.get_close_matches(word, names, n=5, cutoff=0))
        return f"{len(names)} are known here; the nearest: {', '.join(near)}"
    return f"known here: {', '.join(names)}" if names else "remove it"


def refuse_unknown(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse the keys of `table` that are not known."""
    names, refusals = set(known), Refusals()
    for key in table:
        if key not in names:
            dotted = f"{where}.{key}" if where else key
            with refusals.gathering():
                refuse(dotted, "this field is unknown", remedy=suggestion(key, names))
    refusals.raise_found()


def decimal_text(value: Decimal | int) -> str:
    """The shortest plain text of a decimal: `0.70` → `0.7`, `1.0` → `1`."""
    text = format(Decimal(value), "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


def read_table(
    fields: Sequence[Field],
    table: Any,
    where: str,
    *,
    selector: str = "",
    refusals: Refusals | None = None,
) -> dict[str, Json]:
    """Check a TOML table; the values that it sets, in the order of `fields`.

    `selector` names the key whose value decides (by `only_for`) which other keys make sense.
    What is wrong goes into `refusals` where there are some, else it is raised, all together.
    """
    found = refusals or Refusals()
    if not isinstance(table, Mapping):
        refuse(where, "this must be a table", remedy=f"write [{where}]")
    by_name = {f.name: f for f in fields}
    with found.gathering():
        refuse_unknown(table, by_name, where)
    values: dict[str, Json] = {}
    for field in fields:
        dotted = f"{where}.{field.name}" if where else field.name
        with found.gathering(incomplete=True):
            if field.name in table:
                values[field.name] = _value(field, table[field.name], dotted)
            elif field.required and not field.only_for:
                refuse(dotted, "this field is missing", remedy=_how(field))
    if selector and (selector in values or selector not in table):
        refused = {name for name in by_name if name in table and name not in values}
        for field in fields:
            with found.gathering(incomplete=True):
                if field.only_for and field.name not in refused:
                    _check_selection(field, values, where, (selector, by_name[selector].default))
    if refusals is None:
        found.raise_found()
    return values


def _check_selection(
    field: Field, values: Mapping[str, Json], where: str, selector: tuple[str, Json]
) -> None:
    """Refuse a key that the selected kind does not have, and miss one that it needs."""
    name, default = selector
    chosen = values.get(name, default)
    dotted = f"{where}.{field.name}"
    if field.name in values and chosen not in field.only_for:
        wanted = " or ".join(f'"{w}"' for w in field.only_for)
        refuse(
            dotted,
            f'this makes no sense with {name} = "{chosen}"',
            remedy=f"remove it, or set {where}.{name} to {wanted}",
        )
    if field.required and chosen in field.only_for and not values.get(field.name):
        refuse(dotted, f'{name} = "{chosen}" needs it', remedy=_how(field))


def _how(field: Field) -> str:
    """How to write a field: its example, else its help."""
    if field.example is not None:
        return f"for example {field.name} = {toml_text(field.example)}"
    return field.help


def toml_text(value: Json) -> str:
    """A value as it would stand in a TOML file (for messages)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(toml_text(v) for v in value)}]"
    return str(value)


def _short(value: object) -> str:
    """A value for a message, cut when it is long."""
    if isinstance(value, int) and value.bit_length() > 8 * _SHOWN:
        return f"a number of {value.bit_length()} bits"  # str() refuses thousands of digits
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _value(field: Field, value: Any, dotted: str) -> Json:
    """Check one value against its field."""
    if field.kind in ("string", "text", "choice"):
        return _string(field, value, dotted)
    if field.kind == "boolean":
        if not isinstance(value, bool):
            refuse(dotted, "this must be true or false", remedy=_how(field))
        return value
    if field.kind in ("integer", "decimal"):
        return _number(field, value, dotted, whole=field.kind == "integer")
    if field.kind == "scalar":
        return _scalar(field, value, dotted)
    if field.kind == "mapping":
        return _mapping(field, value, dotted)
    return _list(field, value, dotted)


def _list(field: Field, value: Any, dotted: str) -> list[Json]:
    """Check each value of a list."""
    if field.kind != "tables":
        if not isinstance(value, list):
            refuse(dotted, "this must be a list", remedy=_how(field))
        if field.kind == "scalars":
            return [_scalar(field, item, f"{dotted}[{n}]") for n, item in enumerate(value)]
        if field.kind == "strings":
            return [_string(field, item, f"{dotted}[{n}]") for n, item in enumerate(value)]
        whole = field.kind == "integers"
        return [_number(field, v, f"{dotted}[{n}]", whole=whole) for n, v in enumerate(value)]
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        refuse(dotted, "this must be a list of tables", remedy=f"write [[{dotted}]]")
    return [dict(item) for item in value]


def _string(field: Field, value: Any, dotted: str) -> str:
    if not isinstance(value, str):
        refuse(dotted, "this must be a text in quotes", remedy=_how(field))
    if field.choices and value not in field.choices:
        refuse(
            dotted,
            f'"{_short(value)}" is not one of its values',
            remedy=suggestion(value, field.choices),
        )
    if field.kind != "text" and not value.isprintable():
        refuse(dotted, "control characters are not allowed here", remedy="write one plain line")
    if "\0" in value:
        refuse(dotted, "a NUL character is not allowed", remedy="remove it")
    if field.pattern and not re.fullmatch(field.pattern, value):
        refuse(
            dotted, f'"{_short(value)}" is not a valid value', remedy=field.remedy or _how(field)
        )
    return value


def _number(field: Field, value: Any, dotted: str, *, whole: bool) -> Json:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        refuse(dotted, f"this must be a {'whole ' if whole else ''}number", remedy=_how(field))
    number = Decimal(value)
    if not number.is_finite():
        refuse(dotted, "this must be a finite number", remedy=_how(field))
    _check_places(number, dotted)
    if whole and (number != number.to_integral_value() or isinstance(value, Decimal)):
        refuse(dotted, f"{_short(value)} is not a whole number", remedy=_how(field))
    low, high = field.minimum, field.maximum
    if low is not None and number < low:
        refuse(dotted, f"{_short(value)} is below {low}", remedy=f"use {low} or more")
    if high is not None and number > high:
        refuse(dotted, f"{_short(value)} is above {high}", remedy=f"use {high} or less")
    if abs(number) > _LARGEST:
        refuse(dotted, f"{_short(value)} is out of range", remedy="use a smaller number")
    return int(number) if whole else decimal_text(number)


def _check_places(number: Decimal, dotted: str) -> None:
    exponent = number.as_tuple().exponent
    if isinstance(exponent, int) and exponent < -_PLACES:
        refuse(dotted, f"this has more than {_PLACES} digits after the point", remedy="write fewer")


def _scalar(field: Field, value: Any, dotted: str) -> Json:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _string(field, value, dotted)
    if not isinstance(value, int):
        refuse(dotted, "this must be a text, a whole number, true or false", remedy=_how(field))
    return _number(field, value, dotted, whole=True)


def _mapping(field: Field, value: Any, dotted: str) -> dict[str, Json]:
    """A table with free keys: scalars and lists of scalars."""
    if not isinstance(value, Mapping):
        refuse(dotted, "this must be a table", remedy=_how(field))
    return {key: _free(item, f"{dotted}.{key}") for key, item in value.items()}


def _free(value: Any, dotted: str) -> Json:
    """A scalar or a list of scalars, decimals as text."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | Decimal):
        number = Decimal(value)
        if not number.is_finite() or abs(number) > _LARGEST:
            refuse(dotted, f"{_short(value)} is out of range", remedy="use a smaller number")
        _check_places(number, dotted)
        return value if isinstance(value, int) else decimal_text(value)
    if isinstance(value, list):
        return [_free(item, f"{dotted}[{n}]") for n, item in enumerate(value)]
    refuse(dotted, "this kind of value is not allowed", remedy="use text, numbers, true or false")
