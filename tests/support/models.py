"""Tiny GGUFs and shard sets, made with gguf-py; no weights come from outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

TOKENS = ["<unk>", "<s>", "</s>", *(chr(c) for c in range(33, 127))]


def make_model(
    path: Path,
    *,
    tensors: int = 6,
    seed: int = 1,
    split: int = 0,
    template: str | None = None,
    extra: dict[str, str] | None = None,
    width: int = 7,
    alignment: int = 0,
) -> list[Path]:
    """Write a model of f32 tensors with shapes (5, w), (6, w), …; its files in order.

    `split` = tensors a shard. Metadata holds what a llama-like model has, arrays included.
    """
    generator = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama", split_max_tensors=split)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.5] * len(TOKENS))
    writer.add_token_types([1] * len(TOKENS))
    writer.add_array("tokenizer.ggml.merges", ["a b", "b c", "c d"])
    if template is not None:
        writer.add_chat_template(template)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    for i in range(tensors):
        data = generator.standard_normal((5 + i, width)).astype(np.float32)
        writer.add_tensor(f"blk.{i}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not split:
        return [path]
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def make_shards(folder: Path, *, stem: str = "m", **options: object) -> list[Path]:
    """Three shards of two tensors each, by default."""
    folder.mkdir(parents=True, exist_ok=True)
    return make_model(folder / f"{stem}.gguf", **{"split": 2, **options})  # type: ignore[arg-type]


def cut(path: Path, by: int) -> None:
    """Cut bytes off a file's end."""
    path.write_bytes(path.read_bytes()[:-by])


LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8\n"
    "size 12345\n"
)
