"""Memory by device, from headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmadmin.core.engines.llama_server.caches import cache_bytes
from mmadmin.core.engines.llama_server.engine import ENGINE
from mmadmin.core.engines.llama_server.memory import predict
from mmadmin.core.engines.llama_server.options import read_options
from mmadmin.core.engines.llama_server.spec import LlamaBuild
from mmadmin.core.engines.llama_server.suggest import (
    best_split,
    largest_context,
    most_slots,
    suggest,
)
from mmadmin.core.engines.llama_server.weights import place_layers
from mmadmin.core.errors import InvalidModel, InvalidSpec
from mmadmin.core.fit.described_host import described_host
from mmadmin.core.fit.estimate import HOST, Calibration, Device, Room, fits
from mmadmin.core.formats.gguf.shape import shape_of
from tests.core.formats.gguf.tables import llama, mistral_medium, table
from tests.support.llama import run_shape

GIB = 1024**3
HOSTS = Path(__file__).parents[4] / "deployments" / "hosts"
V100 = Device(70, 32 * GIB, int(31.4 * GIB), "Tesla V100-SXM2-32GB")
EVEN = (Decimal(8),) * 4
SEED = run_shape(context=65536, gpu_layers=99, tensor_split=EVEN)
SMALL = {
    "layers": 4,
    "embedding": 256,
    "feed_forward": 512,
    "heads": 8,
    "kv_heads": 2,
    "head_size": 32,
    "vocabulary": 1024,
}


def test_the_first_deployment_needs_what_its_cards_show() -> None:
    """128B in Q4_K_M with 64K context: each of four V100s is filled as its owners report."""
    made = predict(mistral_medium("Q4_K_M"), SEED, [V100] * 4)
    for used in made.per_device:
        assert 23 * GIB - 1.5 * GIB <= used <= 25 * GIB + 1.5 * GIB
    assert fits(made, [V100] * 4)
    assert made.context == 65536
    assert made.part("cache") == 22 * GIB


@pytest.mark.parametrize(("quant", "at_least_gib"), [("Q5_K_M", 26.5), ("Q6_K", 30)])
def test_larger_quants_are_tighter(quant: str, at_least_gib: float) -> None:
    """Q5_K_M and Q6_K leave less room for the cache."""
    made = predict(mistral_medium(quant), SEED, [V100] * 4)
    smaller = predict(mistral_medium("Q4_K_M"), SEED, [V100] * 4)
    assert min(made.per_device) > at_least_gib * GIB
    assert min(made.per_device) > max(smaller.per_device)


def test_bf16_does_not_fit_and_nothing_would_make_it() -> None:
    """248 GB of weights have no place on 128 GB of cards, whatever the context."""
    shape = mistral_medium("BF16")
    assert not fits(predict(shape, SEED, [V100] * 4), [V100] * 4)
    assert largest_context(shape, SEED, [V100] * 4, Room()) == 0
    assert suggest(shape, SEED, [V100] * 4, Room()) == []


def test_layers_go_where_the_loader_puts_them() -> None:
    """88 layers and the output under an even split of four: 23, 22, 22 and 21 with the output."""
    where = place_layers(mistral_medium(), SEED, [V100] * 4)
    assert Counter(where[:-1]) == {0: 23, 1: 22, 2: 22, 3: 21}
    assert where[-1] == 3


def test_some_layers_stay_on_the_host() -> None:
    """With few GPU layers the first ones stay in main memory, with their share of the cache."""
    shape = llama(**SMALL)
    made = predict(shape, run_shape(context=1024, gpu_layers=3), [V100])
    assert made.layer_devices == (HOST, HOST, 0, 0, 0)
    assert made.host["cache"] == made.devices[0]["cache"]
    nothing = predict(shape, run_shape(context=1024, gpu_layers=0), [V100])
    assert nothing.per_device == (0,)


def test_the_split_must_name_every_gpu() -> None:
    """A share too few or too many is refused with the number to write."""
    with pytest.raises(InvalidSpec, match="3 shares for 4 GPUs"):
        predict(mistral_medium(), replace(SEED, tensor_split=EVEN[:3]), [V100] * 4)


def test_weights_are_counted_once_wherever_they_go() -> None:
    """Four cards and the host together hold every tensor."""
    shape = mistral_medium()
    made = predict(shape, SEED, [V100] * 4)
    assert made.part("weights") + made.part("mapped") == pytest.approx(
        shape.weight_bytes, rel=0.001
    )


def test_tied_embeddings_are_held_twice_beside_a_gpu() -> None:
    """A model whose output is its embeddings keeps one copy on the host and one on the GPU."""
    tied, untied = llama(**SMALL, tied=True), llama(**SMALL)
    on_gpu = [
        predict(s, run_shape(context=512), [V100]).devices[0]["weights"] for s in (tied, untied)
    ]
    assert on_gpu[0] == on_gpu[1]
    assert tied.weight_bytes < untied.weight_bytes


@pytest.mark.parametrize(
    ("cache_type", "per_element"),
    [("f16", 2), ("f32", 4), ("q8_0", Decimal(34) / 32), ("q4_0", Decimal(18) / 32)],
)
def test_cache_by_type(cache_type: str, per_element: Decimal) -> None:
    """Grouped heads: keys and values of the K/V heads only, for every cell."""
    run = run_shape(context=4096, cache_type_k=cache_type, cache_type_v=cache_type)
    made = predict(llama(**SMALL), run, [V100])
    assert made.devices[0]["cache"] == 4 * 2 * (2 * 32) * 4096 * per_element


def test_slots_multiply_the_cache() -> None:
    """Each slot has the context of its own; a unified cache has as many cells."""
    one = predict(llama(**SMALL), run_shape(context=2048), [V100]).part("cache")
    four = predict(llama(**SMALL), run_shape(context=2048, slots=4), [V100])
    unified = predict(llama(**SMALL), run_shape(context=2048, slots=4, unified=True), [V100])
    assert four.part("cache") == unified.part("cache") == 4 * one
    assert four.context == 2048
    assert unified.context == 8192


def test_sliding_windows_keep_only_their_window() -> None:
    """Five of six layers of a gemma3 keep window + batch cells, the sixth the whole context."""
    sizes = SMALL | {"layers": 6}
    shape = llama(**sizes, arch="gemma3", **{"attention.sliding_window": 512})
    run = run_shape(context=32768)
    assert shape.window_layers == frozenset({0, 1, 2, 3, 4})
    row = 2 * 2 * (2 * 32)
    assert predict(shape, run, [V100]).part("cache") == row * (32768 + 5 * 1024)
    full = predict(shape, replace(run, swa_full=True), [V100])
    assert full.part("cache") == row * 6 * 32768


def test_latent_attention_keeps_keys_only() -> None:
    """A DeepSeek cache holds the compressed keys once and no values."""
    extra = {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
    sizes = SMALL | {"kv_heads": 1, "head_size": 576}
    shape = llama(**sizes, arch="deepseek2", **extra)
    assert predict(shape, run_shape(context=1024), [V100]).part("cache") == 4 * 576 * 1024 * 2


def test_layers_without_a_cache_take_none() -> None:
    """Shared and recurrent layers have no K/V cells of their own."""
    shared = llama(**SMALL, arch="gemma4", **{"attention.shared_kv_layers": 3})
    run = run_shape(context=1024)
    assert [bool(cache_bytes(shared, run, i, 1024, 1024)) for i in range(4)] == [True] + [False] * 3
    hybrid = llama(
        **(SMALL | {"kv_heads": 2}),
        arch="qwen35",
        full_attention_interval=4,
        **{"ssm.state_size": 16, "ssm.inner_size": 256, "ssm.conv_kernel": 4, "ssm.group_count": 2},
    )
    assert hybrid.recurrent_layers == frozenset({0, 1, 2})
    assert predict(hybrid, run_shape(context=1024, slots=2), [V100]).part("state") == (
        3 * 2 * 4 * (3 * (256 + 64) + 16 * 256)
    )


def test_a_cpu_host_has_no_device_parts() -> None:
    """Without GPUs everything is main memory, and the file is mapped."""
    made = predict(llama(**SMALL), run_shape(context=512))
    assert made.per_device == ()
    assert made.host["mapped"] > 0
    assert made.host["cache"] == 4 * 2 * 2 * (2 * 32) * 512
    assert made.resident_bytes == made.host_bytes


def test_repacked_weights_are_a_second_copy() -> None:
    """Q4_K matrices are repacked on a CPU with AVX2, and only there."""
    shape = llama(**SMALL, quant="Q4_K_M")
    with_it = predict(shape, run_shape(context=512), cpu_features=("avx2",))
    without = predict(shape, run_shape(context=512), cpu_features=())
    assert with_it.host["repacked"] > 0
    assert "repacked" not in without.host
    assert "repacked" not in predict(shape, run_shape(context=512, repack=False)).host


def test_buffers_beside_a_gpu_as_they_were_measured() -> None:
    """One H200, the 128B shape with a 32,000-word vocabulary, 64K context: the engine's own sizes.

    compute buffer 0.320 GiB on the GPU and 0.156 GiB on the host (docs/measurements.md).
    """
    shape = llama(
        layers=88,
        embedding=12288,
        feed_forward=28672,
        heads=96,
        kv_heads=8,
        head_size=128,
        vocabulary=32000,
        quant="Q4_K_M",
        context=262144,
    )
    card = Device(90, 140 * GIB, 139 * GIB)
    made = predict(shape, run_shape(context=65536), [card])
    assert made.devices[0]["compute"] == pytest.approx(0.320 * GIB, rel=0.005)
    assert made.host["compute"] == pytest.approx(0.156 * GIB, rel=0.005)
    assert made.devices[0]["cache"] == 22 * GIB


def test_what_a_host_has_shown_replaces_the_constant() -> None:
    """A calibrated CUDA context is used instead of the table."""
    shape = llama(**SMALL)
    shown = Calibration({70: 777})
    made = predict(shape, run_shape(context=512), [V100], calibration=shown)
    assert made.devices[0]["context"] == 777


def test_options_become_a_run() -> None:
    """The serve table is read with the engine's own defaults."""
    run = read_options(
        {
            "context": 65536,
            "gpu_layers": 99,
            "tensor_split": [8, 8, 8, 8],
            "slots": 2,
            "cache_type_k": "q8_0",
            "flash_attention": "off",
            "flags": {"swa-full": True, "kv-offload": False},
        }
    ).run_shape()
    assert run == run_shape(
        context=65536,
        slots=2,
        cache_type_k="q8_0",
        flash_attention=False,
        gpu_layers=99,
        tensor_split=EVEN,
        swa_full=True,
        offload_cache=False,
    )
    assert (
        read_options({"embeddings": True, "batch": 4096, "ubatch": 1024}).run_shape().batch == 1024
    )


def test_the_memory_model_is_the_prediction() -> None:
    """From the `[serve]` table as from the run's shape; a projector comes on top."""
    shape, memory = mistral_medium("Q4_K_M"), ENGINE.memory
    serve = {"context": 65536, "gpu_layers": 99, "tensor_split": ["8", "8", "8", "8"]}
    options = read_options(serve)
    assert memory.estimate(shape, options, [V100] * 4) == predict(shape, SEED, [V100] * 4)
    seeing = memory.estimate(shape, options, [V100] * 4, attachment_bytes=GIB)
    assert seeing.part("projector") > GIB
    assert memory.device_count(options) == 4
    assert memory.device_count(read_options({"context": 1})) is None
    v100s = described_host(HOSTS, "v100x4")
    no_toolkit = replace(v100s, cuda="")
    assert memory.uses_gpus(options, None, v100s)
    assert memory.uses_gpus(options, LlamaBuild(), v100s)
    assert not memory.uses_gpus(options, LlamaBuild(), no_toolkit)
    assert not memory.uses_gpus(options, LlamaBuild(backend="cpu"), v100s)
    assert not memory.uses_gpus(read_options({"gpu_layers": 0}), LlamaBuild(), v100s)
    reach = memory.reach(shape, options, [V100] * 4, Room())
    assert reach.largest_context == largest_context(shape, SEED, [V100] * 4, Room())
    assert reach.most_slots == most_slots(shape, SEED, [V100] * 4, Room())


LLAMA_HEADER = {"general.architecture": "llama", "llama.embedding_length": 64}


def test_a_header_without_dimensions_is_refused() -> None:
    """A file that is no model says so by the missing key."""
    with pytest.raises(InvalidModel, match=r"general\.architecture"):
        shape_of({}, [])
    for layers in (0, -5, 20_000_000, 2**32 - 1):
        with pytest.raises(InvalidModel, match="block_count"):
            shape_of({**LLAMA_HEADER, "llama.block_count": layers}, [table([])])
    drafts = {"llama.block_count": 2, "llama.nextn_predict_layers": 2}
    with pytest.raises(InvalidModel, match="block_count"):
        shape_of({**LLAMA_HEADER, **drafts}, [table([])])
    with pytest.raises(InvalidModel, match=r"llama\.embedding_length"):
        shape_of({"general.architecture": "llama"}, [table([])])


def test_the_largest_context_fits_and_the_next_does_not() -> None:
    """The suggestion is the edge: 1024 tokens more would not fit."""
    shape, cards = mistral_medium("Q6_K"), [V100] * 4
    context = largest_context(shape, SEED, cards, Room())
    assert 0 < context < 262144
    assert fits(predict(shape, replace(SEED, context=context), cards), cards)
    assert not fits(predict(shape, replace(SEED, context=context + 1024), cards), cards)


def test_the_most_slots_for_a_wanted_context() -> None:
    """Slots that each have the whole context: one more would not fit."""
    shape, cards = mistral_medium("Q4_K_M"), [V100] * 4
    run = replace(SEED, context=8192)
    slots = most_slots(shape, run, cards, Room())
    assert 1 < slots < 32
    assert fits(predict(shape, replace(run, slots=slots), cards), cards)
    assert not fits(predict(shape, replace(run, slots=slots + 1), cards), cards)
    assert most_slots(mistral_medium("BF16"), run, cards, Room()) == 0


def test_the_best_split_leaves_more_room_than_the_even_one() -> None:
    """The fullest card has at least as much room as under equal shares."""
    shape, cards = mistral_medium("Q6_K"), [V100] * 4
    split = best_split(shape, SEED, cards)
    even = predict(shape, SEED, cards)
    best = predict(shape, replace(SEED, tensor_split=split), cards)
    assert max(best.per_device) <= max(even.per_device)
    assert sum(split) == 89


def test_suggestions_fit_and_say_what_they_change() -> None:
    """Each suggestion is a set of options whose prediction fits."""
    cards = [V100] * 4
    shape = mistral_medium("Q6_K")
    run = replace(SEED, context=131072)
    found = suggest(shape, run, cards, Room())
    assert found
    for one in found:
        assert fits(one.estimate, cards)
        assert one.message
        options = dict(one.options)
        split = tuple(map(Decimal, options.pop("tensor_split")))
        assert predict(shape, replace(run, tensor_split=split, **options), cards) == one.estimate


@settings(max_examples=40, deadline=None)
@given(
    context=st.integers(1, 64).map(lambda n: n * 512),
    more=st.integers(1, 16).map(lambda n: n * 512),
    slots=st.integers(1, 4),
    shares=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_more_context_never_takes_less(
    context: int, more: int, slots: int, shares: list[int]
) -> None:
    """Memory grows with the context, and a split moves weights without losing any."""
    shape = llama(**SMALL)
    cards = [V100] * len(shares)
    run = run_shape(context=context, slots=slots, tensor_split=tuple(map(Decimal, shares)))
    small, large = (predict(shape, r, cards) for r in (run, replace(run, context=context + more)))
    for a, b in zip(small.per_device, large.per_device, strict=True):
        assert a <= b
    assert small.part("weights") == large.part("weights")
    assert small.part("weights") == predict(shape, replace(run, tensor_split=()), [V100]).part(
        "weights"
    )
