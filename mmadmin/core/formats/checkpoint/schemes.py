"""The quantisation schemes that `quantize-checkpoint` makes, and what each writes for a module.

Source: compressed-tensors 0.18 (`quantization/quant_scheme.py` and its compressors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Form = tuple[str, tuple[int, ...]]
"""Type and shape of a tensor."""
NVFP4_GROUP = 16
"""Weights that share a scale in NVFP4."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to quantise."""

    name: str
    label: str
    """As `Quantization.scheme` has it."""
    format: str
    """What `config.json` must name."""
    tensors: Callable[[int, int, int], Mapping[str, Form]]
    """(rows, columns, group size) of a linear module → the tensors that replace its weight."""
    needs_data: bool = False
    gptq: bool = False
    takes_group_size: bool = False
    static_activations: bool = False

    def group_of(self, wanted: int) -> int:
        """Weights that share a scale along a row; 0 = the whole row or more."""
        if self.takes_group_size:
            return wanted
        return NVFP4_GROUP if self.label.startswith("nvfp4") else 0


def _fp8_dynamic(rows: int, columns: int, _group: int) -> Mapping[str, Form]:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("BF16", (rows, 1))}


def _fp8(rows: int, columns: int, _group: int) -> Mapping[str, Form]:
    one = ("BF16", (1,))
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": one, "input_scale": one}


def _nvfp4a16(rows: int, columns: int, _group: int) -> Mapping[str, Form]:
    return {
        "weight_packed": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // NVFP4_GROUP)),
        "weight_global_scale": ("F32", (1,)),
    }


def _nvfp4(rows: int, columns: int, group: int) -> Mapping[str, Form]:
    return {**_nvfp4a16(rows, columns, group), "input_global_scale": ("F32", (1,))}


def _w4a16(rows: int, columns: int, group: int) -> Mapping[str, Form]:
    return {
        "weight_packed": ("I32", (rows, -(-columns // 8))),
        "weight_scale": ("BF16", (rows, -(-columns // group))),
        "weight_shape": ("I64", (2,)),
    }


SCHEMES: Mapping[str, Scheme] = {
    one.name: one
    for one in (
        Scheme("FP8_DYNAMIC", "w8a8-fp8", "float-quantized", _fp8_dynamic),
        Scheme(
            "FP8", "w8a8-fp8", "float-quantized", _fp8, needs_data=True, static_activations=True
        ),
        Scheme("NVFP4", "nvfp4", "nvfp4-pack-quantized", _nvfp4, needs_data=True),
        Scheme("NVFP4A16", "nvfp4a16", "nvfp4-pack-quantized", _nvfp4a16),
        Scheme(
            "W4A16",
            "w4a16",
            "pack-quantized",
            _w4a16,
            needs_data=True,
            gptq=True,
            takes_group_size=True,
        ),
    )
}
