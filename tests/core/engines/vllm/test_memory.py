"""How vLLM divides a GPU, for the published checkpoints of the 128B model."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.engines.vllm.memory import Checkpoint, VllmRun, largest_length, predict_vllm
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.fit.estimate import Device

GIB = 1 << 30
H100 = Device(90, 80 * GIB, 79 * GIB)
H200 = Device(90, 140 * GIB, 139 * GIB)
V100 = Device(70, 32 * GIB, 31 * GIB)
FP8 = Checkpoint(int(124.5 * GIB), 88, 12288, 28672, 96, 8, 128, 131072)
W4A16 = replace(FP8, weight_bytes=70 * GIB)


def test_the_fp8_checkpoint_on_four_h100() -> None:
    """31 GiB of weights a GPU at TP 4; 32K requests fit, several at once, at 0.85."""
    pool = predict_vllm(FP8, VllmRun(32768, 4, Decimal("0.85")), H100)
    assert pool.parts["weights"] == pytest.approx(31.1 * GIB, rel=0.01)
    assert pool.fits
    assert pool.concurrency_milli > 5000
    assert sum(pool.parts.values()) <= 0.85 * 80 * GIB


def test_the_int4_checkpoint_on_two_h200() -> None:
    """About 35 GiB a GPU at TP 2, as its card says; the fp8 cache doubles what the pool holds."""
    run = VllmRun(65536, 2, Decimal("0.92"))
    pool = predict_vllm(W4A16, run, H200)
    assert pool.parts["weights"] == 35 * GIB
    assert pool.fits
    doubled = predict_vllm(W4A16, replace(run, cache_bytes=1), H200)
    assert doubled.tokens == pytest.approx(2 * pool.tokens, abs=32)


def test_the_original_has_no_place_on_four_v100() -> None:
    """248 GB in 16 bits on 128 GB of cards: no pool is left."""
    run = VllmRun(1024, 4)
    assert largest_length(replace(FP8, weight_bytes=248 * 10**9), run, V100) == 0
    assert not predict_vllm(replace(FP8, weight_bytes=248 * 10**9), run, V100).fits


def test_heads_must_divide() -> None:
    """Five GPUs cannot share 96 heads."""
    with pytest.raises(InvalidSpec, match="96 attention heads"):
        predict_vllm(FP8, VllmRun(1024, 5), H100)


@given(
    utilization=st.integers(10, 98), ranks=st.sampled_from([1, 2, 4, 8]), total=st.integers(8, 200)
)
def test_the_parts_never_exceed_the_share(utilization: int, ranks: int, total: int) -> None:
    """A pool is what the share leaves: parts add up to it, or the pool is empty."""
    device = Device(90, total * GIB, total * GIB)
    run = VllmRun(4096, ranks, Decimal(utilization) / 100)
    pool = predict_vllm(W4A16, run, device)
    budget = int(device.total_bytes * run.utilization)
    assert sum(pool.parts.values()) == budget or (pool.parts["cache"] == 0 and pool.tokens == 0)
