"""A parsed spec as a deployment file again: what `parse_spec` must read back to the same."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import tomlkit

from mmadmin.core.spec.spec import Spec, spec_as_document


def spec_to_toml(spec: Spec) -> str:
    """The spec as a TOML document that `parse_spec` reads back to the same spec."""
    document = tomlkit.document()
    for key, value in spec_as_document(spec).items():
        document.add(key, _item(value))
    return tomlkit.dumps(document)


def _item(value: Any) -> Any:
    """A plain value as a TOML item; decimals and long texts in their natural form."""
    item: Any
    if isinstance(value, Decimal):
        number = format(value, "f")
        whole = value == value.to_integral_value()
        item = tomlkit.integer(number) if whole else tomlkit.float_(number)
    elif isinstance(value, str) and "\n" in value and "'''" not in value and not _odd(value):
        item = tomlkit.string(value, literal=True, multiline=True)
    elif isinstance(value, Mapping):
        item = tomlkit.table()
        for key, entry in value.items():
            item.add(key, _item(entry))
    elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
        item = tomlkit.aot()
        for entry in value:
            item.append(_item(entry))
    elif isinstance(value, list):
        item = tomlkit.array()
        item.extend([_item(v) for v in value])
    else:
        item = tomlkit.item(value)
    return item


def _odd(text: str) -> bool:
    """True when a literal string cannot hold the text as it is."""
    return not all(c.isprintable() or c in "\n\t" for c in text)
