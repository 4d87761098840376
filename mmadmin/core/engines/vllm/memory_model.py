"""vLLM's `MemoryModel`: how it divides each GPU, suggestions and the rules' case as one object."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_FLOOR, Decimal
from typing import Any

from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.engines.vllm.memory import (
    Checkpoint,
    Pool,
    VllmRun,
    largest_length,
    predict_vllm,
    token_bytes,
)
from mmadmin.core.engines.vllm.options import AUTO, BATCHED_TOKENS, SEQUENCES, VllmOptions
from mmadmin.core.engines.vllm.spec import VllmBuild
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.fit.estimate import (
    Calibration,
    Device,
    Estimate,
    Reach,
    Room,
    Suggestion,
    fits,
)
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.fit.rules import Case, version_of
from mmadmin.core.formats.checkpoint.shape import CheckpointShape
from mmadmin.core.spec.fields import refuse

GIB = 1 << 30
HOST_BYTES = 2 * GIB
"""Main memory of the engine's processes besides weights and pool.

Measured with one rank on a CPU: server 0.7, engine core 0.6, worker 0.7 GiB.
"""
CONTEXT_STEP = 1024
FP8 = "fp8"
_LOADED = re.compile(r"Model loading took ([\d.]+) GiB")
_POOL = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
_RANK = re.compile(r"\(Worker_TP(\d+)[ _]")


def cache_type(shape: CheckpointShape, options: VllmOptions) -> str:
    """The type of the K/V cache: what is asked for, else FP8 where the checkpoint has scales."""
    if (asked := options.kv_cache_dtype or AUTO) != AUTO:
        return asked
    quantization = shape.quantization
    return FP8 if quantization and quantization.cache_type == FP8 else "16-bit"


class VllmMemory:
    """See `mmadmin.core.fit.estimate.MemoryModel`; a checkpoint has no attachments."""

    def estimate(
        self,
        header: CheckpointShape,
        options: VllmOptions,
        devices: Sequence[Device] = (),
        *,
        attachment_bytes: int = 0,
        calibration: Calibration | None = None,
        cpu_features: Sequence[str] = ("avx2",),
    ) -> Estimate:
        """Weights, activations, graphs, context and K/V pool of each GPU.

        Raises `InvalidSpec` when the pool does not hold one request of the longest length: vLLM
        does not start then, whatever else is free.
        """
        del attachment_bytes, cpu_features
        run = run_of(header, options, len(devices))
        if not devices:
            pool, needed = options.cpu_cache_gib * GIB, _needed(header, run)
            if needed > pool:
                refuse(
                    "serve.cpu_cache_gib",
                    f"a request of {run.max_model_len} tokens needs {bytes_text(needed)}",
                    remedy=f"set it to {-(-needed // GIB)}, or lower serve.max_model_len",
                )
            host = {"weights": header.weight_bytes, "cache": pool, "runtime": HOST_BYTES}
            return Estimate((), host, run.max_model_len)
        pools = [predict_vllm(checkpoint_of(header), run, one, calibration) for one in devices]
        smallest = min(pools, key=lambda pool: pool.tokens)
        if not smallest.fits:
            _refuse_pool(run, smallest)
        return Estimate(
            tuple(pool.parts for pool in pools),
            {"runtime": HOST_BYTES * len(devices)},
            run.max_model_len,
        )

    def suggest(
        self,
        header: CheckpointShape,
        options: VllmOptions,
        devices: Sequence[Device],
        room: Room,
        *,
        attachment_bytes: int = 0,
        calibration: Calibration | None = None,
    ) -> Sequence[Suggestion]:
        """A smaller share of each GPU, an FP8 cache, a shorter context; alone or together."""
        del attachment_bytes
        found: list[Suggestion] = []
        for changed, message in _changes(header, options, devices, room):
            asked: dict[str, Any] = {name: getattr(changed, name) for name in CHANGED}
            values = {n: str(v) if isinstance(v, Decimal) else v for n, v in asked.items()}
            made = {n: v for n, v in values.items() if asked[n] != getattr(options, n)}
            try:
                estimate = self.estimate(header, changed, devices, calibration=calibration)
            except InvalidSpec:
                continue
            if fits(estimate, devices, room):
                found.append(Suggestion(made, estimate, message))
        return found

    def reach(
        self, header: CheckpointShape, options: VllmOptions, devices: Sequence[Device], room: Room
    ) -> Reach:
        """The longest request, and the requests of the wanted length, that the pool holds."""
        del room
        run = run_of(header, options, len(devices))
        tokens = min(largest_length(checkpoint_of(header), run, one) for one in devices)
        trained = header.context_train or tokens
        most = min(tokens // max(run.max_model_len, 1), options.max_num_seqs or SEQUENCES)
        return Reach(min(tokens, trained), most)

    def uses_gpus(self, options: VllmOptions, build: VllmBuild | None, facts: HostFacts) -> bool:
        """False for the build for CPUs."""
        del options, facts
        return build is None or not build.is_for_cpus

    def device_count(self, options: VllmOptions) -> int | None:
        """One GPU for each rank."""
        return options.tensor_parallel_size

    def case(self, header: CheckpointShape, options: VllmOptions) -> Case:
        """What the rules need to know of a checkpoint deployment."""
        quantization, numbers = header.quantization, header.config.numbers
        return Case(
            engine="vllm",
            model_format="checkpoint",
            model_architecture=header.model_type,
            quantization=quantization.method if quantization else "",
            scheme=quantization.scheme if quantization else "",
            weight_types=frozenset(header.types),
            compute_type=options.dtype or "",
            cache_type=cache_type(header, options),
            files=header.files,
            images=options.images if header.config.has_vision else 0,
            memory_utilization=options.utilization,
            tensor_parallel=options.tensor_parallel_size,
            group_size=(quantization.group_size if quantization else 0) or None,
            heads=numbers["heads"] or None,
            kv_heads=numbers["kv_heads"] or None,
            sharded_sizes=tuple(filter(None, (numbers["hidden"], numbers["feed_forward"]))),
            wanted_context=options.max_model_len,
            trained_context=header.context_train or None,
            eager=options.enforce_eager is True,
        )

    def build_case(self, build: VllmBuild) -> Case:
        """The version of vLLM."""
        return Case(engine="vllm", engine_version=version_of(build.version))

    def measured_buffers(self, lines: Iterable[str]) -> Mapping[int, Mapping[str, int]]:
        """Weights and pool of each rank, as its log says."""
        found: dict[int, dict[str, int]] = {}
        for line in lines:
            rank = int(known[1]) if (known := _RANK.search(line)) else 0
            for part, pattern in (("weights", _LOADED), ("cache", _POOL)):
                if size := pattern.search(line):
                    found.setdefault(rank, {})[part] = int(Decimal(size[1]) * GIB)
        return found

    def missing_layers(self, estimate: Estimate, lines: Iterable[str]) -> str:
        """Never: it puts all layers on its GPUs, or does not start."""
        del estimate, lines
        return ""


def checkpoint_of(shape: CheckpointShape) -> Checkpoint:
    """The dimensions that decide about memory."""
    numbers = shape.config.numbers
    return Checkpoint(
        weight_bytes=shape.weight_bytes,
        layers=numbers["layers"],
        hidden=numbers["hidden"],
        feed_forward=numbers["feed_forward"],
        heads=numbers["heads"],
        kv_heads=numbers["kv_heads"],
        head_size=numbers["head_size"],
        vocabulary=numbers["vocabulary"],
        tower_bytes=shape.tower_bytes,
    )


def run_of(shape: CheckpointShape, options: VllmOptions, devices: int) -> VllmRun:
    """The options that decide about memory, on so many GPUs. Raises `InvalidSpec`."""
    ranks = options.tensor_parallel_size or devices or 1
    if devices and devices != ranks:
        refuse(
            "serve.tensor_parallel_size",
            f"{ranks} ranks cannot sit on {devices} GPUs",
            remedy=f"set it to {devices}, or give the deployment {ranks} GPUs",
        )
    kind = cache_type(shape, options)
    return VllmRun(
        max_model_len=options.max_model_len or shape.context_train,
        tensor_parallel=ranks,
        utilization=options.utilization,
        cache_bytes=1 if kind.startswith(FP8) else 4 if kind == "float32" else 2,
        batched_tokens=options.max_num_batched_tokens or BATCHED_TOKENS,
        eager=options.enforce_eager is True,
    )


def _needed(shape: CheckpointShape, run: VllmRun) -> int:
    return token_bytes(checkpoint_of(shape), run) * run.max_model_len


def _refuse_pool(run: VllmRun, pool: Pool) -> None:
    ranks = run.tensor_parallel
    weights = bytes_text(pool.parts["weights"])
    remedy = f"take more GPUs than {ranks}, GPUs with more memory, or a smaller checkpoint"
    tokens = pool.tokens // CONTEXT_STEP * CONTEXT_STEP
    if tokens:
        remedy = f"set serve.max_model_len to {tokens} or less, or {remedy}"
    refuse(
        "serve.max_model_len",
        f"the K/V pool of {ranks} GPU{'s' * (ranks > 1)} holds {pool.tokens} tokens beside "
        f"{weights} of weights on each; one request may use {run.max_model_len}",
        remedy=remedy,
    )


CHANGED = ("gpu_memory_utilization", "kv_cache_dtype", "max_model_len")


def _changes(
    shape: CheckpointShape, options: VllmOptions, devices: Sequence[Device], room: Room
) -> Iterator[tuple[VllmOptions, str]]:
    """Other options to try on these GPUs, the smallest change first."""
    if not devices:
        return
    share = min(
        Decimal(max(one.free_bytes - room.reserve_bytes, 0)) / one.total_bytes for one in devices
    ).quantize(Decimal("0.01"), ROUND_FLOOR)
    if not share:
        return
    share = min(share, options.utilization)
    less = replace(options, gpu_memory_utilization=share)
    says = f"take {share} of each GPU's memory"
    yield less, says
    small = replace(less, kv_cache_dtype=FP8)
    says += " and keep the cache in FP8"
    if any(one.architecture < ADA for one in devices):
        small, says = less, f"take {share} of each GPU's memory"
    else:
        yield small, says
    run = run_of(shape, small, len(devices))
    tokens = min(largest_length(checkpoint_of(shape), run, one) for one in devices)
    tokens = tokens // CONTEXT_STEP * CONTEXT_STEP
    if 0 < tokens < run.max_model_len:
        yield replace(small, max_model_len=tokens), f"{says}, with {tokens} tokens a request"


ADA = 89
"""The first architecture with FP8 arithmetic."""

MEMORY = VllmMemory()
