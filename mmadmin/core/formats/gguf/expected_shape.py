"""Shapes of files that do not exist yet: another quant of a model whose header was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mmadmin.core.formats.gguf.header import TENSOR_TYPES
from mmadmin.core.formats.gguf.sets import GgufSet
from mmadmin.core.formats.gguf.shape import ModelShape

BLOCKS: Mapping[str, tuple[int, int]] = {name: (n, size) for name, n, size in TENSOR_TYPES.values()}
"""Elements and bytes of a block, by type."""


def scaled(shape: ModelShape, wanted: GgufSet, read: GgufSet) -> ModelShape:
    """The same layers with weights of another quant: sizes in proportion to the files'."""
    size, known = wanted.size_bytes, read.size_bytes
    main = _main_type(wanted.quant or "")
    return replace(
        shape,
        weights=tuple(
            replace(
                w,
                size=w.size * size // known,
                offset=w.offset * size // known,
                type=main if main in BLOCKS else w.type,
            )
            if len(w.shape) > 1
            else w
            for w in shape.weights
        ),
    )


def requantized(shape: ModelShape, quant: str) -> ModelShape:
    """The weights as the quantizing tool would make them, by the quant's main type."""
    main = _main_type(quant)
    if main not in BLOCKS:
        return shape
    block, size = BLOCKS[main]
    return replace(
        shape,
        weights=tuple(
            replace(w, type=main, size=w.elements // block * size)
            if len(w.shape) > 1 and w.shape[0] % block == 0
            else w
            for w in shape.weights
        ),
    )


def _main_type(quant: str) -> str:
    """The type of most matrices of a quant: `Q4_K` of `UD-Q4_K_XL`."""
    bare = quant.upper().rpartition("-")[2]
    return next((name for name in (bare, bare.rpartition("_")[0]) if name in BLOCKS), bare)
