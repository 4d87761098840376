"""Tensor tables of models that are not there: headers without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mmadmin.core.formats.gguf.shape import ModelShape, Weight, shape_of

Choose = Callable[[str, int], str]
"""(part, layer) → type of a layer's matrix."""


def size_of(type_name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this type and shape."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    elements = 1
    for n in shape:
        elements *= n
    assert shape[0] % block == 0
    return elements // block * size


def table(rows: list[tuple[str, tuple[int, ...], str]]) -> list[Weight]:
    """Rows laid out one after another, 32 bytes aligned."""
    offset, made = 0, []
    for name, shape, type_name in rows:
        size = size_of(type_name, shape)
        made.append(Weight(name, shape, type_name, offset, size))
        offset += -(-size // 32) * 32
    return made


def more_bits(layer: int, layers: int) -> bool:
    """llama-quantize's `use_more_bits`: the layers that a K_M mixture gives a larger type."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def mixture(name: str, layers: int) -> tuple[Choose, str, str]:
    """Types of a quant: (layer's matrices, output, embeddings)."""
    base, larger = {
        "Q4_K_M": ("Q4_K", "Q6_K"),
        "Q5_K_M": ("Q5_K", "Q6_K"),
        "Q6_K": ("Q6_K", "Q6_K"),
        "Q8_0": ("Q8_0", "Q8_0"),
        "BF16": ("BF16", "BF16"),
        "F16": ("F16", "F16"),
    }[name]

    def choose(part: str, layer: int) -> str:
        if part in ("attn_v", "ffn_down") and more_bits(layer, layers):
            return larger
        return base

    return choose, larger, base


def llama(
    *,
    layers: int,
    embedding: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    vocabulary: int,
    quant: str = "F16",
    context: int = 8192,
    arch: str = "llama",
    tied: bool = False,
    **extra: Any,
) -> ModelShape:
    """A dense decoder."""
    choose, output, embed = mixture(quant, layers)
    rows: list[tuple[str, tuple[int, ...], str]] = [
        ("token_embd.weight", (embedding, vocabulary), embed),
        ("output_norm.weight", (embedding,), "F32"),
    ]
    if not tied:
        rows.append(("output.weight", (embedding, vocabulary), output))
    for i in range(layers):
        matrices = {
            "attn_q": (embedding, heads * head_size),
            "attn_k": (embedding, kv_heads * head_size),
            "attn_v": (embedding, kv_heads * head_size),
            "attn_output": (heads * head_size, embedding),
            "ffn_gate": (embedding, feed_forward),
            "ffn_up": (embedding, feed_forward),
            "ffn_down": (feed_forward, embedding),
        }
        rows += [(f"blk.{i}.{n}.weight", (embedding,), "F32") for n in ("attn_norm", "ffn_norm")]
        rows += [(f"blk.{i}.{n}.weight", s, choose(n, i)) for n, s in matrices.items()]
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.embedding_length": embedding,
        f"{arch}.feed_forward_length": feed_forward,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_size,
        f"{arch}.attention.value_length": head_size,
        f"{arch}.context_length": context,
        **{f"{arch}.{key}": value for key, value in extra.items()},
    }
    return shape_of(metadata, [table(rows)])


def mistral_medium(quant: str = "Q4_K_M") -> ModelShape:
    """Mistral Medium 3.5 by its public dimensions."""
    return llama(
        layers=88,
        embedding=12288,
        feed_forward=28672,
        heads=96,
        kv_heads=8,
        head_size=128,
        vocabulary=131072,
        quant=quant,
        context=262144,
        arch="mistral3",
    )
