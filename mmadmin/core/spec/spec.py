"""The spec: what an operator asks for, as a TOML document.

`parse_spec` turns the text into frozen dataclasses and refuses what it does not know; every
refusal is an `InvalidSpec` that names the field and the remedy. The tables of fields below are
the one description: the parser, the docs and the panel's form read them (`describe_spec`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, cast

import tomlkit

from mmadmin.core.build.params import CMAKE_VALUE, CMAKE_VALUE_TAKES
from mmadmin.core.build.recipe import Json
from mmadmin.core.catalog import engines
from mmadmin.core.chat_templates.patches import check_patches
from mmadmin.core.engines.protocol import Engine, Options
from mmadmin.core.errors import InvalidDerivation, InvalidInput, InvalidSpec
from mmadmin.core.fit.rules import check_overruled
from mmadmin.core.spec.fields import Field, read_table, refuse, refuse_unknown, suggestion
from mmadmin.core.spec.tables import (
    ACTIVATION_FIELDS,
    ENGINE_FIELDS,
    KEEP_FIELDS,
    MODEL_FIELDS,
    PATCH_FIELDS,
    PATCH_KIND,
    PATCH_KINDS,
    SECTION_HELP,
    SECTION_ORDER,
    SECTIONS,
    TEMPLATE_FIELDS,
    TOP_FIELDS,
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """`[model]`: which model, from where, and what is done to it."""

    source: str
    repo: str = ""
    revision: str = "main"
    quant: str = ""
    files: tuple[str, ...] = ()
    package: str = ""
    file: str = ""
    url: str = ""
    sha256: str = ""
    path: str = ""
    merge: bool = True
    quantize: str = ""
    mmproj: str = ""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`[engine]`: which engine, from which source, built how."""

    kind: str = "llama-server"
    source: str = "index"
    package: str = ""
    url: str = ""
    sha256: str = ""
    path: str = ""
    subtree: str = "*/llama.cpp"
    prebuilt: bool = False
    licences: tuple[str, ...] = ()
    backend: str = "auto"
    cuda_architectures: tuple[int, ...] = ()
    native: bool = True
    defines: Mapping[str, Json] = field(default_factory=dict)


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
    model: ModelSpec
    engine: EngineSpec
    serve: Options
    """How it is served, as the engine reads `[serve]`."""
    tables: Mapping[str, Mapping[str, Json]] = field(compare=False)
    """The values that each table sets, as they were written: what manifests are made of."""
    template: TemplateSpec = TemplateSpec()
    keep: KeepSpec = KeepSpec()
    activation: ActivationSpec = ActivationSpec()
    description: str = ""
    host: str = ""
    devices: tuple[int, ...] = ()
    """The GPUs that it gets; empty = placement chooses."""


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
    tables = [section for section in SECTION_ORDER if section]
    scalars = {k: v for k, v in document.items() if k not in tables}
    refuse_unknown(scalars, [*(f.name for f in TOP_FIELDS), *tables], "")
    top = read_table(TOP_FIELDS, scalars, "")
    if "model" not in document:
        refuse("model", "this table is missing", remedy="write [model] with its source")
    if "engine" not in document:
        refuse("engine", "this table is missing", remedy="write [engine] with its package")
    values: dict[str, dict[str, Json]] = {"": top}
    for section in ("engine", "model", "template"):
        table = document.get(section, {})
        values[section] = read_table(SECTIONS[section], table, section, selector="source")
    for section in ("keep", "activation"):
        values[section] = read_table(SECTIONS[section], document.get(section, {}), section)
    engine = _engine(str(values["engine"].get("kind", "llama-server")))
    values["serve"] = read_table(engine.fields, document.get("serve", {}), "serve")
    serve = engine.read_options(values["serve"])
    template = _template(values["template"])
    engine.check(serve, own_template=template.is_own)
    spec = Spec(
        name=str(top["name"]),
        public_name=str(top.get("public_name") or top["name"]),
        description=str(top.get("description", "")),
        host=str(top.get("host", "")),
        devices=_devices(top),
        model=_model(values["model"]),
        engine=EngineSpec(**_tuples(values["engine"])),
        template=template,
        serve=serve,
        keep=KeepSpec(**cast("Any", values["keep"])),
        activation=ActivationSpec(**_tuples(values["activation"])),
        tables=values,
    )
    _check_engine(spec)
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


def _check_overrule(reasons: Mapping[str, Any]) -> None:
    for name, reason in reasons.items():
        try:
            check_overruled({name: reason if isinstance(reason, str) else ""})
        except InvalidInput as error:
            refuse(f"activation.overrule.{name}", error.message, remedy=error.remedy)


def _tuples(values: Mapping[str, Json]) -> dict[str, Any]:
    """Lists as tuples, for the frozen dataclasses."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def _engine(kind: str) -> Engine:
    known = engines()
    if kind not in known:
        refuse("engine.kind", f'"{kind}" is not an engine', remedy=suggestion(kind, known))
    return known[kind]


def _model(values: Mapping[str, Json]) -> ModelSpec:
    model = ModelSpec(**_tuples(values))
    if model.source == "hub":
        if bool(model.quant) == bool(model.files):
            refuse(
                "model.quant",
                "give either a quant or the list of files, not both and not neither",
                remedy='for example quant = "Q4_K_M"',
            )
        for n, name in enumerate(model.files):
            if not name.endswith(".gguf"):
                refuse(
                    f"model.files[{n}]", f'"{name}" is not a GGUF file', remedy="name .gguf files"
                )
    if model.source == "path" and model.mmproj and not model.mmproj.startswith("/"):
        refuse("model.mmproj", "this must be an absolute path here", remedy="write /…/mmproj.gguf")
    if model.source in ("hub", "index") and model.mmproj.startswith("/"):
        refuse(
            "model.mmproj",
            "an absolute path makes no sense here",
            remedy="write a path inside the repository or package",
        )
    return model


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
    return TemplateSpec(**{**_tuples(values), "patches": tuple(patches)})


_DEFINE = re.compile(r"[A-Z][A-Z0-9_]*")
_OURS = (
    "CMAKE_CUDA_ARCHITECTURES",
    "CMAKE_BUILD_TYPE",
    "GGML_CUDA",
    "GGML_NATIVE",
    "BUILD_SHARED_LIBS",
)


def _check_engine(spec: Spec) -> None:
    """What the tables alone cannot say about `[engine]`."""
    for key, value in spec.engine.defines.items():
        dotted = f"engine.defines.{key}"
        if not _DEFINE.fullmatch(key):
            refuse(
                dotted, "this is not a CMake variable", remedy="write upper case letters, digits, _"
            )
        if key in _OURS:
            refuse(
                dotted,
                "mmadmin sets this one itself",
                remedy="use engine.backend, engine.native or engine.cuda_architectures",
            )
        if isinstance(value, list | dict):
            refuse(dotted, "this must be one value", remedy="write text, a number, true or false")
        if not CMAKE_VALUE.fullmatch(str(value)):
            refuse(
                dotted,
                f"CMake cannot be given {str(value)!r}",
                remedy=f"write {CMAKE_VALUE_TAKES}",
            )
    if spec.engine.prebuilt and spec.model.quantize:
        refuse(
            "model.quantize",
            "a prebuilt engine has no tool to quantize with",
            remedy="build the engine from source, or use a model that is quantized already",
        )
    if spec.engine.licences and not spec.engine.prebuilt:
        refuse(
            "engine.licences",
            "this makes no sense with an engine that is built",
            remedy="remove it, or set engine.prebuilt = true",
        )
    if spec.engine.cuda_architectures and spec.engine.backend == "cpu":
        refuse(
            "engine.cuda_architectures",
            'this makes no sense with backend = "cpu"',
            remedy='remove it, or set engine.backend to "cuda"',
        )


def spec_as_document(spec: Spec) -> dict[str, Any]:
    """The spec as plain tables: only what differs from the defaults; decimals as `Decimal`."""
    engine = _engine(spec.engine.kind)
    parts: dict[str, tuple[Sequence[Field], Any]] = {
        "model": (MODEL_FIELDS, spec.model),
        "engine": (ENGINE_FIELDS, spec.engine),
        "template": (TEMPLATE_FIELDS, spec.template),
        "serve": (engine.fields, spec.tables["serve"]),
        "keep": (KEEP_FIELDS, spec.keep),
        "activation": (ACTIVATION_FIELDS, spec.activation),
    }
    document = _plain(TOP_FIELDS, spec)
    if document.get("public_name") == spec.name:
        del document["public_name"]
    for section, (fields, values) in parts.items():
        table = _plain(fields, values)
        if table or section in ("model", "engine"):
            document[section] = table
    return document


def _plain(fields: Sequence[Field], values: Any) -> dict[str, Any]:
    """The values of one table that differ from their defaults."""
    table: dict[str, Any] = {}
    for spec_field in fields:
        if isinstance(values, Mapping):
            if spec_field.name not in values:
                continue
            value = values[spec_field.name]
        else:
            value = getattr(values, spec_field.name)
            value = list(value) if isinstance(value, tuple) else value
            unset = value in ("", [], {}) and not spec_field.default
            if not spec_field.required and (unset or value == spec_field.default):
                continue
            if spec_field.only_for and values.source not in spec_field.only_for:
                continue
        table[spec_field.name] = _toml_value(spec_field, value)
    return table


def _toml_value(spec_field: Field, value: Any) -> Any:
    if spec_field.kind == "decimal":
        return Decimal(value)
    if spec_field.kind == "decimals":
        return [Decimal(v) for v in value]
    return value


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


def describe_spec(engine_kind: str = "llama-server") -> dict[str, Json]:
    """Every section and field with help and default, as data: for forms, docs and the API."""
    tables: dict[str, Sequence[Field]] = {**SECTIONS, "serve": _engine(engine_kind).fields}
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
            for section in SECTION_ORDER
        ],
        "patches": patches,
    }
