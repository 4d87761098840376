"""What quantising would write, made of nothing: for tests of what judges it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from mmadmin.core.formats.checkpoint.header import read_header
from mmadmin.core.formats.checkpoint.model import read_model
from mmadmin.core.formats.checkpoint.quantized import quantized
from mmadmin.core.formats.checkpoint.shape import CheckpointShape
from mmadmin.core.formats.checkpoint.tables import CheckpointModel
from mmadmin.core.formats.checkpoint.tables import read_model as read_table
from tests.support.checkpoints import Entry, config, safetensors

CACHE = {"num_bits": 8, "type": "float"}


def model(quantize: str = "FP8_DYNAMIC", **changes: Any) -> CheckpointModel:
    """A `[model]` table, with data where it is needed."""
    table = {"source": "hub", "repo": "team/m", "quantize": quantize, **changes}
    if quantize in {"FP8", "NVFP4", "W4A16"} or changes.get("cache_scales"):
        table = {"calibration": "team/text", "calibration_files": ["*.jsonl"], **table}
    if quantize == "W4A16":
        table = {"group_size": 32, **table}
    return read_table(table)


def entries(folder: Path) -> dict[str, Entry]:
    """The tensors of a checkpoint with their bytes."""
    found: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        for one in read_header(path).tensors:
            found[one.name] = (one.dtype, one.shape, data[one.offset : one.offset + one.size])
    return found


def made(
    source: Path, to: Path, wanted: CheckpointModel
) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The tensors and the configuration that a sound quantizer writes."""
    before = entries(source)
    expected: CheckpointShape = quantized(read_model(source), wanted)
    found: dict[str, Entry] = {}
    for one in expected.weights:
        old = before.get(one.name)
        if one.name.endswith(("k_scale", "v_scale")):
            found[one.name] = ("BF16", one.shape, struct.pack("<f", 0.03125)[2:])
        elif old is not None and (old[0], tuple(old[1])) == (one.dtype, one.shape):
            found[one.name] = old
        else:
            found[one.name] = (one.dtype, one.shape, bytes(n % 100 for n in range(one.size)))
    table: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": wanted.scheme.format,
        "kv_cache_scheme": CACHE if wanted.cache_scales else None,
    }
    to.mkdir()
    write(to, found, table)
    return found, table


def write(folder: Path, found: dict[str, Entry], table: dict[str, Any] | None) -> None:
    """A quantizer's output."""
    (folder / "model.safetensors").write_bytes(safetensors(found, {"format": "pt"}))
    changes = {"quantization_config": table} if table else {}
    (folder / "config.json").write_text(json.dumps(config(**changes)))
