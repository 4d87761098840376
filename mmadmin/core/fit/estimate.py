"""The memory of an engine as values: GPUs, bytes by device and part, what a host has shown.

Each engine has a `MemoryModel` that fills these in; placement, preview and reports read them and
know no engine. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mmadmin.core.build.recipe import Json
from mmadmin.core.fit.facts import GpuFacts, HostFacts
from mmadmin.core.fit.rules import Case

MIB = 1024 * 1024
HOST = -1
"""The device number of main memory and CPU."""

CUDA_CONTEXT_MIB: Mapping[int, int] = {70: 320, 75: 200, 80: 430, 86: 300, 89: 330, 90: 604}
"""What the CUDA runtime and the loaded kernels take on a GPU, by architecture, in MiB.

Measured for 90 (one H200, driver 580, CUDA 13.0); guesses for the others: driver and toolkit
decide. `Calibration` replaces it by what a host has shown.
"""
CUDA_CONTEXT_DEFAULT_MIB = 450
CONTEXT_LIMIT = 1536 * MIB
"""No CUDA runtime takes more for itself."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as a memory model needs it."""

    architecture: int
    """70 for compute capability 7.0."""
    total_bytes: int
    free_bytes: int
    name: str = ""


def device_of(gpu: GpuFacts) -> Device:
    """A host's GPU as a memory model needs it."""
    return Device(gpu.architecture, gpu.memory_total_bytes, gpu.available_bytes, gpu.name)


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
class Estimate:
    """Bytes by device and part; the engine's memory model names the parts."""

    devices: tuple[Mapping[str, int], ...]
    host: Mapping[str, int]
    """Main memory; `mapped` is a file that the kernel may drop and read again."""
    context: int
    """Tokens a slot really gets."""
    layer_devices: tuple[int, ...] = ()
    """The device of each layer, and of the output last; empty = the engine cuts no layers apart."""

    @property
    def per_device(self) -> tuple[int, ...]:
        """Bytes on each GPU."""
        return tuple(sum(parts.values()) for parts in self.devices)

    @property
    def host_bytes(self) -> int:
        """Bytes of main memory, the mapped file included."""
        return sum(self.host.values())

    @property
    def own_bytes(self) -> int:
        """Main memory besides the mapped file: what the engine's end frees."""
        return self.host_bytes - self.host.get("mapped", 0)

    @property
    def resident_bytes(self) -> int:
        """Main memory that must be there: without the mapped file, which the kernel may drop.

        On a host without GPUs the file counts too: dropping it would mean reading it for each
        token.
        """
        return self.own_bytes if self.devices else self.host_bytes

    @property
    def part_names(self) -> list[str]:
        """Every part that it has, sorted."""
        return sorted({name for parts in (*self.devices, self.host) for name in parts})

    def part(self, name: str) -> int:
        """Bytes of one part over all devices and the host."""
        return sum(parts.get(name, 0) for parts in (*self.devices, self.host))


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change of options that would fit, with what it would then take."""

    options: Mapping[str, Json]
    estimate: Estimate
    message: str


@dataclass(frozen=True, slots=True)
class Room:
    """What a fit must leave free, and what the host has besides its GPUs."""

    reserve_bytes: int = 0
    """Kept free on each GPU."""
    host_bytes: int | None = None
    """Main memory that may be used; None = not looked at."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far context and concurrency could go."""

    largest_context: int
    """Tokens a request."""
    most_slots: int
    """Requests of the wanted context at once."""


class MemoryModel(Protocol):
    """What one engine says about its memory, from a model's header and its own options.

    `header` is what the model format's reader returns, `options` what the engine's `[serve]` table
    is read to. `attachment_bytes` is the size of files that are loaded besides the model.
    """

    def estimate(
        self,
        header: Any,
        options: Any,
        devices: Sequence[Device] = (),
        *,
        attachment_bytes: int = 0,
        calibration: Calibration | None = None,
        cpu_features: Sequence[str] = ("avx2",),
    ) -> Estimate:
        """What the engine will take. Raises `InvalidSpec` when options and devices disagree."""
        ...

    def suggest(
        self,
        header: Any,
        options: Any,
        devices: Sequence[Device],
        room: Room,
        *,
        attachment_bytes: int = 0,
        calibration: Calibration | None = None,
    ) -> Sequence[Suggestion]:
        """Changes that make it fit, the smallest first."""
        ...

    def reach(self, header: Any, options: Any, devices: Sequence[Device], room: Room) -> Reach:
        """The longest request and the most requests at once that fit."""
        ...

    def uses_gpus(self, options: Any, build: Any, facts: HostFacts) -> bool:
        """False when the options or the build keep everything off the GPUs.

        `build` is the `[engine]` table as the engine reads it, None = not known; `facts` are of the
        host that builds it.
        """
        ...

    def device_count(self, options: Any) -> int | None:
        """The number of GPUs that the options fix; None = any number."""
        ...

    def case(self, header: Any, options: Any) -> Case:
        """Model and options for the rules."""
        ...

    def build_case(self, build: Any) -> Case:
        """What the rules may know before the model's header is read."""
        ...

    def measured_buffers(self, lines: Iterable[str]) -> Mapping[int, Mapping[str, int]]:
        """Bytes by device and part, as the engine's own log says; empty = it does not."""
        ...

    def missing_layers(self, estimate: Estimate, lines: Iterable[str]) -> str:
        """Why the engine's log contradicts the planned GPUs; empty = it does not."""
        ...


def fits(estimate: Estimate, devices: Sequence[Device], room: Room | None = None) -> bool:
    """True when every device has room for its share and the reserve.

    Without devices the main memory has to hold all of it.
    """
    room = room or Room()
    if not devices and room.host_bytes is not None and estimate.host_bytes > room.host_bytes:
        return False
    return all(
        need + room.reserve_bytes <= device.free_bytes
        for need, device in zip(estimate.per_device, devices, strict=True)
        if need
    )


# -- estimated beside measured


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


def compare_buffers(estimate: Estimate, measured: Mapping[int, Mapping[str, int]]) -> list[Row]:
    """Each part that the engine's log names, device by device; empty when it names none."""
    rows: list[Row] = []
    for device, parts in sorted(measured.items()):
        known = estimate.host if device < 0 else _parts(estimate, device)
        where = "host" if device < 0 else f"GPU {device}"
        rows += [
            Row(f"{where} {part}", known.get(part, 0), size) for part, size in parts.items() if size
        ]
    return rows


def compare_devices(estimate: Estimate, held: Mapping[int, int]) -> list[Row]:
    """What an engine holds on each GPU (position in the seat → bytes) beside the estimate."""
    return [
        Row(f"GPU {position}", sum(_parts(estimate, position).values()), size)
        for position, size in sorted(held.items())
        if size
    ]


def learn(
    known: Calibration,
    estimate: Estimate,
    held: Mapping[int, int],
    devices: Sequence[Device],
) -> Calibration:
    """The calibration corrected by what an engine held: the CUDA context takes the difference.

    Among several GPUs of one architecture the largest difference counts; a difference below zero
    or above `CONTEXT_LIMIT` says that another part was wrong, and teaches nothing.
    """
    contexts: dict[int, int] = {}
    for position, size in held.items():
        parts = _parts(estimate, position)
        rest = size - sum(bytes_ for part, bytes_ in parts.items() if part != "context")
        architecture = devices[position].architecture
        if "context" in parts and 0 < rest <= CONTEXT_LIMIT:
            contexts[architecture] = max(contexts.get(architecture, 0), rest)
    return Calibration({**known.context_bytes, **contexts})


def _parts(estimate: Estimate, position: int) -> Mapping[str, int]:
    return estimate.devices[position] if position < len(estimate.devices) else {}
