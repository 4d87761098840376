"""Checkpoints made of nothing: safetensors files, shards with an index, a configuration."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.hub import Hollow

Entry = tuple[str, Sequence[int], bytes]
"""Type, shape, bytes."""
BITS = {"BF16": 16, "F32": 32, "F8_E4M3": 8, "I32": 32, "I64": 64, "U8": 8, "F16": 16}
LAYERS = 2
HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD = 64, 96, 4, 2, 16
TEMPLATE = "{{ messages[0]['content'] }}"


def safetensors(
    tensors: Mapping[str, Entry], metadata: Mapping[str, str] | None = None, *, pad: int = 0
) -> bytes:
    """A file with these tensors in their order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(table).encode() + b" " * pad
    return struct.pack("<Q", len(header)) + header + b"".join(e[2] for e in tensors.values())


def hollow(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Hollow:
    """The header of a file of any size."""
    table, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape, dtype=object)) * BITS[dtype] // 8
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(table).encode()
    return Hollow(struct.pack("<Q", len(header)) + header, 8 + len(header) + at)


def bf16(*shape: int, seed: int = 0) -> Entry:
    """Random numbers, rounded down to 16 bits."""
    values = np.random.default_rng(seed).standard_normal(shape).astype("<f4")
    return "BF16", shape, (values.view("<u4") >> 16).astype("<u2").tobytes()


def config(**changes: Any) -> dict[str, Any]:
    """A `config.json` of a model of text and images."""
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {
            "num_hidden_layers": LAYERS,
            "hidden_size": HIDDEN,
            "intermediate_size": FEED_FORWARD,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD,
            "vocab_size": 128,
            "max_position_embeddings": 4096,
        },
        "vision_config": {"num_hidden_layers": 1, "hidden_size": 32},
        **changes,
    }


def projections(layers: int = LAYERS) -> dict[str, tuple[int, int]]:
    """Every linear module of the text model, with its rows and columns."""
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED_FORWARD),
    }
    return {
        f"model.language_model.layers.{n}.{name}": size
        for n in range(layers)
        for name, size in sizes.items()
    }


def tensors(layers: int = LAYERS) -> dict[str, Entry]:
    """The weights of the model in BF16."""
    found = {
        "lm_head.weight": bf16(128, HIDDEN, seed=1),
        "model.language_model.embed_tokens.weight": bf16(128, HIDDEN, seed=2),
        "model.language_model.norm.weight": bf16(HIDDEN, seed=3),
        "model.multi_modal_projector.linear_1.weight": bf16(HIDDEN, 32, seed=4),
        "model.vision_tower.transformer.layers.0.attention.q_proj.weight": bf16(32, 32, seed=5),
    }
    for n, (name, size) in enumerate(projections(layers).items()):
        found[f"{name}.weight"] = bf16(*size, seed=10 + n)
    return found


def shard(folder: Path, found: Mapping[str, Entry], count: int, stem: str = "model") -> None:
    """Write tensors in shards with an index."""
    names, weight_map = list(found), {}
    for number in range(count):
        file = f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {name: found[name] for name in names[number::count]}
        (folder / file).write_bytes(safetensors(part, {"format": "pt"}))
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def make_checkpoint(
    folder: Path,
    *,
    shards: int = 1,
    found: Mapping[str, Entry] | None = None,
    **changes: Any,
) -> Path:
    """A whole checkpoint; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = tensors() if found is None else found
    if shards > 1:
        shard(folder, found, shards)
    else:
        (folder / "model.safetensors").write_bytes(safetensors(found, {"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
