"""The `[serve]` table of llama-server as one typed object.

It is made once, when a deployment file is parsed or a manifest is read. None = not set: the
server gets no flag for it and decides. What the server then takes, where the memory model or a
check must know it, is one of the constants below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.fields import FIELDS
from mmadmin.core.engines.llama_server.run_shape import RunShape
from mmadmin.core.engines.protocol import Task
from mmadmin.core.spec.fields import Field, decimal_text, refuse_unknown

BATCH = 2048
UBATCH = 512
CACHE_TYPE = "f16"
FLASH_ATTENTION = "auto"
SPLIT_MODE = "layer"
MAPPED_LOADS = frozenset({"auto", "mmap", "mmap+mlock"})
POOLING: Mapping[str, int] = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaOptions:
    """How llama-server serves: one attribute for each field of `[serve]`."""

    context: int
    """Tokens a slot; 0 = as trained."""
    slots: int
    gpu_layers: int | None
    tensor_split: tuple[Decimal, ...] | None
    jinja: bool | None
    reasoning: str | None
    reasoning_format: str | None
    temperature: Decimal | None
    top_p: Decimal | None
    top_k: int | None
    min_p: Decimal | None
    repeat_penalty: Decimal | None
    presence_penalty: Decimal | None
    frequency_penalty: Decimal | None
    seed: int | None
    max_tokens: int | None
    flash_attention: str | None
    cache_type_k: str | None
    cache_type_v: str | None
    threads: int | None
    threads_batch: int | None
    batch: int | None
    ubatch: int | None
    split_mode: str | None
    main_gpu: int | None
    load_mode: str | None
    kv_unified: bool | None
    cache_reuse: int | None
    cache_ram_mib: int | None
    cpu_moe_layers: int | None
    reasoning_effort: str | None
    reasoning_budget: int | None
    chat_template_kwargs: str | None
    embeddings: bool | None
    reranking: bool | None
    pooling: str | None
    sse_ping_s: int | None
    flags: Mapping[str, Json]
    """Further options of the server by their long names."""

    @property
    def task(self) -> Task:
        """What the server is for."""
        if self.embeddings:
            return "embedding"
        return "rerank" if self.reranking else "completion"

    def run_shape(self, projector_bytes: int = 0) -> RunShape:
        """What decides about memory; `projector_bytes` is the size of the projector's file."""
        batch = self.batch or BATCH
        ubatch = min(self.ubatch or UBATCH, batch)
        embeddings = self.task != "completion"
        return RunShape(
            context=self.context,
            slots=self.slots,
            unified=bool(self.kv_unified),
            batch=ubatch if embeddings else batch,
            ubatch=ubatch,
            cache_type_k=self.cache_type_k or CACHE_TYPE,
            cache_type_v=self.cache_type_v or CACHE_TYPE,
            flash_attention=(self.flash_attention or FLASH_ATTENTION) != "off",
            gpu_layers=self.gpu_layers,
            tensor_split=self.tensor_split or (),
            split_mode=self.split_mode or SPLIT_MODE,
            main_gpu=self.main_gpu or 0,
            swa_full=self.flags.get("swa-full") is True,
            offload_cache=self.flags.get("kv-offload") is not False,
            embeddings=embeddings,
            pooling=POOLING[self.pooling] if self.pooling else None,
            cpu_moe_layers=self.cpu_moe_layers or 0,
            memory_mapped=(self.load_mode or "auto") in MAPPED_LOADS,
            repack=self.flags.get("repack") is not False,
            projector_bytes=projector_bytes,
        )


_FIELDS: Mapping[str, Field] = {field.name: field for field in FIELDS}


def read_options(table: Mapping[str, Json]) -> LlamaOptions:
    """The options that a `[serve]` table or a manifest's `options` sets.

    The values were checked against `FIELDS` when the file was parsed. Raises `InvalidSpec` for an
    option that this version does not know.
    """
    refuse_unknown(table, _FIELDS, "serve")
    return LlamaOptions(
        **{name: _typed(field, table.get(name, field.default)) for name, field in _FIELDS.items()}
    )


def _typed(field: Field, value: Json) -> Any:
    """A value of a table as its attribute: decimals as `Decimal`, lists as tuples."""
    if value is None:
        return None
    if field.kind == "decimal":
        return Decimal(str(value))
    if field.kind == "decimals":
        return tuple(Decimal(str(item)) for item in cast("list[Json]", value))
    return value


def option_text(value: object) -> str:
    """An option's value as a word of the command."""
    if isinstance(value, list | tuple):
        return ",".join(option_text(item) for item in value)
    return decimal_text(value) if isinstance(value, Decimal) else str(value)
