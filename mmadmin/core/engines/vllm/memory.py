"""How vLLM divides a GPU: weights by tensor parallelism, and what is left as K/V pool.

vLLM takes `gpu-memory-utilization` of each GPU's whole memory: weights and the peak of one profiled
step first, the rest becomes the K/V pool. So the question is not whether it fits but how many
tokens the pool holds. Sizes are bytes.

Sources: vLLM's `determine_available_memory` (v1/worker/gpu_worker.py) and `get_kv_cache_config`
(v1/core/kv_cache_utils.py); the peak of a step is estimated from the logits and the widest hidden
layer, as vLLM profiles it with `max_num_batched_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from mmadmin.core.errors import InvalidSpec
from mmadmin.core.fit.estimate import MIB, Calibration, Device

BLOCK_TOKENS = 16
"""vLLM's default block size: tokens in a block of the pool."""
NCCL_BYTES = 600 * MIB
"""Buffers for tensor parallelism a rank (all-reduce workspaces): a guess."""
GRAPH_BYTES = 700 * MIB
"""CUDA graphs of the default batch sizes, a rank: a guess."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's dimensions, from its config.json and its files."""

    weight_bytes: int
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tower_bytes: int = 0
    """Of `weight_bytes`, the vision tower: every rank holds a share of it too."""


@dataclass(frozen=True, slots=True)
class VllmRun:
    """The options of `vllm serve` that decide about memory."""

    max_model_len: int
    tensor_parallel: int = 1
    utilization: Decimal = Decimal("0.92")
    cache_bytes: int = 2
    """Bytes an element of the K/V cache: 1 for fp8."""
    batched_tokens: int = 8192
    eager: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """What one GPU is divided into."""

    parts: Mapping[str, int]
    """`weights`, `activations`, `graphs`, `context`, `cache`."""
    tokens: int
    """Tokens that the pools of all ranks together hold."""
    max_model_len: int

    @property
    def fits(self) -> bool:
        """True when one request of the longest length can be served."""
        return self.tokens >= self.max_model_len

    @property
    def concurrency_milli(self) -> int:
        """How many requests of the longest length are served at once, in thousandths."""
        return self.tokens * 1000 // max(self.max_model_len, 1)


def token_bytes(checkpoint: Checkpoint, run: VllmRun) -> int:
    """Bytes of the K/V cache for one token, on each rank."""
    kv_heads = max(checkpoint.kv_heads // run.tensor_parallel, 1)
    return 2 * checkpoint.layers * kv_heads * checkpoint.head_size * run.cache_bytes


def predict_vllm(
    checkpoint: Checkpoint, run: VllmRun, device: Device, calibration: Calibration | None = None
) -> Pool:
    """The division of one of `tensor_parallel` like GPUs.

    Raises `InvalidSpec` when the heads do not divide among the ranks.
    """
    ranks = run.tensor_parallel
    if checkpoint.heads % ranks:
        raise InvalidSpec(
            f"{checkpoint.heads} attention heads cannot be shared by {ranks} GPUs",
            remedy="choose a number of GPUs that divides the heads",
            field="serve.tensor_parallel_size",
        )
    budget = int(device.total_bytes * run.utilization)
    context = (calibration or Calibration()).context(device.architecture)
    widest = max(checkpoint.hidden, 2 * checkpoint.feed_forward // ranks)
    parts = {
        "weights": -(-checkpoint.weight_bytes // ranks),
        "activations": 2 * run.batched_tokens * (2 * checkpoint.hidden + widest),
        "graphs": 0 if run.eager else GRAPH_BYTES,
        "context": context + (NCCL_BYTES if ranks > 1 else 0),
    }
    left = max(budget - sum(parts.values()), 0)
    tokens = left // token_bytes(checkpoint, run) // BLOCK_TOKENS * BLOCK_TOKENS
    return Pool({**parts, "cache": left}, tokens, run.max_model_len)


def largest_length(checkpoint: Checkpoint, run: VllmRun, device: Device) -> int:
    """The longest request that the pool holds; 0 when not even the weights fit."""
    return predict_vllm(checkpoint, run, device).tokens
