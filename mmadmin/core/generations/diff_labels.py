"""What people call the things that a diff compares, and how they read their values: with units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmadmin.core import catalog
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.formats.protocol import ReportLabel

SECOND_MS = 1000
BINARY = 1024
NOISE_PERCENT = 5
"""Two measurements of one engine differ by as much: less does not count."""
CONVERSATIONS_NAMED = 3
MEMORY = "memory_bytes."
"""Fields of the section `size`: predicted memory, `host` or a GPU's index."""


@dataclass(frozen=True, slots=True)
class Words:
    """A field as people read it."""

    label: str
    value: Callable[[str], str]
    is_figure: bool = False
    """True where it also says by how much it went up or down."""


def words_of(section: str, field: str) -> Words:
    """How a field of a section is said."""
    known = _FIELDS.get((section, field))
    if known is not None:
        return known
    if section == "model":
        for model_format in catalog.formats().values():
            known_there = model_format.label_of(field)
            if known_there is not None:
                return _words(known_there)
    if section == "size" and field.startswith(MEMORY):
        device = field.removeprefix(MEMORY)
        return Words(f"memory on GPU {device}, predicted", _bytes, is_figure=True)
    if section == "rendering":
        names = field.split(", ")
        rest = len(names) - CONVERSATIONS_NAMED
        shown = ", ".join(names[:CONVERSATIONS_NAMED])
        return Words(f"{shown} and {rest} more" if rest > 0 else shown, _as_it_is)
    return Words(field, _as_it_is)


def _words(shown: ReportLabel) -> Words:
    if shown.unit == "bytes":
        return Words(shown.label, _bytes, is_figure=True)
    return Words(shown.label, lambda value: shown.names.get(value, value))


def percent(before: str, after: str) -> int | None:
    """By how many percent `after` is more; None where that cannot be said."""
    if not before.isdecimal() or not after.isdecimal() or int(before) == 0:
        return None
    return round(100 * (int(after) - int(before)) / int(before))


def _as_it_is(value: str) -> str:
    return value


def _bytes(value: str) -> str:
    return bytes_text(int(value)) if value.isdecimal() else value


def _milli_per_s(value: str) -> str:
    return f"{int(value) / 1000:.1f} tokens/s" if value.isdecimal() else value


def _ms(value: str) -> str:
    if not value.isdecimal():
        return value
    ms = int(value)
    return f"{ms} ms" if ms < SECOND_MS else f"{ms / SECOND_MS:.1f} s"


_FIELDS = {
    ("speed", "load_ms"): Words("load time", _ms, is_figure=True),
    ("speed", "ttft_ms"): Words("time to first token", _ms, is_figure=True),
    ("speed", "prompt_tokens_per_s_milli"): Words("prompt speed", _milli_per_s, is_figure=True),
    ("speed", "generation_tokens_per_s_milli"): Words(
        "generation speed", _milli_per_s, is_figure=True
    ),
    ("size", "model_bytes"): Words("model", _bytes, is_figure=True),
    ("size", "closure_bytes"): Words("total with dependencies", _bytes, is_figure=True),
    ("size", f"{MEMORY}host"): Words("main memory, predicted", _bytes, is_figure=True),
}
