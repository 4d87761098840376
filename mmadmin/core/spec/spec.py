"""The spec: what an operator asks for, as a TOML document.

`parse_spec` turns the text into frozen dataclasses and refuses what it does not know; every
refusal is an `InvalidSpec` that names the field and the remedy. The tables of fields below are
the one description: the parser, the docs and the panel's form read them (`describe_spec`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, cast

from mmadmin.core.build.recipe import Json
from mmadmin.core.catalog import DEFAULT_ENGINE, engines
from mmadmin.core.chat_templates.patches import check_patches
from mmadmin.core.engines.protocol import Engine, Options
from mmadmin.core.errors import InvalidDerivation, InvalidInput, InvalidSpec
from mmadmin.core.fit.rules import check_overruled
from mmadmin.core.spec.fields import (
    Field,
    Refusals,
    read_table,
    refuse,
    refuse_unknown,
    suggestion,
    tuples,
)
from mmadmin.core.spec.tables import (
    PATCH_FIELDS,
    PATCH_KIND,
    PATCH_KINDS,
    SECTION_HELP,
    TOP_FIELDS,
    sections_of,
)


@dataclass(frozen=True, slots=True)
class TemplateSpec:
    """`[template]`: which chat template, and its patches as data."""

    source: str = "model"
    file: str = ""
    text: str = ""
    expect_sha256: str = ""
    patches: tuple[Mapping[str, Json], ...] = ()

    @property
    def is_own(self) -> bool:
        """True when the engine is given a template file instead of the model's own."""
        return self.source != "model" or bool(self.patches)


@dataclass(frozen=True, slots=True)
class KeepSpec:
    """`[keep]`: which past generations stay in the store."""

    generations: int = 5
    days: int = 30


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """`[activation]`: how a generation goes live, and back."""

    mode: str = "auto"
    auto_rollback: bool = True
    watch_window_s: int = 600
    stall_s: int = 300
    drain_timeout_s: int = 300
    hold_s: int = 180
    load_deadline_s: int = 0
    required_probes: tuple[str, ...] = ()
    speed_floor_percent: int = 0
    overrule: Mapping[str, str] = field(default_factory=dict)
    """Rule → the operator's reason."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole deployment file."""

    name: str
    public_name: str
    engine_kind: str
    engine: Any
    """`[engine]` as that engine types it; `model` and `serve` likewise."""
    model: Any
    serve: Options
    tables: Mapping[str, Mapping[str, Json]] = field(compare=False)
    """The values that each table sets, as they were written: what manifests are made of."""
    template: TemplateSpec = TemplateSpec()
    keep: KeepSpec = KeepSpec()
    activation: ActivationSpec = ActivationSpec()
    description: str = ""
    host: str = ""
    devices: tuple[int, ...] = ()
    """The GPUs that it gets; empty = placement chooses."""


REQUIRED = {
    "model": "write [model] with its source",
    "engine": "write [engine] with its package",
}
"""The tables that every file has, and what to do about one that is missing."""
SPEC_CHARACTERS = 256 * 1024
"""Longest deployment file; reading one takes time that grows with it."""


def parse_spec(text: str) -> Spec:
    """Read a deployment file. Raises `InvalidSpec` with `details["field"]`."""
    if len(text) > SPEC_CHARACTERS:
        raise InvalidSpec(
            f"the deployment file has {len(text)} characters",
            remedy=f"no deployment needs more than {SPEC_CHARACTERS}",
            field="",
        )
    try:
        document = tomllib.loads(text, parse_float=Decimal)
    except ValueError as error:  # TOML's own, and int() refuses thousands of digits
        raise InvalidSpec(
            f"invalid TOML: {error}",
            remedy="fix that line",
            field="",
        ) from error
    except RecursionError as error:
        raise InvalidSpec(
            "the deployment file is nested too deeply",
            remedy="write its lists and tables as the documentation shows them",
            field="",
        ) from error
    return spec_from_document(document)


def spec_from_document(document: Mapping[str, Any]) -> Spec:
    """A spec from a TOML document that was read already (decimals as `Decimal`)."""
    engine = _engine(_kind_of(document))
    sections = sections_of(engine)
    scalars = {k: v for k, v in document.items() if k not in sections}
    refusals = Refusals()
    known = [f.name for f in TOP_FIELDS]
    with refusals.gathering():
        refuse_unknown(scalars, [*known, *filter(None, sections)], "")
    scalars = {name: scalars[name] for name in known if name in scalars}
    top = read_table(TOP_FIELDS, scalars, "", refusals=refusals)
    tables = {"": top}
    for section, fields in sections.items():
        if not section:
            continue
        selector = "source" if any(f.name == "source" for f in fields) else ""
        table = document.get(section, {})
        with refusals.gathering(incomplete=True):
            if section in REQUIRED and section not in document:
                refuse(section, "this table is missing", remedy=REQUIRED[section])
            tables[section] = read_table(
                fields, table, section, selector=selector, refusals=refusals
            )
    if refusals.incomplete:
        refusals.raise_found()
    with refusals.gathering():
        template = _template(tables["template"])
        if template.patches:
            tables["template"]["patches"] = [dict(patch) for patch in template.patches]
        read = engine.read(tables, own_template=template.is_own)
    refusals.raise_found()
    spec = Spec(
        name=str(top["name"]),
        public_name=str(top.get("public_name") or top["name"]),
        description=str(top.get("description", "")),
        host=str(top.get("host", "")),
        devices=_devices(top),
        engine_kind=engine.kind,
        engine=read.engine,
        model=read.model,
        serve=read.serve,
        template=template,
        keep=KeepSpec(**cast("Any", tables["keep"])),
        activation=ActivationSpec(**tuples(tables["activation"])),
        tables=tables,
    )
    _check_overrule(spec.activation.overrule)
    return spec


def _devices(top: Mapping[str, Json]) -> tuple[int, ...]:
    given = cast("list[int] | None", top.get("devices"))
    if given is not None and (not given or len(set(given)) != len(given)):
        refuse(
            "devices",
            "each GPU is named once, and at least one is",
            remedy="write for example devices = [0, 1], or leave it out",
        )
    return tuple(given or ())


def _kind_of(document: Mapping[str, Any]) -> str:
    """The engine that the file names, which says what its tables may hold."""
    table = document.get("engine")
    if not isinstance(table, Mapping):
        return DEFAULT_ENGINE
    kind = table.get("kind", DEFAULT_ENGINE)
    return kind if isinstance(kind, str) else DEFAULT_ENGINE  # read_table says what is wrong


def _check_overrule(reasons: Mapping[str, Any]) -> None:
    for name, reason in reasons.items():
        try:
            check_overruled({name: reason if isinstance(reason, str) else ""})
        except InvalidInput as error:
            refuse(f"activation.overrule.{name}", error.message, remedy=error.remedy)


def _engine(kind: str) -> Engine:
    known = engines()
    if kind not in known:
        refuse("engine.kind", f'"{kind}" is not an engine', remedy=suggestion(kind, known))
    return known[kind]


def _template(values: Mapping[str, Json]) -> TemplateSpec:
    patches: list[Mapping[str, Json]] = []
    for n, raw in enumerate(cast("Sequence[Mapping[str, Json]]", values.get("patches", []))):
        where = f"template.patches[{n}]"
        kind = raw.get("kind")
        if kind is None:
            refuse(
                f"{where}.kind", "this field is missing", remedy=f"one of {', '.join(PATCH_KINDS)}"
            )
        if kind not in PATCH_FIELDS:
            refuse(
                f"{where}.kind", f'"{kind}" is unknown', remedy=suggestion(str(kind), PATCH_KINDS)
            )
        patch = read_table((PATCH_KIND, *PATCH_FIELDS[str(kind)]), raw, where)
        try:
            check_patches([patch], where)
        except InvalidDerivation as error:
            # It counts the list that it was given; ours is longer.
            message = error.message.replace(f"{where}[0]", where)
            raise InvalidSpec(message, remedy=error.remedy, field=where) from error
        patches.append(patch)
    return TemplateSpec(**{**tuples(values), "patches": tuple(patches)})


def spec_as_document(spec: Spec) -> dict[str, Any]:
    """The spec as plain tables: only what differs from the defaults; decimals as `Decimal`."""
    document: dict[str, Any] = {}
    for section, fields in sections_of(_engine(spec.engine_kind)).items():
        table = _plain(fields, spec.tables[section], whole=section == "serve")
        if not section:
            document |= {k: v for k, v in table.items() if (k, v) != ("public_name", spec.name)}
        elif table or section in REQUIRED:
            document[section] = table
    return document


def _plain(fields: Sequence[Field], values: Mapping[str, Json], *, whole: bool) -> dict[str, Any]:
    """The values of one table, as TOML has them; without `whole`, defaults are left out."""
    return {
        field.name: _toml_value(field, values[field.name])
        for field in fields
        if field.name in values
        and (whole or field.required or not _is_default(field, values[field.name]))
    }


def _is_default(field: Field, value: Json) -> bool:
    return value == field.default or (value in ("", [], {}) and not field.default)


def _toml_value(spec_field: Field, value: Any) -> Any:
    if spec_field.kind == "decimal":
        return Decimal(value)
    if spec_field.kind == "decimals":
        return [Decimal(v) for v in value]
    return value


def describe_spec(engine_kind: str = DEFAULT_ENGINE) -> dict[str, Json]:
    """Every section and field with help and default, as data: for forms, docs and the API."""
    tables = sections_of(_engine(engine_kind))
    patches: dict[str, Json] = {
        kind: [f.as_json() for f in fields] for kind, fields in PATCH_FIELDS.items()
    }
    return {
        "engine_kind": engine_kind,
        "engine_kinds": cast("list[Json]", sorted(engines())),
        "sections": [
            {
                "name": section,
                "help": SECTION_HELP[section],
                "fields": [f.as_json() for f in tables[section]],
            }
            for section in tables
        ],
        "patches": patches,
    }
