"""The serve options that decide about memory, as values.

`LlamaOptions.run_shape` makes them and knows the server's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from mmadmin.core.formats.gguf.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The serve options that decide about memory."""

    context: int
    """Tokens a slot; 0 = as trained."""
    slots: int
    unified: bool
    batch: int
    ubatch: int
    cache_type_k: str
    cache_type_v: str
    flash_attention: bool
    gpu_layers: int | None
    """None = all that there is a GPU for."""
    tensor_split: tuple[Decimal, ...]
    split_mode: str
    main_gpu: int
    swa_full: bool
    offload_cache: bool
    embeddings: bool
    pooling: int | None
    cpu_moe_layers: int
    memory_mapped: bool
    repack: bool
    projector_bytes: int
    """Size of the multimodal projector's file."""


def physical_batch(shape: ModelShape, run: RunShape) -> int:
    """Tokens that are computed at once (`llama_context`'s constructor)."""
    context = (run.context or shape.context_train) * run.slots
    batch = min(context, run.batch) if shape.causal else run.batch
    return min(batch, run.ubatch)


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step
