"""The scales of a K/V cache in a checkpoint: for each layer one of keys and one of values."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.formats.checkpoint.header import Tensor, read_header

SCALE = re.compile(r"\.(?P<which>[kv])(?:_proj\.output)?_scale$")


@dataclass(frozen=True, slots=True)
class CacheScales:
    """By kind ("k", "v"): the value of each layer, in the order of their names."""

    values: Mapping[str, Mapping[str, float]]

    @property
    def count(self) -> int:
        """Scales of both kinds."""
        return sum(len(values) for values in self.values.values())

    @property
    def problem(self) -> str:
        """Why an engine would compute nonsense with them; empty = they are sound."""
        for which, values in self.values.items():
            for name, value in values.items():
                if not math.isfinite(value) or value <= 0:
                    return f"{name} is {value}"
            if values and all(value == 1.0 for value in values.values()):
                return f"all {len(values)} {which} scales are 1.0: they were never calibrated"
        counts = {which: len(values) for which, values in self.values.items()}
        if len(set(counts.values())) > 1:
            return f"there are {counts['k']} k scales and {counts['v']} v scales"
        return ""


def read_scales(files: list[Path]) -> CacheScales:
    """The scales in the weights of a checkpoint."""
    found: dict[str, dict[str, float]] = {"k": {}, "v": {}}
    for path in files:
        for tensor in read_header(path).tensors:
            match = SCALE.search(tensor.name)
            if match and tensor.elements == 1:
                found[match["which"]][tensor.name] = scalar(path, tensor)
    return CacheScales(
        {which: dict(sorted(values.items(), key=_place)) for which, values in found.items()}
    )


def _place(item: tuple[str, float]) -> list[tuple[int, str]]:
    """Names in the order of their layers: 10 comes after 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in item[0].split(".")]


def scalar(path: Path, tensor: Tensor) -> float:
    """The one number of a tensor; NaN for a type that holds no scale."""
    with path.open("rb") as stream:
        stream.seek(tensor.offset)
        data = stream.read(tensor.size)
    if tensor.dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    form = {"F16": "<e", "F32": "<f", "F64": "<d"}.get(tensor.dtype)
    return float(struct.unpack(form, data)[0]) if form else math.nan
