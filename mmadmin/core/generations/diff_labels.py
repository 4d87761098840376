"""What people call the things that a diff compares, and how they read their values: with units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SECOND_MS = 1000
BINARY = 1024
NOISE_PERCENT = 5
"""Two measurements of one engine differ by as much: less is no difference."""
CONVERSATIONS_NAMED = 3
TENSOR_BYTES = "tensor_bytes."
"""Fields of the section `model`: how many bytes of the tensors have a type."""
MEMORY = "memory_bytes."
"""Fields of the section `size`: predicted memory, `host` or a GPU's index."""
FILE_TYPE = "general.file_type"
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    30: "IQ4_XS",
    32: "BF16",
}
"""llama.cpp's numbers for what most tensors of a file are (`enum llama_ftype`)."""


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
    if section == "model" and field.startswith(TENSOR_BYTES):
        return Words(f"tensors in {field.removeprefix(TENSOR_BYTES)}", _bytes, is_figure=True)
    if section == "size" and field.startswith(MEMORY):
        device = field.removeprefix(MEMORY)
        return Words(f"memory on GPU {device}, predicted", _bytes, is_figure=True)
    if section == "rendering":
        names = field.split(", ")
        rest = len(names) - CONVERSATIONS_NAMED
        shown = ", ".join(names[:CONVERSATIONS_NAMED])
        return Words(f"{shown} and {rest} more" if rest > 0 else shown, _as_it_is)
    return Words(field, _as_it_is)


def percent(before: str, after: str) -> int | None:
    """By how many percent `after` is more; None where that cannot be said."""
    if not before.isdecimal() or not after.isdecimal() or int(before) == 0:
        return None
    return round(100 * (int(after) - int(before)) / int(before))


def bytes_in_words(size: int) -> str:
    """`512 B`, `93.8 MiB`, `71.4 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < BINARY:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= BINARY
    return f"{value:.1f} GiB"


def _as_it_is(value: str) -> str:
    return value


def _bytes(value: str) -> str:
    return bytes_in_words(int(value)) if value.isdecimal() else value


def _milli_per_s(value: str) -> str:
    return f"{int(value) / 1000:.1f} tokens/s" if value.isdecimal() else value


def _ms(value: str) -> str:
    if not value.isdecimal():
        return value
    ms = int(value)
    return f"{ms} ms" if ms < SECOND_MS else f"{ms / SECOND_MS:.1f} s"


def _file_type(value: str) -> str:
    return FILE_TYPES.get(int(value), value) if value.isdecimal() else value


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
    ("model", FILE_TYPE): Words("weights, mostly", _file_type),
}
