"""How many cells the K/V caches have, and what a layer's share of them takes.

Sources (llama.cpp b11434): `llama_context`'s constructor (llama-context.cpp), `llama_kv_cache`
and `llama_kv_cache_iswa` (llama-kv-cache*.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmadmin.core.engines.llama_server.run_shape import RunShape, physical_batch, round_up
from mmadmin.core.formats.gguf.shape import ModelShape

CACHE_BLOCKS: Mapping[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""Cache type → elements a block, bytes a block (`type_traits` in ggml.c)."""


@dataclass(frozen=True, slots=True)
class Caches:
    """The cells of a run's caches."""

    context: int
    """Tokens a slot."""
    streams: int
    cells: int
    """Cells a stream."""
    window_cells: int


def caches_of(shape: ModelShape, run: RunShape) -> Caches:
    """Cells of the caches (`llama_context`'s constructor, `llama_kv_cache_iswa`)."""
    total = round_up((run.context or shape.context_train) * run.slots, 256)
    streams = 1 if run.unified else run.slots
    cells = total if run.unified else round_up(total // run.slots, 256)
    window = shape.window * (run.slots if run.unified else 1) + physical_batch(shape, run)
    window_cells = cells if run.swa_full else round_up(min(cells, window), 256)
    return Caches(cells, streams, cells, window_cells)


def cache_bytes(shape: ModelShape, run: RunShape, layer: int, cells: int, window_cells: int) -> int:
    """Bytes of one layer's K/V cache a stream (`llama_kv_cache`'s constructor)."""
    if not shape.has_cache or layer >= shape.kv_layers or shape.kv_heads[layer] == 0:
        return 0
    if layer in shape.recurrent_layers and not shape.has(layer, "attn_k.weight"):
        return 0
    count = window_cells if layer in shape.window_layers else cells
    keys = shape.key_length[layer] * shape.kv_heads[layer]
    size = _row(run.cache_type_k, keys) * count
    if shape.latent is None:
        if run.flash_attention:
            values = shape.value_length[layer] * shape.kv_heads[layer]
        else:
            values = max(
                length * heads
                for length, heads in zip(shape.value_length, shape.kv_heads, strict=True)
            )
        size += _row(run.cache_type_v, values) * count
    return size


def _row(cache_type: str, elements: int) -> int:
    block, size = CACHE_BLOCKS[cache_type]
    return -(-elements // block) * size
