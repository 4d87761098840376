"""A deployment file as a form: the fields that it may hold with their values, and back.

The text is the truth. The form is read from it and writes into it, key by key, so that comments,
order and whatever the form does not show stay as they were typed. What is wrong is said by the
parser of the file, never by the form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from mmadmin.core.catalog import DEFAULT_ENGINE, engines
from mmadmin.core.errors import InvalidSpec, MmError
from mmadmin.core.fit.rules import overrulable
from mmadmin.core.spec.spec import describe_spec, parse_spec

PREFIX = "f:"
"""Of the form's field names, so that they meet no other field of the page."""
TITLES = {
    "": "Name",
    "model": "Model",
    "engine": "Engine",
    "template": "Chat template",
    "serve": "Serving",
    "keep": "Retention",
    "activation": "Activation",
}
LONG = frozenset({"repo", "files", "package", "file", "url", "sha256", "path", "expect_sha256"})
"""Keys whose values rarely fit half the width."""
LENIENT = "reasoning-effort-lenient"
PATCH = "template.patches." + LENIENT
OVERRULE = "activation.overrule."
"""And a rule's name: why its warning does not hold here."""
FILE_ONLY = frozenset({"mapping", "tables"})
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
WHOLE = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class FormField:
    """One field as the form shows it."""

    key: str
    """Dotted: `serve.context`."""
    label: str
    kind: str
    help: str
    value: str
    choices: tuple[tuple[str, str], ...]
    placeholder: str
    unit: str
    required: bool
    selects: bool
    """True when the choice decides which other fields make sense."""

    @property
    def name(self) -> str:
        """Its name in the request."""
        return PREFIX + self.key

    @property
    def wide(self) -> bool:
        """True for what needs the whole width: long texts, names of repositories and files."""
        return self.kind in {"text", "overrule"} or self.key.rpartition(".")[2] in LONG

    @property
    def html_id(self) -> str:
        """Its id in the page."""
        return "f-" + self.key.replace(".", "-")


@dataclass(frozen=True, slots=True)
class FormSection:
    """A table of the file."""

    name: str
    title: str
    help: str
    fields: tuple[FormField, ...]
    more: tuple[FormField, ...]


def read(text: str) -> MutableMapping[str, Any]:
    """The text as a document that keeps its form. Raises `InvalidSpec` where it is not TOML."""
    try:
        return tomlkit.parse(text)
    except (TOMLKitError, ValueError) as error:
        fact = str(error).replace("'\\x00'", "the end of the file")
        line = getattr(error, "line", None)
        remedy = f"fix line {line}" if line else "fix the syntax"
        raise InvalidSpec(f"invalid TOML: {fact}", remedy=remedy) from error
    except RecursionError as error:
        raise InvalidSpec("the file is nested too deeply", remedy="reduce the nesting") from error


def sources(text: str) -> dict[str, str]:
    """Each table's `source`: which fields make sense hangs on them."""
    return {
        name: str(table["source"])
        for name, table in read(text).items()
        if isinstance(table, Mapping) and "source" in table
    }


def problem(text: str) -> MmError | None:
    """What is wrong with the file first, or None."""
    try:
        parse_spec(text)
    except MmError as error:
        return error
    return None


def sections(text: str, warnings: Mapping[str, str] | None = None) -> list[FormSection]:
    """The form of a file. Raises `InvalidSpec` where it is not TOML.

    `warnings`: rule → its message with this deployment's figures, for warnings that it was given.
    """
    document = read(text)
    made = []
    kind = _engine_of(document)
    for section in _described(kind):
        name = str(section["name"])
        table = _table(document, name)
        shown = [_field(name, field, table) for field in _for_source(section, table)]
        if name == "template":
            shown.append(_patch(table))
        if name == "activation":
            shown += _overrules(kind, table, warnings or {})
        seldom = {f["name"] for f in section["fields"] if name == "serve" and not f.get("often")}
        often = [f for f in shown if f.key.partition(".")[2] not in seldom]
        made.append(
            FormSection(
                name=name,
                title=TITLES.get(name, name.capitalize()),
                help=str(section["help"]),
                fields=tuple(often),
                more=tuple(f for f in shown if f not in often),
            )
        )
    return made


def write(text: str, values: Mapping[str, str]) -> str:
    """The text with the form's values in it; untouched where a value is as it was."""
    document = read(text)
    on_top: dict[str, Any] = {}
    for section in _described(_engine_of(document)):
        name = str(section["name"])
        before = _table(document, name)
        changes: dict[str, Any] = {}
        for field in section["fields"]:
            key = PREFIX + _dotted(name, str(field["name"]))
            if key in values and values[key].strip() != _text(before.get(field["name"])):
                changes[str(field["name"])] = _value(field, values[key].strip())
        if not name:
            on_top = {k: v for k, v in changes.items() if k not in document and v is not None}
            changes = {k: v for k, v in changes.items() if k not in on_top}
        _apply(document, name, changes)
        _drop_foreign(section, _table(document, name))
    _set_overrules(document, values)
    if PREFIX + PATCH in values:
        _set_patch(document, on=values[PREFIX + PATCH] == "true")
    return _with_top_keys(tomlkit.dumps(document), on_top)


def _engine_of(document: Mapping[str, Any]) -> str:
    """The engine that the file names, where it is known; else the one of a file that names none."""
    table = document.get("engine")
    kind = table.get("kind") if isinstance(table, Mapping) else None
    return str(kind) if kind in engines() else DEFAULT_ENGINE


def _described(engine_kind: str) -> Iterator[dict[str, Any]]:
    described: Any = describe_spec(engine_kind)
    yield from described["sections"]


def _dotted(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _table(document: MutableMapping[str, Any], name: str) -> MutableMapping[str, Any]:
    table = document.get(name, {}) if name else document
    return table if isinstance(table, MutableMapping) else {}


def _for_source(section: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields that make sense for the table's `source`; the rest would be refused."""
    default = next((f["default"] for f in section["fields"] if f["name"] == "source"), None)
    source = table.get("source", default)
    for field in section["fields"]:
        wanted = field.get("only_for")
        if field["kind"] not in FILE_ONLY and (not wanted or source in wanted):
            yield field


def _field(section: str, field: Mapping[str, Any], table: Mapping[str, Any]) -> FormField:
    kind = str(field["kind"])
    choices = [(str(c), str(c)) for c in field.get("choices", ()) if c != ""]
    if kind == "boolean":
        choices = [("true", "yes"), ("false", "no")]
    default = _text(field["default"])
    if choices and kind in {"choice", "boolean"}:
        unset = dict(choices).get(default, default)
        choices.insert(0, ("", f"Default ({unset})" if unset else "Not set"))
    example = _text(field.get("example"))
    return FormField(
        key=_dotted(section, str(field["name"])),
        label=str(field.get("label") or str(field["name"]).replace("_", " ").capitalize()),
        kind=kind,
        help=str(field["help"]),
        value=_text(table.get(field["name"])),
        choices=tuple(choices) if kind in {"choice", "boolean"} else (),
        placeholder=default or (f"e.g. {example}" if example else ""),
        unit=str(field.get("unit", "")),
        required=bool(field["required"]),
        selects=field["name"] == "source",
    )


def _patch(table: Mapping[str, Any]) -> FormField:
    patches = table.get("patches", [])
    on = any(isinstance(p, Mapping) and p.get("kind") == LENIENT for p in patches)
    return FormField(
        key=PATCH,
        label="Accept every reasoning effort",
        kind="patch",
        help="Some templates accept only a few values of reasoning_effort. With this patch,"
        " missing and unknown values mean “high”; “none” still disables reasoning.",
        value="true" if on else "",
        choices=(("", "no"), ("true", "yes")),
        placeholder="",
        unit="",
        required=False,
        selects=False,
    )


def _overrules(
    engine_kind: str, table: Mapping[str, Any], warnings: Mapping[str, str]
) -> Iterator[FormField]:
    """A field for each warning of the engine: the reason why it does not hold here."""
    reasons = table.get("overrule", {})
    reasons = reasons if isinstance(reasons, Mapping) else {}
    for rule in overrulable(engine_kind):
        message = warnings.get(rule.name) or f"Where {rule.about}"
        yield FormField(
            key=OVERRULE + rule.name,
            label=f"Override “{rule.name.replace('-', ' ')}”",
            kind="overrule",
            help=f"{message[0].upper()}{message[1:]}: {rule.remedy}. A reason here overrides the"
            " warning and is kept with the generation.",
            value=_text(reasons.get(rule.name)),
            choices=(),
            placeholder="warned in an earlier run: explain why it does not apply"
            if rule.name in warnings
            else "",
            unit="",
            required=False,
            selects=False,
        )


def _text(value: Any) -> str:
    """A value as a person types it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    return str(value)


def _value(field: Mapping[str, Any], text: str) -> Any:
    """What is written for a text; None removes the key. Nonsense is kept for the parser to name."""
    if text == "":
        return None
    kind = field["kind"]
    if kind == "boolean":
        return text == "true" if text in {"true", "false"} else text
    if kind == "integer":
        return int(text) if WHOLE.fullmatch(text) else text
    if kind == "decimal":
        return tomlkit.value(text) if NUMBER.fullmatch(text) else text
    if kind in {"strings", "integers", "decimals"}:
        items = [item.strip() for item in re.split(r"[,\n]", text) if item.strip()]
        plain = kind == "strings"
        return [i if plain or not NUMBER.fullmatch(i) else tomlkit.value(i) for i in items]
    return tomlkit.string(text, multiline=True) if "\n" in text else text


def _apply(document: MutableMapping[str, Any], name: str, changes: Mapping[str, Any]) -> None:
    if not changes:
        return
    if name and name not in document:
        if all(value is None for value in changes.values()):
            return
        document[name] = tomlkit.table()
    table = _table(document, name)
    for key, value in changes.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value


def _with_top_keys(text: str, keys: Mapping[str, Any]) -> str:
    """Keys of no table stand before the first table, or they would belong to the last."""
    lines = text.split("\n")
    first = next((n for n, line in enumerate(lines) if line.startswith("[")), len(lines))
    while first and not lines[first - 1].strip():
        first -= 1
    while first and lines[first - 1].startswith("#"):
        first -= 1  # the comment of the first table
    made = [f"{key} = {tomlkit.item(value).as_string()}" for key, value in keys.items()]
    return "\n".join([*lines[:first], *made, *lines[first:]])


def _drop_foreign(section: Mapping[str, Any], table: MutableMapping[str, Any]) -> None:
    """Keys that belong to another `source` than the chosen one go, when a source is chosen."""
    source = table.get("source")
    if source is None:
        return
    for field in section["fields"]:
        wanted = field.get("only_for")
        if wanted and source not in wanted:
            table.pop(field["name"], None)


def _set_overrules(document: MutableMapping[str, Any], values: Mapping[str, str]) -> None:
    """Write, change or remove each reason that is not as it was; an emptied table goes."""
    for rule in overrulable(_engine_of(document)):
        reason = values.get(PREFIX + OVERRULE + rule.name)
        reasons = _table(_table(document, "activation"), "overrule")
        if reason is None or reason.strip() == _text(reasons.get(rule.name)):
            continue
        if reason.strip():
            _overrule(document, rule.name, reason.strip())
        elif rule.name in reasons:
            del reasons[rule.name]
            if not reasons:
                del document["activation"]["overrule"]
            if not document["activation"]:
                del document["activation"]


def _overrule(document: MutableMapping[str, Any], rule: str, reason: str) -> None:
    if "activation" not in document:
        document["activation"] = tomlkit.table(is_super_table=True)
    activation = document["activation"]
    if not isinstance(activation, MutableMapping):
        return  # the parser names it
    if not isinstance(activation.get("overrule"), MutableMapping):
        activation["overrule"] = tomlkit.table()
    activation["overrule"][rule] = reason


def _set_patch(document: MutableMapping[str, Any], *, on: bool) -> None:
    table = _table(document, "template")
    patches = table.get("patches", [])
    has = any(p.get("kind") == LENIENT for p in patches)
    if on == has:
        return
    if on:
        if "template" not in document:
            document["template"] = tomlkit.table()
        table = document["template"]
        if "patches" not in table:
            table["patches"] = tomlkit.aot()
        patch = tomlkit.table()
        patch["kind"] = LENIENT
        table["patches"].append(patch)
        return
    for index, patch in enumerate(list(patches)):
        if patch.get("kind") == LENIENT:
            del patches[index]
            break
    if not len(patches):
        table.pop("patches", None)
