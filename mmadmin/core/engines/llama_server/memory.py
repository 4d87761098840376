"""How much memory a model takes, on which device, before anything is downloaded.

`predict` names the parts for each GPU and for the host, as the pinned llama.cpp places them:
weights by layer under the tensor split, the K/V cache by context, slots and type, recurrent
state, compute buffers, the CUDA context, a projector. Everything is computed from a GGUF's header
and the serve options; nothing is measured. Sizes are bytes.

Sources (llama.cpp b11434), each at its function below. Where a number is not in the source (what
the CUDA runtime takes for itself, what a vision tower needs), the constant says that it is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from mmadmin.core.engines.llama_server.caches import CACHE_BLOCKS, Caches, cache_bytes, caches_of
from mmadmin.core.engines.llama_server.graph_memory import peak_bytes
from mmadmin.core.engines.llama_server.graphs import Batch, worst_case
from mmadmin.core.engines.llama_server.run_shape import RunShape, physical_batch, round_up
from mmadmin.core.engines.llama_server.weights import (
    UNQUANTIZED,
    gpu_size,
    home_of,
    host_weights,
    place_layers,
)
from mmadmin.core.fit.estimate import HOST, Calibration, Device, Estimate
from mmadmin.core.formats.gguf.shape import ModelShape, Weight

MMQ_FROM = 75
"""Below this architecture prompts go through cuBLAS, which needs the matrix in half precision
(`ggml_cuda_should_use_mmq`)."""


def predict(
    shape: ModelShape,
    run: RunShape,
    devices: Sequence[Device] = (),
    *,
    calibration: Calibration | None = None,
    cpu_features: Sequence[str] = ("avx2",),
    buffers: Mapping[int, int] | None = None,
) -> Estimate:
    """What the engine will take. Raises `InvalidSpec` when split and devices do not agree.

    Part names: weights, cache, state, compute, context, projector, dequantize; on the host mapped,
    repacked, weights, cache, state, compute, output, projector.

    `buffers` are compute buffers by device that are known already (they hardly depend on the
    split, and are nine tenths of the work).
    """
    where = place_layers(shape, run, devices)
    known = calibration or Calibration()
    caches = caches_of(shape, run)
    parts = _Parts([{} for _ in devices], {})
    _add_weights(shape, run, where, parts, cpu_features)
    _add_caches(shape, run, where, parts, caches)
    if buffers is None:
        buffers = compute_buffers(shape, run, where, len(devices))
    for place, size in buffers.items():
        parts.add(place, "compute", size)
    parts.add(HOST, "output", _output_buffer(shape, run))
    for index, device in enumerate(devices):
        if {"weights", "cache", "state"} & parts.gpus[index].keys():
            parts.add(index, "context", known.context(device.architecture))
            if scratch := _dequantize(shape, run, where, index, device):
                parts.add(index, "dequantize", scratch)
        else:
            parts.gpus[index].clear()
    if run.projector_bytes:
        parts.add(0 if devices else HOST, "projector", _projector(run.projector_bytes))
    return Estimate(
        devices=tuple(parts.gpus),
        host=parts.host,
        context=caches.context,
        layer_devices=tuple(where),
    )


@dataclass(slots=True)
class _Parts:
    """Bytes by device and part, while they are being added up."""

    gpus: list[dict[str, int]]
    host: dict[str, int]

    def add(self, device: int, part: str, size: int) -> None:
        held = self.host if device == HOST else self.gpus[device]
        held[part] = held.get(part, 0) + size


def _add_weights(
    shape: ModelShape,
    run: RunShape,
    where: Sequence[int],
    parts: _Parts,
    cpu_features: Sequence[str],
) -> None:
    on_host: list[Weight] = []
    for weight in shape.weights:
        device = home_of(weight, shape, run, where)
        if device == HOST:
            on_host.append(weight)
        else:
            parts.add(device, "weights", gpu_size(weight))
        if weight.name == "token_embd.weight" and shape.ties_output and where[-1] != HOST:
            parts.add(where[-1], "weights", gpu_size(weight))
    mapped, repacked = host_weights(on_host, shape, run, cpu_features, alone=not parts.gpus)
    parts.add(HOST, "mapped" if run.memory_mapped else "weights", mapped)
    if repacked:
        parts.add(HOST, "repacked", repacked)


def _add_caches(
    shape: ModelShape, run: RunShape, where: Sequence[int], parts: _Parts, caches: Caches
) -> None:
    for layer in range(shape.layers):
        device = where[layer] if run.offload_cache else HOST
        if layer in shape.recurrent_layers:
            parts.add(device, "state", 4 * shape.recurrent_state * run.slots)
        if size := cache_bytes(shape, run, layer, caches.cells, caches.window_cells):
            parts.add(device, "cache", size * caches.streams)


def compute_buffers(
    shape: ModelShape, run: RunShape, where: Sequence[int], devices: int
) -> dict[int, int]:
    """Compute buffer bytes by device (`llama_context::sched_reserve`)."""
    caches = caches_of(shape, run)
    ubatch = physical_batch(shape, run)
    tokens = round_up(min(caches.cells * caches.streams, ubatch), run.slots)
    batch = Batch(
        tokens=tokens,
        sequences=run.slots,
        outputs=min(tokens, ubatch if run.embeddings else run.slots),
        streams=caches.streams if shape.has_cache else 1,
        cells=caches.cells,
        window_cells=caches.window_cells,
        flash_attention=run.flash_attention,
        embeddings=run.embeddings,
        pooling=shape.pooling if run.pooling is None else run.pooling,
        quantized_keys=CACHE_BLOCKS[run.cache_type_k][0] > 1,
        quantized_values=CACHE_BLOCKS[run.cache_type_v][0] > 1,
    )
    used = sorted({device for device in where if device != HOST})
    graph = worst_case(shape, batch, dict(enumerate(where)))
    pipeline = (
        len(used) > 1 and HOST not in where and run.split_mode == "layer" and run.offload_cache
    )
    return peak_bytes(graph, devices=devices if used else 0, pipeline=pipeline)


def _output_buffer(shape: ModelShape, run: RunShape) -> int:
    """`llama_context::output_reserve`: results of one batch, in host memory."""
    width = shape.vocabulary + (shape.embedding if run.embeddings else 0)
    return 4 * width * run.slots


def _dequantize(
    shape: ModelShape, run: RunShape, where: Sequence[int], index: int, device: Device
) -> int:
    """Scratch of cuBLAS on a GPU whose prompts do not use quantized kernels.

    The largest matrix in half precision, with a batch of inputs and results
    (`ggml_cuda_op_mul_mat_cublas`).
    """
    if device.architecture >= MMQ_FROM:
        return 0
    mine = [
        weight
        for weight in shape.weights
        if weight.layer is not None
        and home_of(weight, shape, run, where) == index
        and weight.type not in UNQUANTIZED
        and "_exps" not in weight.name
    ]
    if not mine:
        return 0
    largest = max(mine, key=lambda weight: weight.elements)
    rows, columns = largest.shape[0], largest.elements // largest.shape[0]
    return 2 * (rows * columns + physical_batch(shape, run) * (rows + columns))


PROJECTOR_WORK = Decimal("0.35")
"""Compute buffers of a vision tower as a share of its weights: a guess."""


def _projector(size_bytes: int) -> int:
    return size_bytes + int(size_bytes * PROJECTOR_WORK)
