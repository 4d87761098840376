"""The `[serve]` table of vLLM as one typed object.

None = not set: the server gets no flag for it and decides. What it then takes, where the memory
model or a rule must know it, is one of the constants below (vLLM 0.32, `config/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.vllm.fields import FIELDS
from mmadmin.core.spec.fields import Field, refuse_unknown

UTILIZATION = Decimal("0.92")
BATCHED_TOKENS = 8192
SEQUENCES = 256
"""Requests at once, on most GPUs."""
IMAGES = 999
"""Images in a request."""
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How vLLM serves: one attribute for each field of `[serve]`."""

    max_model_len: int | None
    tensor_parallel_size: int | None
    gpu_memory_utilization: Decimal | None
    limit_mm_per_prompt: Mapping[str, Json]
    tokenizer_mode: str | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    enable_auto_tool_choice: bool | None
    dtype: str | None
    kv_cache_dtype: str | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enforce_eager: bool | None
    enable_prefix_caching: bool | None
    generation_config: str | None
    cpu_cache_gib: int
    flags: Mapping[str, Json]
    """Further options by their long names."""

    @property
    def utilization(self) -> Decimal:
        """The share of each GPU that it takes."""
        return self.gpu_memory_utilization or UTILIZATION

    @property
    def images(self) -> int:
        """Images in a request, for a model that takes any."""
        most = self.limit_mm_per_prompt.get("image", IMAGES)
        return most if isinstance(most, int) else IMAGES


_FIELDS: Mapping[str, Field] = {field.name: field for field in FIELDS}


def read_options(table: Mapping[str, Json]) -> VllmOptions:
    """The options that a `[serve]` table or a manifest's `options` sets.

    The values were checked against `FIELDS` when the file was parsed. Raises `InvalidSpec` for an
    option that this version does not know.
    """
    refuse_unknown(table, _FIELDS, "serve")
    return VllmOptions(
        **{name: _typed(field, table.get(name, field.default)) for name, field in _FIELDS.items()}
    )


def _typed(field: Field, value: Json) -> Any:
    return Decimal(str(value)) if field.kind == "decimal" and value is not None else value
