"""What changed between two generations, as rows: for people, not for patch tools.

Fields of the deployment file, pinned sources, what the model says about itself, what was built,
the engine's command, the chat template, what it renders, the probes, speed and sizes are compared
each in its own words. Paths of the store are shown by the object's name without its hash, so that
a command differs only where its meaning does; what one section tells, another does not repeat.

A row has two faces: `field`, `before` and `after` are for programs and stable; `label`, `was` and
`now` are the same for people, with units.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from mmadmin.core import catalog
from mmadmin.core.build.recipe import HubSource, Json
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import InvalidInput
from mmadmin.core.fit.placement import footprints_from_json
from mmadmin.core.generations.diff_labels import (
    MEMORY,
    NOISE_PERCENT,
    Words,
    percent,
    words_of,
)
from mmadmin.core.spec.lock import LockedFile, lock_from_json
from mmadmin.core.spec.spec import Spec, parse_spec, spec_as_document
from mmadmin.core.spec.tables import SECTION_HELP

STORE_PATH = re.compile(r"/[^\s,]*/objects/[0-9a-f]{64}-([^\s,/]+)")
SHORT = 12
CONTEXT_LINES = 3
LONG_VALUE = 160
"""Longer values are shown as lines that differ."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One thing that differs."""

    section: str
    """`spec`, `sources`, `model`, `build`, `command`, `template`, `rendering`, `probes`, `speed`
    or `size`."""
    field: str
    before: str | None
    """None = it was not there."""
    after: str | None
    """None = it is not there."""

    @property
    def label(self) -> str:
        """What differs, for people."""
        return self._words.label

    @property
    def was(self) -> str | None:
        """`before` for people."""
        return None if self.before is None else self._words.value(self.before)

    @property
    def now(self) -> str | None:
        """`after` for people; of a figure also by how much it went up or down."""
        if self.after is None:
            return None
        words = self._words.value(self.after)
        if not self._words.is_figure or self.before is None:
            return words
        more = percent(self.before, self.after)
        return f"{words} ({more:+d} %)" if more else words

    @property
    def is_long(self) -> bool:
        """True when it is better shown as lines than as two values."""
        values = (self.before or "", self.after or "")
        return any("\n" in value or len(value) > LONG_VALUE for value in values)

    def lines(self) -> list[str]:
        """A unified diff of the values, without its two lines of names."""
        before, after = (self.before or "").splitlines(), (self.after or "").splitlines()
        return list(difflib.unified_diff(before, after, lineterm="", n=CONTEXT_LINES))[2:]

    @property
    def _words(self) -> Words:
        return words_of(self.section, self.field)

    def as_json(self) -> dict[str, Json]:
        """As data for pages and the API: both faces."""
        return {
            "section": self.section,
            "field": self.field,
            "before": self.before,
            "after": self.after,
            "label": self.label,
            "was": self.was,
            "now": self.now,
        }


def written(rows: Sequence[DiffRow]) -> list[DiffRow]:
    """What a person wrote differently; where nothing, all that came out differently."""
    return [row for row in rows if row.section == "spec"] or list(rows)


def telling(rows: Sequence[DiffRow], most: int) -> list[DiffRow]:
    """The few differences that say most."""
    return written(rows)[:most]


@dataclass(frozen=True, slots=True)
class Side:
    """One generation as far as it is known; what is not known is None and compared with nothing."""

    spec_toml: str
    lock: Mapping[str, Any] | None = None
    """`lock_as_json`."""
    graph: Mapping[str, Any] | None = None
    """`graph_to_json`."""
    argv: Sequence[str] | None = None
    template: str | None = None
    """The text that it is served with; empty = it has none."""
    probes: Mapping[str, Any] | None = None
    """The probe report: `{"rows": [{"name", "state", …}], …}`."""
    model: Mapping[str, Any] | None = None
    """The report of its model, as its format writes it."""
    renders: Mapping[str, Any] | None = None
    """What its template makes of each conversation: `{name: {"output"} | {"error"}}`."""
    size_bytes: int | None = None
    """Of everything that it needs."""
    needs: Mapping[str, Any] | None = None
    """Predicted memory (`footprints_as_json`)."""


def diff(before: Side, after: Side) -> list[DiffRow]:
    """The rows in which two generations differ, in the order in which a person reads them."""
    return [
        *_spec_rows(before.spec_toml, after.spec_toml),
        *_known(_source_rows, before.lock, after.lock),
        *_model_rows(before, after),
        *_known(_build_rows, before.graph, after.graph),
        *_known(_command_rows, before.argv, after.argv),
        *_known(template_rows, before.template, after.template),
        *_known(_rendering_rows, before.renders, after.renders),
        *_known(_probe_rows, before.probes, after.probes),
        *_size_rows(before, after),
    ]


def _known(rows: Any, before: Any, after: Any) -> Iterable[DiffRow]:
    """The rows of a part that both sides know."""
    return rows(before, after) if before is not None and after is not None else ()


def _compare(
    section: str, before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[DiffRow]:
    for field in [*before, *(f for f in after if f not in before)]:
        was, now = before.get(field), after.get(field)
        if was != now:
            yield DiffRow(section, field, was, now)


def _spec_rows(before: str, after: str) -> Iterator[DiffRow]:
    if before != after:
        yield from _compare("spec", _spec_fields(before), _spec_fields(after))


@lru_cache(maxsize=256)  # a history compares each generation with its parent and with its child
def _parsed(text: str) -> Spec | None:
    """The spec; None when the text no longer parses."""
    try:
        return parse_spec(text)
    except InvalidInput:
        return None


@lru_cache(maxsize=256)
def _spec_fields(text: str) -> Mapping[str, str]:
    """Dotted field → value, in the sections' order; the text itself when it no longer parses."""
    spec = _parsed(text)
    if spec is None:
        return {"text": text}
    document = spec_as_document(spec)
    fields: dict[str, str] = {}
    for section in SECTION_HELP:
        table = document.get(section, {}) if section else document
        for key, value in table.items():
            if section or key not in SECTION_HELP:
                _flatten(f"{section}.{key}" if section else key, value, fields)
    return fields


def _flatten(name: str, value: Any, fields: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(f"{name}.{key}", item, fields)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            _flatten(f"{name}[{number}]", item, fields)
    elif isinstance(value, bool):
        fields[name] = "true" if value else "false"
    elif isinstance(value, list):
        fields[name] = ", ".join(str(item) for item in value)
    else:
        fields[name] = str(value)


def _source_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[DiffRow]:
    try:
        was, now = _sources(before), _sources(after)
    except (InvalidInput, InvalidWheelFilename):
        return  # of a later version, or damaged: the other rows still say what changed
    yield from _compare("sources", was, now)


def _sources(lock: Mapping[str, Any]) -> dict[str, str]:
    """Each pinned file by its part and path; a hub's commit once; an environment's packages."""
    fields: dict[str, str] = {}
    read = lock_from_json(lock)
    for part, files in read.pins.items():
        if part in read.interpreters:
            fields |= {f"{part} package {name}": version for name, version in _packages(files)}
            fields[f"{part} interpreter"] = read.interpreters[part]
            continue
        for file in files:
            if isinstance(file.source, HubSource):
                fields[f"{part} commit"] = f"{file.source.repo}@{file.source.revision}"
            size = bytes_text(file.size)
            fields[f"{part} {file.path}"] = f"sha256 {file.sha256[:SHORT]}, {size}"
    return fields


def _packages(wheels: Sequence[LockedFile]) -> Iterator[tuple[str, str]]:
    """Name and version of each; the digest too, because an index can replace a wheel."""
    for wheel in wheels:
        name, version, *_ = parse_wheel_filename(wheel.path)
        yield name, f"{version}, sha256 {wheel.sha256[:SHORT]}"


def _model_rows(before: Side, after: Side) -> Iterator[DiffRow]:
    if before.model is not None and after.model is not None:
        yield from _compare("model", _model(before), _model(after))


def _model(side: Side) -> Mapping[str, str]:
    """The report of a side's model, field by field, as its format reads it."""
    spec = _parsed(side.spec_toml)
    engine = catalog.engine(spec.engine_kind if spec else catalog.DEFAULT_ENGINE)
    return catalog.model_format(engine.model_format).report_fields(side.model or {})


def _build_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[DiffRow]:
    rows = _compare("build", _steps(before), _steps(after))
    yield from (row for row in rows if not _is_told(row))


_TOLD = frozenset({"fetch", "unpack", "system", "extract-template", "patch-template"})
"""Steps whose params other sections tell already, besides those that write reports."""
_NAMES = frozenset({"file", "first", "output"})
"""Params that name files inside objects."""


def _tells_nothing_new(recipe: str) -> bool:
    reports = {one.report_recipe for one in catalog.formats().values()}
    return recipe in _TOLD or recipe in reports


def _steps(graph: Mapping[str, Any]) -> dict[str, str]:
    """Each param of each step that no other section tells, by recipe; a recipe's version too."""
    fields: dict[str, str] = {}
    for step in graph["derivations"].values():
        recipe = step["recipe"]
        fields[f"{recipe} recipe"] = f"version {step['version']}"
        for name, value in step["params"].items():
            if not _tells_nothing_new(recipe) and name not in _NAMES and value not in ("", []):
                _flatten(f"{recipe} {name}", value, fields)
    return fields


def _is_told(row: DiffRow) -> bool:
    """True of a step more or less that another section tells."""
    recipe = row.field.removesuffix(" recipe")
    return recipe != row.field and _tells_nothing_new(recipe) and None in (row.before, row.after)


def _command_rows(before: Sequence[str], after: Sequence[str]) -> Iterator[DiffRow]:
    yield from _compare("command", _options(before), _options(after))


def _options(argv: Sequence[str]) -> dict[str, str]:
    """The command as option → value; the port is where it sits, not what it is."""
    fields: dict[str, str] = {}
    name = "program"
    for word in argv:
        if word.startswith("--"):
            name = word
            fields[name] = "on"
        else:
            fields[name] = STORE_PATH.sub(r"\1", word)
    fields.pop("--port", None)
    return fields


def template_rows(before: str, after: str) -> Iterator[DiffRow]:
    """The hunks of a template's change; an empty text = there was none, or is none."""
    if before == after:  # as almost always, and a matcher would go through it line by line
        return
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
    for hunk in matcher.get_grouped_opcodes(CONTEXT_LINES):
        first, last = hunk[0], hunk[-1]
        was, now = old[first[1] : last[2]], new[first[3] : last[4]]
        if was == now:
            continue
        yield DiffRow(
            "template",
            f"line {first[1] + 1}",
            "\n".join(was) if before else None,
            "\n".join(now) if after else None,
        )


def _rendering_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[DiffRow]:
    """What each conversation becomes; those that change in the same way are one row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in before:
        if name in after:
            row = DiffRow("rendering", name, _rendered(before[name]), _rendered(after[name]))
            if row.before != row.after:
                changed = tuple(line for line in row.lines() if line[:1] in {"+", "-"})
                groups.setdefault(changed, []).append(name)
    for names in groups.values():
        was, now = _rendered(before[names[0]]), _rendered(after[names[0]])
        yield DiffRow("rendering", ", ".join(names), was, now)


def _rendered(render: Mapping[str, Any]) -> str:
    return f"fails: {render['error']}" if "error" in render else str(render["output"])


def _probe_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[DiffRow]:
    yield from _compare("probes", _states(before), _states(after))
    for row in _compare("speed", *_both(_speed(before), _speed(after))):
        more = percent(str(row.before), str(row.after))
        if more is None or abs(more) >= NOISE_PERCENT:
            yield row


def _states(report: Mapping[str, Any]) -> dict[str, str]:
    return {str(row["name"]): str(row["state"]) for row in report.get("rows", [])}


def _speed(report: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in (report.get("measured") or {}).items()}


def _size_rows(before: Side, after: Side) -> Iterator[DiffRow]:
    """Sizes that a person can tell apart; some bytes of metadata more are told as metadata."""
    for row in _compare("size", *_both(_sizes(before), _sizes(after))):
        if row.was != row.now:
            yield row


def _sizes(side: Side) -> dict[str, str]:
    """Bytes on the disk and in memory, as far as they are known."""
    fields: dict[str, str] = {}
    if side.model is not None:
        fields["model_bytes"] = str(side.model.get("size_bytes", 0))
    if side.size_bytes:
        fields["closure_bytes"] = str(side.size_bytes)
    known = footprints_from_json(side.needs) if side.needs is not None else []
    if known:
        for device, size in zip(known[0].devices, known[0].per_device, strict=True):
            fields[f"{MEMORY}{device}"] = str(size)
        fields[f"{MEMORY}host"] = str(known[0].host_bytes)
    return fields


def _both(
    before: Mapping[str, str], after: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The fields that both sides know."""
    return (
        {name: value for name, value in before.items() if name in after},
        {name: value for name, value in after.items() if name in before},
    )
