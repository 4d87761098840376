"""Where a model's tensors go, and what they take there: GPU, mapped file, repacked copy.

Sources (llama.cpp b11434): `llama_model_base::load_tensors` (llama-model.cpp),
`llama_model_loader::create_tensor` and `get_mapping_range` (llama-model-loader.cpp),
`ggml_repack_get_optimal_repack_type` (ggml-cpu/repack.cpp).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from typing import cast

from mmadmin.core.engines.llama_server.graph_memory import CUDA_ALIGNMENT, HOST_ALIGNMENT
from mmadmin.core.engines.llama_server.run_shape import RunShape, round_up
from mmadmin.core.errors import InvalidSpec
from mmadmin.core.fit.estimate import HOST, Device
from mmadmin.core.formats.gguf.shape import ModelShape, Weight

UNQUANTIZED = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"})
INPUT_WEIGHTS = frozenset({"token_embd", "position_embd", "token_types", "per_layer_token_embd"})
"""`LLM_TENSOR_LAYER_INPUT`: always on the host."""
FIRST_LAYER_WEIGHTS = frozenset({"token_embd_norm", "rope_freqs", "rope_factors_long"})
ROW_PADDING = 512
"""`MATRIX_ROW_PADDING`: elements to which a quantized row is padded on a GPU."""


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


def home_of(weight: Weight, shape: ModelShape, run: RunShape, where: Sequence[int]) -> int:
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


def gpu_size(weight: Weight) -> int:
    """`ggml_backend_cuda_buffer_type_get_alloc_size`, aligned."""
    size = weight.size
    row = weight.shape[0] if weight.shape else 1
    if weight.type not in UNQUANTIZED and row % ROW_PADDING:
        per_row = weight.size * row // max(weight.elements, 1)
        size += per_row * (ROW_PADDING - row % ROW_PADDING) // row
    return round_up(size, CUDA_ALIGNMENT)


def host_weights(
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
            repacked += round_up(weight.size, HOST_ALIGNMENT)
        if not can or weight.name == "token_embd.weight":
            stays.append(weight)
        if can and weight.name == "token_embd.weight" and not shape.ties_output:
            repacked -= round_up(weight.size, HOST_ALIGNMENT)
    if not run.memory_mapped:
        return sum(round_up(weight.size, HOST_ALIGNMENT) for weight in stays), repacked
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
