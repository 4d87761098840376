"""How much memory a model takes, on which device, before anything is downloaded.

`predict` names the parts for each GPU and for the host, as the pinned llama.cpp places them:
weights by layer under the tensor split, the K/V cache by context, slots and type, recurrent
state, compute buffers, the CUDA context, a projector. Everything is computed from a GGUF's header
and the serve options; nothing is measured. Sizes are bytes.

Sources (llama.cpp b11434), each at its function below. Where a number is not in the source (what
the CUDA runtime takes for itself), the constant says where it was measured.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import cast

from mmadmin.core.engine import Needs, Options
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.facts import GpuFacts
from mmadmin.core.graph_memory import CUDA_ALIGNMENT, HOST_ALIGNMENT, peak_bytes
from mmadmin.core.llama_graphs import Batch, worst_case
from mmadmin.core.model_shape import ModelShape, Weight
from mmadmin.core.recipe import Json

MIB = 1024 * 1024
HOST = -1
"""The device number of main memory and CPU."""

CACHE_BLOCKS: Mapping[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""Cache type → elements a block, bytes a block (`type_traits` in ggml.c)."""
UNQUANTIZED = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"})
INPUT_WEIGHTS = frozenset({"token_embd", "position_embd", "token_types", "per_layer_token_embd"})
"""`LLM_TENSOR_LAYER_INPUT`: always on the host."""
FIRST_LAYER_WEIGHTS = frozenset({"token_embd_norm", "rope_freqs", "rope_factors_long"})
CUDA_CONTEXT_MIB: Mapping[int, int] = {70: 320, 75: 200, 80: 430, 86: 300, 89: 330, 90: 530}
"""What the CUDA runtime and the loaded kernels take on a GPU, by architecture, in MiB.

Not in llama.cpp's source: driver and toolkit decide. `Calibration` replaces it by what a host
has shown.
"""
CUDA_CONTEXT_DEFAULT_MIB = 450
MMQ_FROM = 75
"""Below this architecture prompts go through cuBLAS, which needs the matrix in half precision
(`ggml_cuda_should_use_mmq`)."""
ROW_PADDING = 512
"""`MATRIX_ROW_PADDING`: elements to which a quantized row is padded on a GPU."""
DEFAULT_BATCH = 2048
DEFAULT_UBATCH = 512


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the memory model needs it."""

    architecture: int
    """70 for compute capability 7.0."""
    total_bytes: int
    free_bytes: int
    name: str = ""


def device_of(gpu: GpuFacts) -> Device:
    """A host's GPU as the memory model needs it."""
    return Device(gpu.architecture, gpu.memory_total_bytes, gpu.memory_free_bytes, gpu.name)


@dataclass(frozen=True, slots=True)
class RunShape:
    """The serve options that decide about memory."""

    context: int
    """Tokens a slot; 0 = as trained."""
    slots: int = 1
    unified: bool = False
    batch: int = DEFAULT_BATCH
    ubatch: int = DEFAULT_UBATCH
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool = True
    gpu_layers: int | None = None
    """None = all that there is a GPU for."""
    tensor_split: tuple[Decimal, ...] = ()
    split_mode: str = "layer"
    main_gpu: int = 0
    swa_full: bool = False
    offload_cache: bool = True
    embeddings: bool = False
    pooling: int | None = None
    cpu_moe_layers: int = 0
    memory_mapped: bool = True
    repack: bool = True
    projector_bytes: int = 0
    """Size of the multimodal projector's file."""

    @classmethod
    def from_options(cls, options: Options, *, projector_bytes: int = 0) -> RunShape:
        """From the `[serve]` table of llama-server; what is left out has the engine's default."""
        flags = cast("Mapping[str, Json]", options.get("flags") or {})
        pooling = options.get("pooling")
        split = cast("Sequence[Json]", options.get("tensor_split") or ())
        batch = _number(options, "batch", DEFAULT_BATCH)
        ubatch = min(_number(options, "ubatch", DEFAULT_UBATCH), batch)
        embeddings = bool(options.get("embeddings") or options.get("reranking"))
        return cls(
            context=_number(options, "context", 0),
            slots=_number(options, "slots", 1),
            unified=bool(options.get("kv_unified")),
            batch=ubatch if embeddings else batch,
            ubatch=ubatch,
            cache_type_k=str(options.get("cache_type_k") or "f16"),
            cache_type_v=str(options.get("cache_type_v") or "f16"),
            flash_attention=options.get("flash_attention") != "off",
            gpu_layers=_number(options, "gpu_layers", -1) if "gpu_layers" in options else None,
            tensor_split=tuple(Decimal(str(share)) for share in split),
            split_mode=str(options.get("split_mode") or "layer"),
            main_gpu=_number(options, "main_gpu", 0),
            swa_full=flags.get("swa-full") is True,
            offload_cache=flags.get("kv-offload") is not False,
            embeddings=embeddings,
            pooling=_POOLING.get(str(pooling)) if pooling else None,
            cpu_moe_layers=_number(options, "cpu_moe_layers", 0),
            memory_mapped=options.get("load_mode") in (None, "auto", "mmap", "mmap+mlock"),
            repack=flags.get("repack") is not False,
            projector_bytes=projector_bytes,
        )


_POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a host has shown, in place of constants that no source gives."""

    context_bytes: Mapping[int, int] = field(default_factory=dict)
    """CUDA context by architecture."""

    def context(self, architecture: int) -> int:
        """Bytes the CUDA runtime takes on a GPU of this architecture."""
        known = self.context_bytes.get(architecture)
        if known is not None:
            return known
        return CUDA_CONTEXT_MIB.get(architecture, CUDA_CONTEXT_DEFAULT_MIB) * MIB


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes by device and part.

    Part names: weights, cache, state, compute, context, projector, dequantize; on the host mapped,
    repacked, weights, cache, state, compute, output, projector.
    """

    devices: tuple[Mapping[str, int], ...]
    host: Mapping[str, int]
    context: int
    """Tokens a slot really gets."""
    layer_devices: tuple[int, ...]
    """The device of each layer, and of the output last."""

    @property
    def per_device(self) -> tuple[int, ...]:
        """Bytes on each GPU."""
        return tuple(sum(parts.values()) for parts in self.devices)

    @property
    def host_bytes(self) -> int:
        """Bytes of main memory, the mapped file included."""
        return sum(self.host.values())

    def part(self, name: str) -> int:
        """Bytes of one part over all devices and the host."""
        return sum(parts.get(name, 0) for parts in (*self.devices, self.host))

    def as_needs(self) -> Needs:
        """The engine's form."""
        names = sorted({name for parts in (*self.devices, self.host) for name in parts})
        return Needs(
            parts={name: self.part(name) for name in names},
            per_device=self.per_device,
            host_bytes=self.host_bytes,
        )


def predict(
    shape: ModelShape,
    run: RunShape,
    devices: Sequence[Device] = (),
    *,
    calibration: Calibration | None = None,
    cpu_features: Sequence[str] = ("avx2",),
    buffers: Mapping[int, int] | None = None,
) -> Prediction:
    """What the engine will take. Raises `InvalidSpec` when split and devices do not agree.

    `buffers` are compute buffers by device that are known already (they hardly depend on the
    split, and are nine tenths of the work).
    """
    where = place_layers(shape, run, devices)
    known = calibration or Calibration()
    caches = _caches(shape, run)
    ledger = _Ledger([{} for _ in devices], {})
    _add_weights(shape, run, where, ledger, cpu_features)
    _add_caches(shape, run, where, ledger, caches)
    if buffers is None:
        buffers = compute_buffers(shape, run, where, len(devices))
    for place, size in buffers.items():
        ledger.add(place, "compute", size)
    ledger.add(HOST, "output", _output_buffer(shape, run))
    for index, device in enumerate(devices):
        if {"weights", "cache", "state"} & ledger.gpus[index].keys():
            ledger.add(index, "context", known.context(device.architecture))
            if scratch := _dequantize(shape, run, where, index, device):
                ledger.add(index, "dequantize", scratch)
        else:
            ledger.gpus[index].clear()
    if run.projector_bytes:
        ledger.add(0 if devices else HOST, "projector", _projector(run.projector_bytes))
    return Prediction(
        devices=tuple(ledger.gpus),
        host=ledger.host,
        context=caches.context,
        layer_devices=tuple(where),
    )


# -- where things go


def place_layers(shape: ModelShape, run: RunShape, devices: Sequence[Device]) -> list[int]:
    """The device of each layer, and of the output last (`llama_model_base::load_tensors`)."""
    layers = shape.layers_all
    if run.split_mode == "none" and devices:
        devices_used, offset = [devices[min(run.main_gpu, len(devices) - 1)]], run.main_gpu
    else:
        devices_used, offset = list(devices), 0
    wanted = layers + 1 if run.gpu_layers is None or run.gpu_layers < 0 else run.gpu_layers
    active = min(wanted, layers + 1) if devices_used else 0
    if active == 0:
        return [HOST] * (layers + 1)
    if run.tensor_split and len(run.tensor_split) != len(devices_used):
        raise InvalidSpec(
            f"the tensor split has {len(run.tensor_split)} shares for {len(devices_used)} GPUs",
            remedy=f"write {len(devices_used)} numbers in serve.tensor_split",
            field="serve.tensor_split",
        )
    shares = [float(share) for share in run.tensor_split] or [
        float(device.free_bytes) for device in devices_used
    ]
    if sum(shares) <= 0:
        shares = [1.0] * len(devices_used)
    points = _split_points(shares)
    start = max(layers + 1 - wanted, 0)
    where = []
    for layer in range(layers + 1):
        if layer < start or layer - start >= active:
            where.append(HOST)
        else:
            chosen = bisect_right(points, _single((layer - start) / active))
            where.append(min(chosen, len(points) - 1) + offset)
    return where


def _split_points(shares: Sequence[float]) -> list[float]:
    """Cumulative shares, in the single precision that the loader computes in."""
    total = 0.0
    sums = []
    for share in shares:
        total = _single(total + _single(share))
        sums.append(total)
    return [_single(value / total) for value in sums]


def _single(value: float) -> float:
    return cast("float", struct.unpack("f", struct.pack("f", value))[0])


@dataclass(slots=True)
class _Ledger:
    """Bytes by device and part, while they are being added up."""

    gpus: list[dict[str, int]]
    host: dict[str, int]

    def add(self, device: int, part: str, size: int) -> None:
        parts = self.host if device == HOST else self.gpus[device]
        parts[part] = parts.get(part, 0) + size


def _add_weights(
    shape: ModelShape,
    run: RunShape,
    where: Sequence[int],
    ledger: _Ledger,
    cpu_features: Sequence[str],
) -> None:
    on_host: list[Weight] = []
    for weight in shape.weights:
        device = _home(weight, shape, run, where)
        if device == HOST:
            on_host.append(weight)
        else:
            ledger.add(device, "weights", _gpu_size(weight))
        if weight.name == "token_embd.weight" and shape.ties_output and where[-1] != HOST:
            ledger.add(where[-1], "weights", _gpu_size(weight))
    mapped, repacked = _host_weights(on_host, shape, run, cpu_features, alone=not ledger.gpus)
    ledger.add(HOST, "mapped" if run.memory_mapped else "weights", mapped)
    if repacked:
        ledger.add(HOST, "repacked", repacked)


def _home(weight: Weight, shape: ModelShape, run: RunShape, where: Sequence[int]) -> int:
    """The device a tensor is loaded to (`llama_model_loader::create_tensor`)."""
    layer = weight.layer
    if layer is None:
        base = weight.name.partition(".")[0]
        if base in INPUT_WEIGHTS:
            return HOST
        return where[0] if base in FIRST_LAYER_WEIGHTS else where[-1]
    if "_exps" in weight.name and layer < run.cpu_moe_layers:
        return HOST
    return where[min(layer, shape.layers_all)]


def _gpu_size(weight: Weight) -> int:
    """`ggml_backend_cuda_buffer_type_get_alloc_size`, aligned."""
    size = weight.size
    row = weight.shape[0] if weight.shape else 1
    if weight.type not in UNQUANTIZED and row % ROW_PADDING:
        per_row = weight.size * row // max(weight.elements, 1)
        size += per_row * (ROW_PADDING - row % ROW_PADDING) // row
    return _up(size, CUDA_ALIGNMENT)


def _host_weights(
    weights: Sequence[Weight],
    shape: ModelShape,
    run: RunShape,
    cpu_features: Sequence[str],
    *,
    alone: bool,
) -> tuple[int, int]:
    """Bytes of the mapped range (or of a plain buffer), and bytes of repacked copies.

    With memory mapping the buffer spans from the first to the last tensor of a file that stays in
    it (`llama_model_loader::get_mapping_range`). Beside a GPU the host buffer of the GPU comes
    before the repacking one (`make_cpu_buft_list`), so that nothing is repacked.
    """
    repacked = 0
    stays: list[Weight] = []
    for weight in weights:
        can = alone and run.repack and _repacks(weight, cpu_features)
        if can:
            repacked += _up(weight.size, HOST_ALIGNMENT)
        if not can or weight.name == "token_embd.weight":
            stays.append(weight)
        if can and weight.name == "token_embd.weight" and not shape.ties_output:
            repacked -= _up(weight.size, HOST_ALIGNMENT)
    if not run.memory_mapped:
        return sum(_up(weight.size, HOST_ALIGNMENT) for weight in stays), repacked
    mapped = 0
    for file in {weight.file for weight in stays}:
        mine = [weight for weight in stays if weight.file == file]
        end = max(weight.offset + weight.size for weight in mine)
        mapped += end - min(weight.offset for weight in mine)
    return mapped, repacked


def _repacks(weight: Weight, cpu_features: Sequence[str]) -> bool:
    """`ggml_repack_get_optimal_repack_type` (ggml-cpu/repack.cpp), for x86-64 and arm64."""
    matrix = 3 if "_exps" in weight.name else 2
    if len(weight.shape) != matrix or weight.name.partition(".")[0] in INPUT_WEIGHTS - {
        "token_embd"
    }:
        return False
    rows = weight.shape[1]
    features = set(cpu_features)
    avx2 = "avx2" in features
    int8, dot = "i8mm" in features, "asimddp" in features
    eight = {
        "Q4_0": avx2,
        "Q4_K": avx2 or int8 or dot,
        "Q2_K": "avx512f" in features,
        "Q5_K": int8 or dot,
        "Q6_K": int8 or dot,
        "IQ4_NL": avx2,
        "MXFP4": avx2,
    }
    four = {"Q4_0": int8 or dot, "IQ4_NL": dot, "MXFP4": dot, "Q8_0": int8 or dot}
    return (rows % 8 == 0 and eight.get(weight.type, False)) or (
        rows % 4 == 0 and four.get(weight.type, False)
    )


# -- caches


@dataclass(frozen=True, slots=True)
class _Caches:
    context: int
    """Tokens a slot."""
    streams: int
    cells: int
    """Cells a stream."""
    window_cells: int


def _caches(shape: ModelShape, run: RunShape) -> _Caches:
    """Cells of the caches (`llama_context`'s constructor, `llama_kv_cache_iswa`)."""
    total = _up((run.context or shape.context_train) * run.slots, 256)
    streams = 1 if run.unified else run.slots
    cells = total if run.unified else _up(total // run.slots, 256)
    window = shape.window * (run.slots if run.unified else 1) + _ubatch(shape, run)
    window_cells = cells if run.swa_full else _up(min(cells, window), 256)
    return _Caches(cells, streams, cells, window_cells)


def _add_caches(
    shape: ModelShape, run: RunShape, where: Sequence[int], ledger: _Ledger, caches: _Caches
) -> None:
    for layer in range(shape.layers):
        device = where[layer] if run.offload_cache else HOST
        if layer in shape.recurrent_layers:
            ledger.add(device, "state", 4 * shape.recurrent_state * run.slots)
        if size := cache_bytes(shape, run, layer, caches.cells, caches.window_cells):
            ledger.add(device, "cache", size * caches.streams)


def cache_bytes(shape: ModelShape, run: RunShape, layer: int, cells: int, window_cells: int) -> int:
    """Bytes of one layer's K/V cache a stream (`llama_kv_cache`'s constructor)."""
    if not shape.has_cache or layer >= shape.kv_layers or shape.kv_heads[layer] == 0:
        return 0
    if layer in shape.recurrent_layers and not shape.has(layer, "attn_k.weight"):
        return 0
    count = window_cells if layer in shape.window_layers else cells
    keys = shape.key_length[layer] * shape.kv_heads[layer]
    size = _row(run.cache_type_k, keys) * count
    if shape.latent is None:
        if run.flash_attention:
            values = shape.value_length[layer] * shape.kv_heads[layer]
        else:
            values = max(
                length * heads
                for length, heads in zip(shape.value_length, shape.kv_heads, strict=True)
            )
        size += _row(run.cache_type_v, values) * count
    return size


def _row(cache_type: str, elements: int) -> int:
    block, size = CACHE_BLOCKS[cache_type]
    return -(-elements // block) * size


# -- buffers


def compute_buffers(
    shape: ModelShape, run: RunShape, where: Sequence[int], devices: int
) -> dict[int, int]:
    """Compute buffer bytes by device (`llama_context::sched_reserve`)."""
    caches = _caches(shape, run)
    ubatch = _ubatch(shape, run)
    tokens = _up(min(caches.cells * caches.streams, ubatch), run.slots)
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


def _ubatch(shape: ModelShape, run: RunShape) -> int:
    context = (run.context or shape.context_train) * run.slots
    batch = min(context, run.batch) if shape.causal else run.batch
    return min(batch, run.ubatch)


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
        and _home(weight, shape, run, where) == index
        and weight.type not in UNQUANTIZED
        and "_exps" not in weight.name
    ]
    if not mine:
        return 0
    largest = max(mine, key=lambda weight: weight.elements)
    rows, columns = largest.shape[0], largest.elements // largest.shape[0]
    return 2 * (rows * columns + _ubatch(shape, run) * (rows + columns))


PROJECTOR_WORK = Decimal("0.35")
"""Compute buffers of a vision tower as a share of its weights: measured on CLIP-sized towers."""


def _projector(size_bytes: int) -> int:
    return size_bytes + int(size_bytes * PROJECTOR_WORK)


def _number(options: Options, name: str, default: int) -> int:
    value = options.get(name)
    return default if value is None else int(cast("int", value))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
