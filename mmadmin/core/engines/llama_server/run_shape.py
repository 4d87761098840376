"""The serve options that decide about memory, as values.

The options are llama-server's; what is left out has the engine's own default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import cast

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.protocol import Options
from mmadmin.core.formats.gguf.shape import ModelShape

DEFAULT_BATCH = 2048
DEFAULT_UBATCH = 512


@dataclass(frozen=True, slots=True)
class RunShape:
    """The serve options that decide about memory."""

    context: int
    """Tokens a slot; 0 = as trained."""
    slots: int = 1
    unified: bool = False
    batch: int = DEFAULT_BATCH
    ubatch: int = DEFAULT_UBATCH
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool = True
    gpu_layers: int | None = None
    """None = all that there is a GPU for."""
    tensor_split: tuple[Decimal, ...] = ()
    split_mode: str = "layer"
    main_gpu: int = 0
    swa_full: bool = False
    offload_cache: bool = True
    embeddings: bool = False
    pooling: int | None = None
    cpu_moe_layers: int = 0
    memory_mapped: bool = True
    repack: bool = True
    projector_bytes: int = 0
    """Size of the multimodal projector's file."""

    @classmethod
    def from_options(cls, options: Options, *, projector_bytes: int = 0) -> RunShape:
        """From the `[serve]` table of llama-server; what is left out has the engine's default."""
        flags = cast("Mapping[str, Json]", options.get("flags") or {})
        pooling = options.get("pooling")
        split = cast("Sequence[Json]", options.get("tensor_split") or ())
        batch = _number(options, "batch", DEFAULT_BATCH)
        ubatch = min(_number(options, "ubatch", DEFAULT_UBATCH), batch)
        embeddings = bool(options.get("embeddings") or options.get("reranking"))
        return cls(
            context=_number(options, "context", 0),
            slots=_number(options, "slots", 1),
            unified=bool(options.get("kv_unified")),
            batch=ubatch if embeddings else batch,
            ubatch=ubatch,
            cache_type_k=str(options.get("cache_type_k") or "f16"),
            cache_type_v=str(options.get("cache_type_v") or "f16"),
            flash_attention=options.get("flash_attention") != "off",
            gpu_layers=_number(options, "gpu_layers", -1) if "gpu_layers" in options else None,
            tensor_split=tuple(Decimal(str(share)) for share in split),
            split_mode=str(options.get("split_mode") or "layer"),
            main_gpu=_number(options, "main_gpu", 0),
            swa_full=flags.get("swa-full") is True,
            offload_cache=flags.get("kv-offload") is not False,
            embeddings=embeddings,
            pooling=_POOLING.get(str(pooling)) if pooling else None,
            cpu_moe_layers=_number(options, "cpu_moe_layers", 0),
            memory_mapped=options.get("load_mode") in (None, "auto", "mmap", "mmap+mlock"),
            repack=flags.get("repack") is not False,
            projector_bytes=projector_bytes,
        )


_POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}


def physical_batch(shape: ModelShape, run: RunShape) -> int:
    """Tokens that are computed at once (`llama_context`'s constructor)."""
    context = (run.context or shape.context_train) * run.slots
    batch = min(context, run.batch) if shape.causal else run.batch
    return min(batch, run.ubatch)


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def _number(options: Options, name: str, default: int) -> int:
    value = options.get(name)
    return default if value is None else int(cast("int", value))
