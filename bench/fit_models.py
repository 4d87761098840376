"""Small models with random weights: dense, grouped heads, sliding window, experts, embedding.

Made with gguf-py at run time; vocabularies come from the engine's own source. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

TOKENIZER_PREFIX = "tokenizer."


@dataclass(frozen=True)
class Recipe:
    """How to make a model and how to serve it."""

    name: str
    vocabulary: str
    """File name of the vocabulary in the source's `models` folder."""
    arch: str
    metadata: Mapping[str, Any]
    tensors: Callable[[int], Mapping[str, tuple[tuple[int, ...], str]]]
    """Vocabulary size → tensor name → (shape as ggml has it, type)."""
    serve: Mapping[str, Any]
    """`[serve]` options."""


def write(recipe: Recipe, vocabulary: Path, target: Path) -> None:
    """Write the model: the vocabulary's tokenizer, the recipe's dimensions, random weights."""
    reader = GGUFReader(vocabulary)
    writer = GGUFWriter(target, recipe.arch)
    size = add_vocabulary(writer, reader)
    for key, value in recipe.metadata.items():
        add(writer, f"{recipe.arch}.{key}", value)
    random = np.random.default_rng(7)
    for name, (shape, type_name) in recipe.tensors(size).items():
        add_tensor(writer, random, name, shape, GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: GGUFWriter, reader: GGUFReader) -> int:
    """Copy a vocabulary's tokenizer; returns how many tokens it has."""
    size = 0
    for key, one in reader.fields.items():
        if not key.startswith(TOKENIZER_PREFIX):
            continue
        kind = one.types[0]
        value = one.contents()
        if key == "tokenizer.ggml.tokens":
            size = len(value)
        sub = one.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=sub)
    return size


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """One key of the model's own metadata."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def add_tensor(
    writer: GGUFWriter,
    random: np.random.Generator,
    name: str,
    shape: tuple[int, ...],
    kind: GGMLQuantizationType,
) -> None:
    """Random values; quantized blocks are made of small random bytes, their scales of zero."""
    rows = tuple(reversed(shape))
    if kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, random.normal(0, 0.02, rows).astype(np.float32))
        return
    if kind == GGMLQuantizationType.F16:
        writer.add_tensor(name, random.normal(0, 0.02, rows).astype(np.float16))
        return
    block, size = GGML_QUANT_SIZES[kind]
    row_bytes = shape[0] // block * size
    data = np.zeros((*rows[:-1], row_bytes), dtype=np.uint8)
    writer.add_tensor(name, data, raw_shape=data.shape, raw_dtype=kind)


def decoder(
    *,
    layers: int,
    embedding: int,
    heads: int,
    kv_heads: int,
    head: int,
    feed_forward: int,
    kind: str,
    tied: bool = False,
    extra: tuple[str, ...] = (),
    experts: int = 0,
    biases: bool = False,
) -> Callable[[int], Mapping[str, tuple[tuple[int, ...], str]]]:
    """The tensors of a decoder; `extra` names norms that each layer has besides."""

    def tensors(vocabulary: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        made: dict[str, tuple[tuple[int, ...], str]] = {
            "token_embd.weight": ((embedding, vocabulary), kind),
            "output_norm.weight": ((embedding,), "F32"),
        }
        if not tied:
            made["output.weight"] = ((embedding, vocabulary), kind)
        for i in range(layers):
            block = f"blk.{i}."
            made[block + "attn_norm.weight"] = ((embedding,), "F32")
            made[block + "ffn_norm.weight"] = ((embedding,), "F32")
            for name in extra:
                width = head if name in ("attn_q_norm", "attn_k_norm") else embedding
                made[f"{block}{name}.weight"] = ((width,), "F32")
            made[block + "attn_q.weight"] = ((embedding, heads * head), kind)
            made[block + "attn_k.weight"] = ((embedding, kv_heads * head), kind)
            made[block + "attn_v.weight"] = ((embedding, kv_heads * head), kind)
            made[block + "attn_output.weight"] = ((heads * head, embedding), kind)
            if biases:
                made[block + "attn_q.bias"] = ((heads * head,), "F32")
                made[block + "attn_k.bias"] = ((kv_heads * head,), "F32")
                made[block + "attn_v.bias"] = ((kv_heads * head,), "F32")
            if experts:
                made[block + "ffn_gate_inp.weight"] = ((embedding, experts), "F32")
                made[block + "ffn_gate_exps.weight"] = ((embedding, feed_forward, experts), kind)
                made[block + "ffn_up_exps.weight"] = ((embedding, feed_forward, experts), kind)
                made[block + "ffn_down_exps.weight"] = ((feed_forward, embedding, experts), kind)
            else:
                made[block + "ffn_gate.weight"] = ((embedding, feed_forward), kind)
                made[block + "ffn_up.weight"] = ((embedding, feed_forward), kind)
                made[block + "ffn_down.weight"] = ((feed_forward, embedding), kind)
        return made

    return tensors


def encoder(
    layers: int, embedding: int, feed_forward: int, positions: int
) -> Callable[[int], Mapping[str, tuple[tuple[int, ...], str]]]:
    """The tensors of a BERT."""

    def tensors(vocabulary: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        made: dict[str, tuple[tuple[int, ...], str]] = {
            "token_embd.weight": ((embedding, vocabulary), "F16"),
            "token_types.weight": ((embedding, 2), "F32"),
            "position_embd.weight": ((embedding, positions), "F32"),
            "token_embd_norm.weight": ((embedding,), "F32"),
            "token_embd_norm.bias": ((embedding,), "F32"),
        }
        for i in range(layers):
            block = f"blk.{i}."
            for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
                made[f"{block}{name}.weight"] = ((embedding, embedding), "F16")
                made[f"{block}{name}.bias"] = ((embedding,), "F32")
            for name in ("attn_output_norm", "layer_output_norm"):
                made[f"{block}{name}.weight"] = ((embedding,), "F32")
                made[f"{block}{name}.bias"] = ((embedding,), "F32")
            made[block + "ffn_up.weight"] = ((embedding, feed_forward), "F16")
            made[block + "ffn_up.bias"] = ((feed_forward,), "F32")
            made[block + "ffn_down.weight"] = ((feed_forward, embedding), "F16")
            made[block + "ffn_down.bias"] = ((embedding,), "F32")
        return made

    return tensors


def latent(vocabulary: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """The tensors of a small DeepSeek: latent attention, one dense layer, then experts."""
    made: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((512, vocabulary), "F16"),
        "output_norm.weight": ((512,), "F32"),
        "output.weight": ((512, vocabulary), "F16"),
    }
    for i in range(4):
        block = f"blk.{i}."
        made |= {
            block + "attn_norm.weight": ((512,), "F32"),
            block + "ffn_norm.weight": ((512,), "F32"),
            block + "attn_q_a.weight": ((512, 192), "F16"),
            block + "attn_q_a_norm.weight": ((192,), "F32"),
            block + "attn_q_b.weight": ((192, 8 * 96), "F16"),
            block + "attn_kv_a_mqa.weight": ((512, 128 + 32), "F16"),
            block + "attn_kv_a_norm.weight": ((128,), "F32"),
            block + "attn_k_b.weight": ((64, 128, 8), "F16"),
            block + "attn_v_b.weight": ((128, 64, 8), "F16"),
            block + "attn_output.weight": ((8 * 64, 512), "F16"),
        }
        if i == 0:
            made |= {
                block + "ffn_gate.weight": ((512, 1024), "F16"),
                block + "ffn_up.weight": ((512, 1024), "F16"),
                block + "ffn_down.weight": ((1024, 512), "F16"),
            }
        else:
            made |= {
                block + "ffn_gate_inp.weight": ((512, 8), "F32"),
                block + "ffn_gate_exps.weight": ((512, 256, 8), "F16"),
                block + "ffn_up_exps.weight": ((512, 256, 8), "F16"),
                block + "ffn_down_exps.weight": ((256, 512, 8), "F16"),
                block + "ffn_gate_shexp.weight": ((512, 256), "F16"),
                block + "ffn_up_shexp.weight": ((512, 256), "F16"),
                block + "ffn_down_shexp.weight": ((256, 512), "F16"),
            }
    return made


def open_mixture(vocabulary: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """The tensors of a small gpt-oss: biases everywhere, attention sinks, a window."""
    made: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((512, vocabulary), "Q8_0"),
        "output_norm.weight": ((512,), "F32"),
        "output.weight": ((512, vocabulary), "Q8_0"),
    }
    for i in range(4):
        block = f"blk.{i}."
        made |= {
            block + "attn_norm.weight": ((512,), "F32"),
            block + "post_attention_norm.weight": ((512,), "F32"),
            block + "attn_sinks.weight": ((8,), "F32"),
            block + "ffn_gate_inp.weight": ((512, 8), "F32"),
            block + "ffn_gate_inp.bias": ((8,), "F32"),
        }
        for name, rows in (("attn_q", 512), ("attn_k", 128), ("attn_v", 128), ("attn_output", 512)):
            made[f"{block}{name}.weight"] = ((512, rows), "Q8_0")
            made[f"{block}{name}.bias"] = ((rows,), "F32")
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            made[f"{block}{name}.weight"] = ((512, 512, 8), "MXFP4")
            made[f"{block}{name}.bias"] = ((512, 8), "F32")
    return made


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        "dense",
        "ggml-vocab-llama-spm.gguf",
        "llama",
        {
            "block_count": 6,
            "context_length": 8192,
            "embedding_length": 512,
            "feed_forward_length": 1536,
            "attention.head_count": 8,
            "attention.head_count_kv": 8,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": 64,
        },
        decoder(
            layers=6, embedding=512, heads=8, kv_heads=8, head=64, feed_forward=1536, kind="F16"
        ),
        {"context": 4096, "slots": 1},
    ),
    Recipe(
        "grouped",
        "ggml-vocab-qwen2.gguf",
        "qwen2",
        {
            "block_count": 8,
            "context_length": 32768,
            "embedding_length": 512,
            "feed_forward_length": 2048,
            "attention.head_count": 8,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1000000.0,
        },
        decoder(
            layers=8,
            embedding=512,
            heads=8,
            kv_heads=2,
            head=64,
            feed_forward=2048,
            kind="Q8_0",
            tied=True,
            biases=True,
        ),
        {"context": 8192, "slots": 4, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    ),
    Recipe(
        "window",
        "ggml-vocab-llama-spm.gguf",
        "gemma3",
        {
            "block_count": 12,
            "context_length": 32768,
            "embedding_length": 640,
            "feed_forward_length": 2048,
            "attention.head_count": 4,
            "attention.head_count_kv": 1,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "attention.sliding_window": 512,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1000000.0,
        },
        decoder(
            layers=12,
            embedding=640,
            heads=4,
            kv_heads=1,
            head=256,
            feed_forward=2048,
            kind="Q8_0",
            tied=True,
            extra=("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
        ),
        {"context": 16384, "slots": 2},
    ),
    Recipe(
        "mixture",
        "ggml-vocab-qwen2.gguf",
        "qwen3moe",
        {
            "block_count": 6,
            "context_length": 32768,
            "embedding_length": 512,
            "feed_forward_length": 1536,
            "expert_feed_forward_length": 512,
            "expert_count": 16,
            "expert_used_count": 4,
            "attention.head_count": 8,
            "attention.head_count_kv": 2,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1000000.0,
        },
        decoder(
            layers=6,
            embedding=512,
            heads=8,
            kv_heads=2,
            head=64,
            feed_forward=512,
            kind="Q4_K",
            experts=16,
            extra=("attn_q_norm", "attn_k_norm"),
        ),
        {"context": 4096, "slots": 2},
    ),
    Recipe(
        "embedding",
        "ggml-vocab-bert-bge.gguf",
        "bert",
        {
            "block_count": 6,
            "context_length": 512,
            "embedding_length": 384,
            "feed_forward_length": 1536,
            "attention.head_count": 12,
            "attention.layer_norm_epsilon": 1e-12,
            "attention.causal": False,
            "pooling_type": 2,
        },
        encoder(6, 384, 1536, 512),
        {"context": 512, "slots": 1, "embeddings": True},
    ),
    Recipe(
        "latent",
        "ggml-vocab-llama-spm.gguf",
        "deepseek2",
        {
            "block_count": 4,
            "context_length": 8192,
            "embedding_length": 512,
            "feed_forward_length": 1024,
            "expert_feed_forward_length": 256,
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "attention.head_count": 8,
            "attention.head_count_kv": 1,
            "attention.key_length": 160,
            "attention.value_length": 128,
            "attention.key_length_mla": 96,
            "attention.value_length_mla": 64,
            "attention.q_lora_rank": 192,
            "attention.kv_lora_rank": 128,
            "rope.dimension_count": 32,
            "attention.layer_norm_rms_epsilon": 1e-6,
        },
        latent,
        {"context": 4096, "slots": 2},
    ),
    Recipe(
        "open-mixture",
        "ggml-vocab-qwen2.gguf",
        "gpt-oss",
        {
            "block_count": 4,
            "context_length": 8192,
            "embedding_length": 512,
            "feed_forward_length": 512,
            "expert_feed_forward_length": 512,
            "expert_count": 8,
            "expert_used_count": 2,
            "attention.head_count": 8,
            "attention.head_count_kv": 2,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.sliding_window": 128,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 150000.0,
        },
        open_mixture,
        {"context": 8192, "slots": 1},
    ),
)
