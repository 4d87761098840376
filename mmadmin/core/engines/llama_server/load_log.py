"""What llama-server's log says while it loads: buffer sizes, and where the layers went.

The buffer sizes and the count of layers are logged with `verbosity` 4 or more; that no GPU is
usable, always.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mmadmin.core.fit.estimate import HOST, MIB, Estimate

_BUFFER = re.compile(r"\s(\S+)\s+(model|KV|RS|compute|output) buffer size =\s*(\d+)\.(\d\d) MiB")
_PARTS = {"model": "weights", "KV": "cache", "RS": "state"}
_GPU = re.compile(r"CUDA(\d+)$")
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_NO_GPU = "no usable GPU found"


def buffers(lines: Iterable[str]) -> dict[int, dict[str, int]]:
    """Buffer sizes by device and part; device -1 is the host.

    Parts are those of an estimate, rounded by the log to hundredths of a MiB.
    """
    found: dict[int, dict[str, int]] = {}
    for line in lines:
        match = _BUFFER.search(line)
        if match is None:
            continue
        name, kind = match[1], match[2]
        gpu = _GPU.match(name)
        part = _PARTS.get(kind, kind)
        if kind == "model" and gpu is None:
            part = {"CPU_Mapped": "mapped", "CPU_REPACK": "repacked"}.get(name, "weights")
        device = found.setdefault(int(gpu[1]) if gpu else HOST, {})
        size = (int(match[3]) * 100 + int(match[4])) * MIB // 100
        device[part] = device.get(part, 0) + size
    return found


def missing_layers(estimate: Estimate, lines: Iterable[str]) -> str:
    """Why the log contradicts the layers that were planned on GPUs; empty = it does not."""
    planned = sum(device != HOST for device in estimate.layer_devices)
    if not planned:
        return ""
    for line in lines:
        if _NO_GPU in line:
            return f"the engine found no usable GPU; {planned} layers were planned on GPUs"
        match = _OFFLOADED.search(line)
        if match is not None and int(match[1]) < planned:
            return f"the engine has {match[1]} layers on GPUs; {planned} were planned"
    return ""
