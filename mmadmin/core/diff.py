"""What changed between two generations, as rows: for people, not for patch tools.

Fields of the deployment file, pinned sources, what was built, the engine's command and the chat
template are compared each in its own words. Paths of the store are shown by the object's name
without its hash, so that a command differs only where its meaning does.

A row has two faces: `field`, `before` and `after` are for programs and stable; `label`, `was` and
`now` are the same for people, with units.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmadmin.core.errors import InvalidInput
from mmadmin.core.recipe import Json
from mmadmin.core.spec import parse_spec, spec_as_document
from mmadmin.core.spec_fields import SECTION_ORDER

STORE_PATH = re.compile(r"/[^\s,]*/objects/[0-9a-f]{64}-([^\s,/]+)")
SHORT = 12
CONTEXT_LINES = 3


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One thing that differs."""

    section: str
    """`spec`, `sources`, `build`, `command`, `template`, `probes` or `speed`."""
    field: str
    before: str | None
    """None = it was not there."""
    after: str | None
    """None = it is not there."""

    @property
    def label(self) -> str:
        """What differs, for people."""
        return MEASURED[self.field].label if self._is_measured else self.field

    @property
    def was(self) -> str | None:
        """`before` for people."""
        return self._in_words(self.before)

    @property
    def now(self) -> str | None:
        """`after` for people; of a figure also by how much it went up or down."""
        words = self._in_words(self.after)
        if not self._is_measured or words is None or self.before is None:
            return words
        percent = _percent(self.before, str(self.after))
        return f"{words} ({percent:+d} %)" if percent else words

    @property
    def _is_measured(self) -> bool:
        return self.section == "speed" and self.field in MEASURED

    def _in_words(self, value: str | None) -> str | None:
        if value is None or not self._is_measured or not value.isdecimal():
            return value
        return MEASURED[self.field].words(int(value))

    def as_json(self) -> dict[str, Json]:
        """As data for pages and the API."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure of the probe report: what people call it, and how they read it."""

    label: str
    words: Callable[[int], str]


def _milli_per_s(value: int) -> str:
    return f"{value / 1000:.1f} tokens/s"


def _ms(value: int) -> str:
    return f"{value} ms" if value < SECOND_MS else f"{value / SECOND_MS:.1f} s"


def _percent(before: str, after: str) -> int:
    """By how many percent `after` is more; 0 where that cannot be said."""
    if not before.isdecimal() or not after.isdecimal() or int(before) == 0:
        return 0
    return round(100 * (int(after) - int(before)) / int(before))


SECOND_MS = 1000
MEASURED: Mapping[str, Measured] = {
    "load_ms": Measured("time to load", _ms),
    "ttft_ms": Measured("time to the first token", _ms),
    "prompt_tokens_per_s_milli": Measured("prompt speed", _milli_per_s),
    "generation_tokens_per_s_milli": Measured("generation speed", _milli_per_s),
}


def telling(rows: Sequence[DiffRow], most: int) -> list[DiffRow]:
    """The few differences that say most: what a person wrote, else whatever there is."""
    return ([row for row in rows if row.section == "spec"] or list(rows))[:most]


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
    probes: Mapping[str, Any] | None = None
    """The probe report: `{"rows": [{"name", "state", …}], …}`."""


def diff(before: Side, after: Side) -> list[DiffRow]:
    """The rows in which two generations differ, in the order in which a person reads them."""
    return [
        *_spec_rows(before.spec_toml, after.spec_toml),
        *_known(_source_rows, before.lock, after.lock),
        *_known(_build_rows, before.graph, after.graph),
        *_known(_command_rows, before.argv, after.argv),
        *template_rows(before.template, after.template),
        *_known(_probe_rows, before.probes, after.probes),
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
    yield from _compare("spec", _spec_fields(before), _spec_fields(after))


def _spec_fields(text: str) -> dict[str, str]:
    """Dotted field → value, in the sections' order; the text itself when it no longer parses."""
    try:
        document = spec_as_document(parse_spec(text))
    except InvalidInput:
        return {"text": text}
    fields: dict[str, str] = {}
    for section in SECTION_ORDER:
        table = document.get(section, {}) if section else document
        for key, value in table.items():
            if section or key not in SECTION_ORDER:
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
    yield from _compare("sources", _sources(before), _sources(after))


def _sources(lock: Mapping[str, Any]) -> dict[str, str]:
    """Each pinned file by its part and path; a hub's commit once."""
    fields: dict[str, str] = {}
    for part in ("model", "mmproj", "engine", "template"):
        files = lock.get(part) or []
        for file in files if isinstance(files, list) else [files]:
            source = file["source"]
            if source["kind"] == "hub":
                fields[f"{part} commit"] = f"{source['repo']}@{source['revision']}"
            fields[f"{part} {file['path']}"] = f"sha256 {file['sha256'][:SHORT]}, {file['size']} B"
    return fields


def _build_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[DiffRow]:
    yield from _compare("build", _steps(before), _steps(after))


_OWN_SECTION = frozenset({"fetch", "system"})
"""Steps whose params other sections tell already."""


def _steps(graph: Mapping[str, Any]) -> dict[str, str]:
    """Each param of each step, by recipe; a recipe's version too."""
    fields: dict[str, str] = {}
    for step in graph["derivations"].values():
        if step["recipe"] in _OWN_SECTION:
            continue
        fields[f"{step['recipe']} recipe"] = f"version {step['version']}"
        for name, value in step["params"].items():
            _flatten(f"{step['recipe']} {name}", value, fields)
    return fields


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


def template_rows(before: str | None, after: str | None) -> Iterator[DiffRow]:
    """The hunks of a template's change."""
    if before is None and after is None:
        return
    old, new = (before or "").splitlines(), (after or "").splitlines()
    matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
    for hunk in matcher.get_grouped_opcodes(CONTEXT_LINES):
        first, last = hunk[0], hunk[-1]
        was, now = old[first[1] : last[2]], new[first[3] : last[4]]
        if was == now:
            continue
        yield DiffRow(
            "template",
            f"line {first[1] + 1}",
            "\n".join(was) if before is not None else None,
            "\n".join(now) if after is not None else None,
        )


def _probe_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[DiffRow]:
    yield from _compare("probes", _states(before), _states(after))
    yield from _compare("speed", _speed(before), _speed(after))


def _states(report: Mapping[str, Any]) -> dict[str, str]:
    return {str(row["name"]): str(row["state"]) for row in report.get("rows", [])}


def _speed(report: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in (report.get("measured") or {}).items()}
