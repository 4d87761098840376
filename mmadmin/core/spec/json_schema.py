"""The deployment file as JSON Schema (draft 7), for editors that complete and check TOML.

Made from the same tables as the parser, the docs and the form. It says what each field may hold
and which fields go with a `source`. What takes more than that (values that must fit each other, a
model that must exist) only `mm plan` checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmadmin.core.catalog import DEFAULT_ENGINE, engines
from mmadmin.core.engines.protocol import Engine
from mmadmin.core.spec.fields import Field
from mmadmin.core.spec.spec import REQUIRED
from mmadmin.core.spec.tables import (
    ENGINE_KIND,
    PATCH_FIELDS,
    PATCH_KIND,
    SECTION_HELP,
    sections_of,
)

Schema = dict[str, Any]
DRAFT = "http://json-schema.org/draft-07/schema#"
OF_ENGINE = ("engine", "model", "serve")
"""The tables whose fields the engine decides."""
_SCALAR: Schema = {"type": ["string", "integer", "boolean"]}
_FREE = ["string", "number", "boolean", "array"]
_ITEMS = {"strings": "string", "integers": "integer", "decimals": "number"}
_TYPES = {"integer": "integer", "decimal": "number", "boolean": "boolean"}


def json_schema() -> Schema:
    """The schema of a deployment file with any of the installed engines."""
    known = engines()
    sections = sections_of(known[DEFAULT_ENGINE])
    properties = {field.name: _field(field) for field in sections[""]}
    for name, fields in sections.items():
        if name and name not in OF_ENGINE:
            properties[name] = _table(name, fields)
    return {
        "$schema": DRAFT,
        "title": "mmadmin deployment file",
        "type": "object",
        "properties": properties | {name: _of_any(name, known.values()) for name in OF_ENGINE},
        "required": [f.name for f in sections[""] if f.required] + sorted(REQUIRED),
        "additionalProperties": False,
        "allOf": [_of_one(engine) for engine in known.values()],
    }


def _of_any(name: str, known: Iterable[Engine]) -> Schema:
    """A table with the keys that any engine has, which is what an editor completes."""
    properties: dict[str, Schema] = {}
    for engine in known:
        for field in sections_of(engine)[name]:
            made = _field(field)
            if properties.setdefault(field.name, made) != made:
                properties[field.name] = {"description": field.help}
    properties |= (
        {"kind": {**_field(ENGINE_KIND), "enum": sorted(engines())}} if name == "engine" else {}
    )
    return {"type": "object", "description": SECTION_HELP[name], "properties": properties}


def _of_one(engine: Engine) -> Schema:
    """What holds for the tables of one engine."""
    named: Schema = {"properties": {"kind": {"const": engine.kind}}}
    if engine.kind != DEFAULT_ENGINE:
        named["required"] = ["kind"]
    sections = sections_of(engine)
    chosen: Schema = {"properties": {"engine": named}, "required": ["engine"]}
    return {
        "if": chosen,
        "then": {"properties": {name: _table(name, sections[name]) for name in OF_ENGINE}},
    }


def _table(name: str, fields: Sequence[Field]) -> Schema:
    """One table: its fields, and which of them go with which `source`."""
    schema: Schema = {
        "type": "object",
        "description": SECTION_HELP[name],
        "properties": {field.name: _field(field) for field in fields},
        "additionalProperties": False,
    }
    required = [field.name for field in fields if field.required and not field.only_for]
    if required:
        schema["required"] = required
    source = next((field for field in fields if field.name == "source"), None)
    if source is not None:
        schema["allOf"] = [_choice(source, choice, fields) for choice in source.choices]
    return schema


def _choice(source: Field, choice: str, fields: Sequence[Field]) -> Schema:
    """What follows from one `source`."""
    chosen: Schema = {"properties": {source.name: {"const": choice}}}
    if choice != source.default:
        chosen["required"] = [source.name]
    own = [field for field in fields if field.only_for]
    then: Schema = {
        "properties": {field.name: False for field in own if choice not in field.only_for}
    }
    needed = [field.name for field in own if field.required and choice in field.only_for]
    if needed:
        then["required"] = needed
    return {"if": chosen, "then": then}


def _field(field: Field) -> Schema:
    """One key of a table."""
    unit = f" ({field.unit})" if field.unit else ""
    schema: Schema = {"description": field.help + unit, **_type(field)}
    if field.label:
        schema["title"] = field.label
    if field.default not in (None, "", [], {}):
        schema["default"] = _number(field, field.default)
    if field.example is not None:
        schema["examples"] = [_number(field, field.example)]
    return schema


def _number(field: Field, value: Any) -> Any:
    """A value as the file has it: the tables keep decimals as text."""
    return float(value) if field.kind == "decimal" else value


def _type(field: Field) -> Schema:
    if field.kind == "tables":
        return {"type": "array", "items": {"oneOf": [_patch(kind) for kind in PATCH_FIELDS]}}
    if field.kind == "mapping":
        return {"type": "object", "additionalProperties": {"type": _FREE}}
    if field.kind == "scalar":
        return dict(_SCALAR)
    if field.kind == "scalars":
        return {"type": "array", "items": dict(_SCALAR)}
    if field.kind in _ITEMS:
        return {"type": "array", "items": {"type": _ITEMS[field.kind], **_limits(field)}}
    return {"type": _TYPES.get(field.kind, "string"), **_limits(field)}


def _limits(field: Field) -> Schema:
    """What a value must keep to, beyond its type."""
    limits: Mapping[str, Any] = {
        "enum": list(field.choices),
        "minimum": field.minimum,
        "maximum": field.maximum,
        "pattern": f"^(?:{field.pattern})$" if field.pattern else "",
    }
    return {
        name: float(value) if not isinstance(value, int | str | list) else value
        for name, value in limits.items()
        if value not in (None, "", [])
    }


def _patch(kind: str) -> Schema:
    """One patch of a chat template."""
    fields = PATCH_FIELDS[kind]
    properties = {
        PATCH_KIND.name: {"const": kind},
        **{field.name: _field(field) for field in fields},
    }
    required = [PATCH_KIND.name, *(field.name for field in fields if field.required)]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
