"""Known problems, reported before any work starts: rules as data.

A rule is a predicate over a `Case` (engine, host, model, options), its message, what works instead
and where it is known from. A refusal cannot be overruled; a warning can, with a reason that is
kept with the generation. Adding a rule is adding one entry to `RULES` and one test.

A field of the case that is not known (None, empty) triggers no rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidInput

Severity = Literal["refuse", "warn"]
Version = tuple[int, ...]

VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL = 70, 75, 80, 89, 90, 100
"""CUDA architecture numbers: compute capability x 10."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a deployment would be, as far as it is known."""

    engine: str
    """`llama-server`, `vllm`."""
    engine_version: Version | None = None
    architectures: tuple[int, ...] = ()
    """CUDA architectures of the GPUs it would sit on; empty = CPU only."""
    visible_gpus: int | None = None
    cuda: Version | None = None
    """Toolkit that builds the engine."""
    triton: Version | None = None
    model_format: str = ""
    """`gguf`, `checkpoint`."""
    model_architecture: str = ""
    """`mistral3`."""
    quantization: str = ""
    """`compressed-tensors`, `awq`, `gptq`, `fp8`, `nvfp4`; empty = none."""
    scheme: str = ""
    """`w8a8-fp8`, `w4a16`, `nvfp4`: what a compressed-tensors checkpoint holds."""
    weight_types: frozenset[str] = frozenset()
    """Types of its matrices: `BF16`, `Q4_K`."""
    compute_type: str = ""
    """`bfloat16` when it is asked for by name."""
    cache_type: str = ""
    """`fp8`, `f16`, `q8_0`."""
    built_for: tuple[int, ...] = ()
    """CUDA architectures that the engine is built for; empty = those of its GPUs, or not known."""
    driver: Version | None = None
    files: frozenset[str] = frozenset()
    """Names of the model's files."""
    images: int = 0
    """Images that one request may hold."""
    memory_utilization: Decimal | None = None
    tensor_parallel: int | None = None
    group_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    sharded_sizes: tuple[int, ...] = ()
    """Input sizes that tensor parallelism cuts: hidden and feed-forward size."""
    tensor_split: tuple[Decimal, ...] = ()
    total_context: int | None = None
    """Tokens given to the engine for all slots."""
    slots: int = 1
    wanted_context: int | None = None
    """Tokens that one request shall be able to use."""
    trained_context: int | None = None
    eager: bool = False
    """CUDA graphs are off."""

    @property
    def oldest(self) -> int | None:
        """The lowest architecture among its GPUs."""
        return min(self.architectures, default=None)


@dataclass(frozen=True, slots=True)
class Rule:
    """One piece of knowledge."""

    name: str
    """Stable: the reason of an overruled warning is kept under it."""
    severity: Severity
    message: str
    """The fact; `{…}` names fields of the case."""
    remedy: str
    """What would work instead."""
    source: str
    """Where this is known from."""
    applies: Callable[[Case], bool] = field(repr=False)
    engine: str = ""
    """The one engine that it is about; empty = every engine."""

    def speaks(self, case: Case) -> bool:
        """True when it has something to say of the case."""
        return self.engine in {"", case.engine} and self.applies(case)

    @property
    def about(self) -> str:
        """Its message where no case is known: figures are left out."""
        return re.sub(r"\{\w+\}", "…", self.message)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that speaks in a case."""

    rule: str
    severity: Severity
    message: str
    remedy: str
    source: str
    overruled: str = ""
    """The operator's reason, when a warning was overruled."""

    def as_json(self) -> dict[str, Json]:
        """Plain data, for records and pages."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "words": self.message,
            "remedy": self.remedy,
            "source": self.source,
            "overruled": self.overruled,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings of a case, refusals first."""

    findings: tuple[Finding, ...]

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """What forbids it."""
        return tuple(f for f in self.findings if f.severity == "refuse")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What an operator has yet to overrule, or to heed."""
        return tuple(f for f in self.findings if f.severity == "warn" and not f.overruled)


def judge(
    case: Case,
    overruled: Mapping[str, str] | None = None,
    *,
    rules: Iterable[Rule] | None = None,
) -> Verdict:
    """Every rule that speaks, in the order of `RULES`, refusals first.

    `overruled` maps a rule's name to the operator's reason. Raises `InvalidInput` when it names no
    rule, names a refusal, or gives no reason.
    """
    known = tuple(RULES if rules is None else rules)
    reasons = dict(overruled or {})
    check_overruled(reasons, known)
    findings = [
        Finding(
            rule=rule.name,
            severity=rule.severity,
            message=rule.message.format(**_values(case)),
            remedy=rule.remedy.format(**_values(case)),
            source=rule.source,
            overruled=reasons.get(rule.name, ""),
        )
        for rule in known
        if rule.speaks(case)
    ]
    return Verdict(tuple(sorted(findings, key=lambda f: f.severity != "refuse")))


def overrulable(engine: str) -> tuple[Rule, ...]:
    """The warnings of an engine: what an operator may overrule with a reason."""
    return tuple(r for r in RULES if r.severity == "warn" and r.engine in {"", engine})


def check_overruled(reasons: Mapping[str, str], rules: Iterable[Rule] | None = None) -> None:
    """Refuse what cannot be overruled: unknown rules, refusals, and no reason (`InvalidInput`)."""
    known = {rule.name: rule for rule in (RULES if rules is None else rules)}
    for name, reason in reasons.items():
        if name not in known:
            raise InvalidInput(f"unknown rule {name!r}", remedy="see docs/rules.md")
        if known[name].severity == "refuse":
            raise InvalidInput(f"the rule {name!r} cannot be overridden", remedy=known[name].remedy)
        if not reason.strip():
            raise InvalidInput(
                f"overriding {name!r} requires a reason", remedy="explain why it is safe here"
            )


def _values(case: Case) -> dict[str, str]:
    """The case's fields as text, for the messages of rules."""
    oldest = case.oldest
    per_slot = (case.total_context or 0) // max(case.slots, 1)
    return {
        "sm": f"{oldest // 10}.{oldest % 10}" if oldest else "none",
        "version": ".".join(str(n) for n in case.engine_version or ()),
        "cuda": ".".join(str(n) for n in case.cuda or ()),
        "triton": ".".join(str(n) for n in case.triton or ()),
        "utilization": str(case.memory_utilization),
        "shares": str(len(case.tensor_split)),
        "gpus": str(case.visible_gpus),
        "total": str(case.total_context),
        "slots": str(case.slots),
        "per_slot": str(per_slot),
        "wanted": str(case.wanted_context),
        "trained": str(case.trained_context),
        "tp": str(case.tensor_parallel),
        "heads": str(case.heads),
        "group": str(case.group_size),
        "built": ", ".join(f"{number // 10}.{number % 10}" for number in sorted(case.built_for)),
        "driver": ".".join(str(n) for n in case.driver or ()),
        "needed": ".".join(str(n) for n in _least_driver(case.cuda or ())),
    }


def version_of(text: str) -> Version | None:
    """`"12.8"` → (12, 8); None when it does not begin with numbers."""
    numbers: list[int] = []
    for part in text.strip().removeprefix("v").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers) or None


def _below(case: Case, architecture: int) -> bool:
    return case.oldest is not None and case.oldest < architecture


LEAST_DRIVER: Mapping[int, Version] = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest driver that runs programs of a CUDA major version."""


def _least_driver(cuda: Version) -> Version:
    return LEAST_DRIVER.get(cuda[0], ()) if cuda else ()


def _release(version: Version | None, *prefixes: Version) -> bool:
    return version is not None and any(version[: len(prefix)] == prefix for prefix in prefixes)


def _uneven_groups(case: Case) -> bool:
    ranks, group = case.tensor_parallel, case.group_size
    return bool(ranks and group) and any(
        size % (ranks or 1) or (size // (ranks or 1)) % (group or 1) for size in case.sharded_sizes
    )


def _uneven_heads(case: Case) -> bool:
    ranks = case.tensor_parallel
    if not ranks or not case.heads:
        return False
    kv_heads = case.kv_heads or case.heads
    # fewer K/V heads than ranks are replicated, which needs the ranks to be a multiple of them
    replicated = ranks % kv_heads if ranks > kv_heads else kv_heads % ranks
    return bool(case.heads % ranks or replicated)


_WALKTHROUGH = "field report: Mistral Medium 3.5 on 4 Tesla V100"
_FP8_CARD = "model card: Mistral-Medium-3.5-128B FP8 (W8A8 dynamic), measured on 4 H100"
_W4A16_CARD = "model card: Mistral-Medium-3.5-128B W4A16 KV8, measured on H200"
_GGUF_INSTEAD = "serve a GGUF (Q4_K_M) with llama-server, which supports this GPU"

RULES: tuple[Rule, ...] = (
    Rule(
        "compressed-tensors-needs-sm80",
        "refuse",
        "compressed-tensors checkpoints need compute capability 8.0; the GPU has {sm}",
        _GGUF_INSTEAD,
        f"{_WALKTHROUGH}: 'Min capability: 80. Current capability: 70.'",
        lambda c: c.quantization == "compressed-tensors" and _below(c, AMPERE),
        engine="vllm",
    ),
    Rule(
        "awq-needs-sm75",
        "refuse",
        "AWQ checkpoints need compute capability 7.5; the GPU has {sm}",
        _GGUF_INSTEAD,
        f"{_WALKTHROUGH}: the legacy AWQ loader's minimum is 75",
        lambda c: c.quantization == "awq" and _below(c, TURING),
        engine="vllm",
    ),
    Rule(
        "fp8-needs-sm80",
        "refuse",
        "FP8 weights (W8A8) need compute capability 8.9, or 8.0 as weights only; the GPU has {sm}",
        _GGUF_INSTEAD,
        "vLLM's supported hardware for quantization kernels",
        lambda c: _is_fp8(c) and _below(c, AMPERE),
        engine="vllm",
    ),
    Rule(
        "fp8-weight-only-below-sm89",
        "warn",
        "W8A8 runs weight-only without FP8 arithmetic (compute capability 8.9; the GPU has {sm}): "
        "it saves memory but not time, and the activation scheme is not applied",
        "use an Ada, Hopper or Blackwell GPU, or a W4A16 checkpoint",
        "vLLM's supported hardware for quantization kernels (FP8 Marlin on Ampere)",
        lambda c: _is_fp8(c) and not _below(c, AMPERE) and _below(c, ADA),
        engine="vllm",
    ),
    Rule(
        "fp8-cache-needs-sm89",
        "refuse",
        "an FP8 K/V cache needs compute capability 8.9; the GPU has {sm}",
        'set the cache type to 16 bits ("bfloat16" or "float16")',
        f"{_W4A16_CARD}; Triton's fp8e4nv type is not compiled below 8.9",
        lambda c: c.cache_type.startswith("fp8") and _below(c, ADA),
        engine="vllm",
    ),
    Rule(
        "nvfp4-weight-only-below-blackwell",
        "warn",
        "NVFP4 runs weight-only below compute capability 10.0 (the GPU has {sm}): the product is "
        "computed in BF16 and the checkpoint's activation quantization is not applied",
        "use a Blackwell GPU for W4A4, or expect the accuracy and speed of W4A16",
        f"{_FP8_CARD}: 'On H100, NVFP4 is weight-only'",
        lambda c: _is_nvfp4(c) and not _below(c, AMPERE) and _below(c, BLACKWELL),
        engine="vllm",
    ),
    Rule(
        "nvfp4-needs-sm80",
        "refuse",
        "NVFP4 checkpoints have no kernel below compute capability 8.0; the GPU has {sm}",
        _GGUF_INSTEAD,
        "vLLM's NVFP4 kernel list: FlashInfer, CUTLASS, Marlin",
        lambda c: _is_nvfp4(c) and _below(c, AMPERE),
        engine="vllm",
    ),
    Rule(
        "vllm-dropped-volta",
        "refuse",
        "vLLM {version} has no binaries for compute capability {sm}: 0.8.5 was the last with them",
        f"{_GGUF_INSTEAD}, or pin vLLM 0.8.5",
        f"{_WALKTHROUGH}: 'vLLM dropped Volta pre-built kernels at 0.9+'",
        lambda c: c.engine_version is not None and c.engine_version >= (0, 9) and _below(c, TURING),
        engine="vllm",
    ),
    Rule(
        "triton-crashes-on-volta",
        "refuse",
        "Triton {triton} crashes on the first GGUF request on compute capability 7.0 "
        "('Failed to compute parent layout for slice layout')",
        "serve the GGUF with llama-server",
        f"{_WALKTHROUGH}; vLLM #17152 and #17449",
        lambda c: (
            c.model_format == "gguf" and _release(c.triton, (3, 1), (3, 2)) and _below(c, TURING)
        ),
        engine="vllm",
    ),
    Rule(
        "vllm-graph-capture-crash",
        "refuse",
        "vLLM {version} crashes for this model while capturing CUDA graphs "
        "(custom_all_reduce.cuh: illegal memory access)",
        "use another version of vLLM, or enforce eager execution",
        f"{_FP8_CARD}: '0.25 and 0.26 crash for this model during CUDA-graph capture'",
        lambda c: (
            c.model_architecture == "mistral3"
            and _release(c.engine_version, (0, 25), (0, 26))
            and not c.eager
        ),
        engine="vllm",
    ),
    Rule(
        "cuda13-has-no-volta",
        "refuse",
        "CUDA {cuda} cannot compile for compute capability {sm}: CUDA 13 requires 7.5 or later",
        "also install a CUDA 12 toolkit (12.8 is known to work)",
        "CUDA 13 release notes: Maxwell, Pascal and Volta are removed",
        lambda c: c.cuda is not None and c.cuda >= (13,) and _below(c, TURING),
    ),
    Rule(
        "engine-not-built-for-the-gpu",
        "refuse",
        "the engine is built for compute capability {built}; the GPU has {sm}",
        "add the GPU's architecture to engine.cuda_architectures, or remove that setting",
        "CUDA programming guide: code runs on the architecture it is built for and on later ones",
        lambda c: (
            bool(c.built_for) and any(min(c.built_for) > number for number in c.architectures)
        ),
    ),
    Rule(
        "driver-older-than-toolkit",
        "refuse",
        "the NVIDIA driver {driver} is too old for engines built with CUDA {cuda}",
        "install driver {needed} or later, or an earlier CUDA toolkit",
        "CUDA compatibility guide: the least driver of each CUDA major version",
        lambda c: c.driver is not None and c.cuda is not None and c.driver < _least_driver(c.cuda),
    ),
    Rule(
        "bfloat16-needs-sm80",
        "refuse",
        "bfloat16 needs compute capability 8.0; the GPU has {sm}",
        "use float16, or serve a GGUF with llama-server",
        f"{_WALKTHROUGH}: Volta has no BF16",
        lambda c: (c.compute_type == "bfloat16" or "BF16" in c.weight_types) and _below(c, AMPERE),
        engine="vllm",
    ),
    Rule(
        "bf16-weights-are-slow-below-sm80",
        "warn",
        "compute capability {sm} has no BF16 arithmetic: the BF16 weights are converted on "
        "every use",
        "use an F16 or quantized GGUF of the same model",
        f"{_WALKTHROUGH}: Volta has no BF16",
        lambda c: "BF16" in c.weight_types and _below(c, AMPERE),
        engine="llama-server",
    ),
    Rule(
        "images-need-memory-beside-the-cache",
        "warn",
        "a memory utilization of {utilization} leaves too little beside the K/V cache for images: "
        "the vision tower runs out of memory under concurrent requests",
        "set it to 0.85 or less",
        f"{_FP8_CARD}: 'Keep --gpu-memory-utilization at or below 0.85 when you send images'",
        lambda c: (
            c.images > 0
            and c.memory_utilization is not None
            and c.memory_utilization > Decimal("0.85")
        ),
        engine="vllm",
    ),
    Rule(
        "tekken-selects-another-tokenizer",
        "refuse",
        "if tekken.json is present, vLLM uses the mistral_common tokenizer, which lacks the image "
        "token: the server fails to start with an image token count mismatch",
        "exclude tekken.json from the served files, or disable images",
        f"{_FP8_CARD}: 'tekken.json is deliberately absent'",
        lambda c: c.images > 0 and "tekken.json" in c.files,
        engine="vllm",
    ),
    Rule(
        "split-length-is-the-number-of-gpus",
        "refuse",
        "the tensor split has {shares} shares for {gpus} visible GPUs",
        "write one number per GPU",
        "llama.cpp: shares without a GPU are dropped, GPUs without a share stay empty",
        lambda c: (
            bool(c.tensor_split)
            and c.visible_gpus is not None
            and len(c.tensor_split) != c.visible_gpus
        ),
    ),
    Rule(
        "context-is-divided-by-slots",
        "refuse",
        "{total} tokens for {slots} slots are {per_slot} tokens per request, not {wanted}",
        "give the engine the wanted context times the number of slots, or use one slot",
        f"{_WALKTHROUGH}: 'More slots means smaller per-slot context'",
        lambda c: (
            c.total_context is not None
            and c.wanted_context is not None
            and c.total_context // max(c.slots, 1) < c.wanted_context
        ),
    ),
    Rule(
        "context-beyond-training",
        "warn",
        "a request may use {wanted} tokens, but the model was trained with {trained}",
        "use a smaller context, or a rope scaling that the model's authors recommend",
        "llama.cpp: 'possible training context overflow'",
        lambda c: (
            c.trained_context is not None
            and c.wanted_context is not None
            and 0 < c.trained_context < c.wanted_context
        ),
    ),
    Rule(
        "tensor-parallel-divides-heads",
        "refuse",
        "{heads} attention heads cannot be divided among {tp} GPUs",
        "choose a number of GPUs that divides the heads and the K/V heads",
        "vLLM: total number of attention heads must be divisible by the tensor parallel size",
        _uneven_heads,
        engine="vllm",
    ),
    Rule(
        "groups-divide-among-gpus",
        "refuse",
        "quantization groups of {group} do not divide among {tp} GPUs: a shard would cut a group",
        "use fewer GPUs, or a checkpoint with a smaller group size",
        "vLLM: the input size a partition must be a multiple of the group size",
        _uneven_groups,
        engine="vllm",
    ),
)
"""Every rule. Each has a test of its own in tests/core/test_rules.py and a row in docs/rules.md."""


def _is_fp8(case: Case) -> bool:
    return case.quantization == "fp8" or case.scheme == "w8a8-fp8"


def _is_nvfp4(case: Case) -> bool:
    return case.quantization == "nvfp4" or case.scheme == "nvfp4"
