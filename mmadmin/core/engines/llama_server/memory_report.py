"""Predicted beside measured: what an engine took, and by how much the prediction was off.

llama-server says its buffer sizes while it loads (with `verbosity` 4 or more); a GPU's driver says
what a process holds. Either is compared with the `Prediction`, part by part or device by device,
and what no source can give (the CUDA context) is learned from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.memory import Calibration, Prediction
from mmadmin.core.engines.llama_server.run_shape import MIB, Device

_BUFFER = re.compile(r"\s(\S+)\s+(model|KV|RS|compute|output) buffer size =\s*(\d+)\.(\d\d) MiB")
CONTEXT_LIMIT = 1536 * MIB
"""No CUDA runtime takes more for itself."""
_PARTS = {"model": "weights", "KV": "cache", "RS": "state"}
_GPU = re.compile(r"CUDA(\d+)$")


@dataclass(frozen=True, slots=True)
class Row:
    """One part: predicted and measured bytes."""

    part: str
    """`weights`, or `GPU 0`."""
    predicted: int
    measured: int

    @property
    def error_permille(self) -> int:
        """Thousandths by which the prediction is above (+) or below (-) what was measured."""
        return round(1000 * (self.predicted - self.measured) / max(self.measured, 1))

    def as_json(self) -> dict[str, Json]:
        """Plain data, for records and pages."""
        return {
            "part": self.part,
            "predicted": self.predicted,
            "measured": self.measured,
            "error_permille": self.error_permille,
        }


def buffers(lines: Iterable[str]) -> dict[int, dict[str, int]]:
    """Buffer sizes by device and part, from llama-server's log; device -1 is the host.

    Parts are those of a `Prediction`, rounded by the log to hundredths of a MiB.
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
        device = found.setdefault(int(gpu[1]) if gpu else -1, {})
        size = (int(match[3]) * 100 + int(match[4])) * MIB // 100
        device[part] = device.get(part, 0) + size
    return found


def compare_buffers(prediction: Prediction, lines: Iterable[str]) -> list[Row]:
    """Each part that the log names, device by device; empty when it names none."""
    rows: list[Row] = []
    for device, parts in sorted(buffers(lines).items()):
        known = prediction.host if device < 0 else _device(prediction, device)
        where = "host" if device < 0 else f"GPU {device}"
        rows += [
            Row(f"{where} {part}", known.get(part, 0), size) for part, size in parts.items() if size
        ]
    return rows


def compare_devices(prediction: Prediction, held: Mapping[int, int]) -> list[Row]:
    """What a process holds on each GPU (position in the seat → bytes) beside the prediction."""
    return [
        Row(f"GPU {position}", sum(_device(prediction, position).values()), size)
        for position, size in sorted(held.items())
        if size
    ]


def learn(
    known: Calibration,
    prediction: Prediction,
    held: Mapping[int, int],
    devices: Sequence[Device],
) -> Calibration:
    """The calibration corrected by what a process held: the CUDA context takes the difference.

    Among several GPUs of one architecture the largest difference counts; a difference below zero
    or above `CONTEXT_LIMIT` says that another part was wrong, and teaches nothing.
    """
    contexts: dict[int, int] = {}
    for position, size in held.items():
        parts = _device(prediction, position)
        rest = size - sum(bytes_ for part, bytes_ in parts.items() if part != "context")
        architecture = devices[position].architecture
        if "context" in parts and 0 < rest <= CONTEXT_LIMIT:
            contexts[architecture] = max(contexts.get(architecture, 0), rest)
    return Calibration({**known.context_bytes, **contexts})


def _device(prediction: Prediction, position: int) -> Mapping[str, int]:
    return prediction.devices[position] if position < len(prediction.devices) else {}
