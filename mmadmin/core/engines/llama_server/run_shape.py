"""What decides about memory, as values: the GPUs of a seat and the serve options.

`LlamaOptions.run_shape` makes the second and knows the server's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from mmadmin.core.fit.facts import GpuFacts
from mmadmin.core.formats.gguf.shape import ModelShape

MIB = 1024 * 1024
HOST = -1
"""The device number of main memory and CPU."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the memory model needs it."""

    architecture: int
    """70 for compute capability 7.0."""
    total_bytes: int
    free_bytes: int
    name: str = ""


def device_of(gpu: GpuFacts) -> Device:
    """A host's GPU as the memory model needs it."""
    return Device(gpu.architecture, gpu.memory_total_bytes, gpu.memory_free_bytes, gpu.name)


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
