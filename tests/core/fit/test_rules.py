"""Every rule: a case in which it speaks, and the nearest one in which it does not."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmadmin.core.errors import InvalidInput, InvalidSpec
from mmadmin.core.fit.rules import RULES, Case, judge, overrulable, version_of
from mmadmin.core.spec.spec import parse_spec
from tests.support.spec_toml import spec_to_toml

V100, T4, A100, L40S, H100, B200 = (70,), (75,), (80,), (89,), (90,), (100,)
VLLM = Case("vllm", architectures=H100)
LLAMA = Case("llama-server", architectures=V100, model_format="gguf")
COMPRESSED = replace(VLLM, quantization="compressed-tensors")

CASES: dict[str, tuple[Case, Case]] = {
    "compressed-tensors-needs-sm80": (
        replace(COMPRESSED, architectures=V100 * 4),
        replace(COMPRESSED, architectures=A100),
    ),
    "awq-needs-sm75": (
        replace(VLLM, quantization="awq", architectures=V100),
        replace(VLLM, quantization="awq", architectures=T4),
    ),
    "fp8-needs-sm80": (
        replace(COMPRESSED, scheme="w8a8-fp8", architectures=T4),
        replace(COMPRESSED, scheme="w8a8-fp8", architectures=H100),
    ),
    "fp8-weight-only-below-sm89": (
        replace(VLLM, quantization="fp8", architectures=A100),
        replace(VLLM, quantization="fp8", architectures=L40S),
    ),
    "fp8-cache-needs-sm89": (
        replace(VLLM, cache_type="fp8_e4m3", architectures=A100),
        replace(VLLM, cache_type="fp8", architectures=H100),
    ),
    "nvfp4-weight-only-below-blackwell": (
        replace(COMPRESSED, scheme="nvfp4", architectures=H100),
        replace(COMPRESSED, scheme="nvfp4", architectures=B200),
    ),
    "nvfp4-needs-sm80": (
        replace(VLLM, quantization="nvfp4", architectures=T4),
        replace(VLLM, quantization="nvfp4", architectures=A100),
    ),
    "vllm-dropped-volta": (
        replace(VLLM, engine_version=(0, 9, 1), architectures=V100),
        replace(VLLM, engine_version=(0, 8, 5), architectures=V100),
    ),
    "triton-crashes-on-volta": (
        replace(VLLM, model_format="gguf", triton=(3, 2, 0), architectures=V100),
        replace(VLLM, model_format="gguf", triton=(3, 2, 0), architectures=A100),
    ),
    "vllm-graph-capture-crash": (
        replace(VLLM, model_architecture="mistral3", engine_version=(0, 26, 1)),
        replace(VLLM, model_architecture="mistral3", engine_version=(0, 26, 1), eager=True),
    ),
    "cuda13-has-no-volta": (replace(LLAMA, cuda=(13, 0)), replace(LLAMA, cuda=(12, 8))),
    "engine-not-built-for-the-gpu": (
        replace(LLAMA, built_for=(80, 90), architectures=V100),
        replace(LLAMA, built_for=(80,), architectures=(86,)),
    ),
    "driver-older-than-toolkit": (
        replace(LLAMA, driver=(470, 82, 1), cuda=(12, 8)),
        replace(LLAMA, driver=(550, 54, 15), cuda=(12, 8)),
    ),
    "bfloat16-needs-sm80": (
        replace(VLLM, compute_type="bfloat16", architectures=V100),
        replace(VLLM, compute_type="float16", architectures=V100),
    ),
    "bf16-weights-are-slow-below-sm80": (
        replace(LLAMA, weight_types=frozenset({"BF16", "F32"})),
        replace(LLAMA, weight_types=frozenset({"Q4_K", "F32"})),
    ),
    "images-need-memory-beside-the-cache": (
        replace(VLLM, images=4, memory_utilization=Decimal("0.92")),
        replace(VLLM, images=4, memory_utilization=Decimal("0.85")),
    ),
    "tekken-selects-another-tokenizer": (
        replace(VLLM, images=4, files=frozenset({"tekken.json", "config.json"})),
        replace(VLLM, images=0, files=frozenset({"tekken.json", "config.json"})),
    ),
    "split-length-is-the-number-of-gpus": (
        replace(LLAMA, tensor_split=(Decimal(8),) * 3, visible_gpus=4),
        replace(LLAMA, tensor_split=(Decimal(8),) * 4, visible_gpus=4),
    ),
    "context-is-divided-by-slots": (
        replace(LLAMA, total_context=65536, slots=4, wanted_context=65536),
        replace(LLAMA, total_context=65536 * 4, slots=4, wanted_context=65536),
    ),
    "context-beyond-training": (
        replace(LLAMA, wanted_context=65536, trained_context=8192),
        replace(LLAMA, wanted_context=8192, trained_context=8192),
    ),
    "tensor-parallel-divides-heads": (
        replace(VLLM, tensor_parallel=5, heads=96, kv_heads=8),
        replace(VLLM, tensor_parallel=4, heads=96, kv_heads=8),
    ),
    "groups-divide-among-gpus": (
        replace(VLLM, tensor_parallel=8, group_size=128, sharded_sizes=(12288, 17920)),
        replace(VLLM, tensor_parallel=4, group_size=128, sharded_sizes=(12288, 28672)),
    ),
}


def test_every_rule_has_a_case() -> None:
    """A rule without a test here, or with another's name, fails."""
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", list(CASES))
def test_a_rule_speaks_and_is_silent(name: str) -> None:
    """The rule is found in its case with its message, remedy and source, and not in its neighbour."""
    speaks, silent = CASES[name]
    found = {f.rule: f for f in judge(speaks).findings}
    assert name in found
    assert found[name].message
    assert "{" not in found[name].message
    assert found[name].remedy
    assert found[name].source
    assert name not in {f.rule for f in judge(silent).findings}


def test_the_first_deployment_passes_and_its_dead_ends_do_not() -> None:
    """GGUF by llama-server on V100 is clean; AWQ in compressed-tensors and BF16 are refused."""
    good = replace(
        LLAMA,
        architectures=V100 * 4,
        visible_gpus=4,
        tensor_split=(Decimal(8),) * 4,
        cuda=(12, 8),
        total_context=65536,
        wanted_context=65536,
        trained_context=262144,
        weight_types=frozenset({"Q4_K", "Q6_K", "F32"}),
        model_architecture="mistral3",
    )
    assert judge(good).findings == ()
    awq = replace(COMPRESSED, architectures=V100 * 4, engine_version=(0, 8, 5))
    assert [f.rule for f in judge(awq).refusals] == ["compressed-tensors-needs-sm80"]
    assert "7.0" in judge(awq).refusals[0].message
    bf16 = replace(VLLM, architectures=V100 * 4, weight_types=frozenset({"BF16"}))
    assert "bfloat16-needs-sm80" in {f.rule for f in judge(bf16).refusals}


def test_only_warnings_of_the_engine_can_be_overruled() -> None:
    """What a form offers: no refusal, no other engine's rule; messages without a case have no gaps."""
    offered = overrulable("llama-server")
    assert {rule.name for rule in offered} >= {"context-beyond-training"}
    assert all(r.severity == "warn" and r.engine in {"", "llama-server"} for r in offered)
    assert not any("{" in rule.about for rule in RULES)


def test_a_warning_is_overruled_with_a_reason() -> None:
    """The reason is kept, and the warning no longer stands in the way."""
    case = CASES["images-need-memory-beside-the-cache"][0]
    name = "images-need-memory-beside-the-cache"
    verdict = judge(case, {name: "one image at a time"})
    assert verdict.warnings == ()
    assert verdict.findings[0].overruled == "one image at a time"
    assert verdict.findings[0].as_json()["rule"] == name


@pytest.mark.parametrize(
    ("overruled", "message"),
    [
        ({"no-such-rule": "why not"}, "unknown rule"),
        ({"awq-needs-sm75": "I insist"}, "cannot be overridden"),
        ({"context-beyond-training": "  "}, "requires a reason"),
    ],
)
def test_what_cannot_be_overruled(overruled: dict[str, str], message: str) -> None:
    """Refusals, unknown rules and empty reasons are refused."""
    with pytest.raises(InvalidInput, match=message):
        judge(VLLM, overruled)


@pytest.mark.parametrize(
    ("text", "version"),
    [("12.8", (12, 8)), ("0.26.1rc2", (0, 26, 1)), ("v13", (13,)), ("nightly", None), ("", None)],
)
def test_versions(text: str, version: tuple[int, ...] | None) -> None:
    """A version is its leading numbers."""
    assert version_of(text) == version


@given(
    engine=st.sampled_from(["vllm", "llama-server"]),
    architectures=st.lists(st.sampled_from([70, 75, 80, 86, 89, 90, 100, 120]), max_size=4),
    quantization=st.sampled_from(["", "awq", "compressed-tensors", "fp8", "nvfp4"]),
    images=st.integers(0, 4),
)
def test_refusals_come_first_and_unknowns_say_nothing(
    engine: str, architectures: list[int], quantization: str, images: int
) -> None:
    """Order is by severity, and a case without GPUs triggers no hardware rule."""
    case = Case(
        engine, architectures=tuple(architectures), quantization=quantization, images=images
    )
    verdict = judge(case)
    severities = [f.severity for f in verdict.findings]
    assert severities == sorted(severities, key=lambda s: s != "refuse")
    if not architectures:
        assert verdict.findings == ()


def test_reasons_are_written_in_the_deployment_file() -> None:
    """`[activation.overrule]` keeps the reason with the generation; bad names say where."""
    text = (Path(__file__).parents[3] / "deployments/catalog/smollm2-135m.toml").read_text()
    overrule = '\n[activation.overrule]\n{} = "{}"\n'
    spec = parse_spec(text + overrule.format("context-beyond-training", "rope scaling"))
    assert spec.activation.overrule == {"context-beyond-training": "rope scaling"}
    assert parse_spec(spec_to_toml(spec)) == spec
    for name, reason in (
        ("awq-needs-sm75", "please"),
        ("nothing", "x"),
        ("context-beyond-training", ""),
    ):
        with pytest.raises(InvalidSpec) as caught:
            parse_spec(text + overrule.format(name, reason))
        assert caught.value.details["field"] == f"activation.overrule.{name}"


def test_the_page_of_rules_is_the_rules() -> None:
    """docs/rules.md has each rule's row as it is in the code."""
    page = (Path(__file__).parents[3] / "docs" / "rules.md").read_text(encoding="utf-8")
    for r in RULES:
        assert f"| `{r.name}` | {r.severity} | {r.message} | {r.remedy} | {r.source} |" in page
