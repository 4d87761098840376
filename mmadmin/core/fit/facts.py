"""What a host is, as data: CPU, memory, compiler, GPUs, CUDA toolkit.

Collected by `mmadmin.host.facts`, or written by hand for a host that one only plans for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, cast

from mmadmin.core.build.recipe import Json

INSTRUCTION_SET = re.compile(
    r"abm|adx|aes|amx_\w+|avx\w*|bmi[12]|f16c|fma4?|gfni|movbe|p?clmulqdq|popcnt|sha_ni|sse\w*|ssse3"
    r"|vaes|vpclmulqdq|xop|asimd\w*|bf16|crc32|fphp|i8mm|neon|sha\d*|sm[34]\w*|sme\w*|sve\w*|svei8mm"
)
"""Names in the kernel's table that stand for instructions that a compiler may use."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A program on a GPU."""

    pid: int
    memory_bytes: int
    ancestors: tuple[int, ...] = ()
    """Process ids of its parent, its parent's parent and so on."""


@dataclass(frozen=True, slots=True)
class GpuLease:
    """What a running build step was given of a GPU."""

    owner: str
    """The step, and whose build it is of."""
    pid: int
    """The process that builds: its descendants hold the memory."""
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A file system."""

    path: str
    """Where it is mounted."""
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU."""

    index: int
    name: str
    compute_capability: str
    """`"7.0"`."""
    memory_total_bytes: int
    memory_free_bytes: int
    uuid: str = ""
    nvlink_peers: tuple[int, ...] = ()
    """Indices of the GPUs that it is linked to directly."""
    processes: tuple[GpuProcess, ...] = ()
    """What holds its memory."""
    leases: tuple[GpuLease, ...] = ()
    """What running build steps were given of it."""

    @property
    def architecture(self) -> int:
        """The CUDA architecture number: 70 for 7.0."""
        major, _, minor = self.compute_capability.partition(".")
        return int(major) * 10 + int(minor or 0)

    @property
    def available_bytes(self) -> int:
        """What is free and given to no step that has not taken it yet."""
        owed = sum(max(one.memory_bytes - self.held_by(one.pid), 0) for one in self.leases)
        return max(self.memory_free_bytes - owed, 0)

    def held_by(self, pid: int) -> int:
        """Bytes that a process and its descendants hold."""
        return sum(p.memory_bytes for p in self.processes if pid in (p.pid, *p.ancestors))


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One machine. Sizes in bytes; empty text = not there."""

    arch: str
    """`platform.machine()`: x86_64, aarch64."""
    os: str
    """`linux`."""
    libc: str
    """`glibc-2.36`."""
    cpu_model: str
    cpu_features: tuple[str, ...]
    """Sorted instruction set features."""
    cpu_count: int
    memory_total_bytes: int
    memory_available_bytes: int
    compiler: str
    """`gcc-12.2.0`, `clang-14.0.6`; empty = none."""
    cuda: str
    """Toolkit version, `12.8`; empty = none."""
    driver: str = ""
    """NVIDIA driver version."""
    gpus: tuple[GpuFacts, ...] = ()
    disk_free_bytes: int = 0
    """On the store's file system."""
    disk_total_bytes: int = 0
    cuda_toolkits: tuple[str, ...] = ()
    """Versions of all toolkits found, the one in use first."""
    disks: tuple[DiskFacts, ...] = ()
    sandbox: str = ""
    """The level of the engines' sandbox and what it keeps them from; empty = not tried."""

    @property
    def cuda_architectures(self) -> tuple[int, ...]:
        """The architectures of its GPUs, each once, sorted."""
        return tuple(sorted({gpu.architecture for gpu in self.gpus}))

    @property
    def cpu_identity(self) -> str:
        """Digest of what a CPU-native build depends on: architecture and instruction sets.

        What a kernel says about clocks, mitigations and virtualization is left out: it changes
        with the kernel, not with the CPU.
        """
        sets = [feature for feature in self.cpu_features if INSTRUCTION_SET.fullmatch(feature)]
        text = "\n".join([self.arch, *sets])
        return sha256(text.encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Json]:
        """Plain data, for records and pages."""
        return cast("dict[str, Json]", json.loads(json.dumps(asdict(self))))


def host_facts_from_json(data: Mapping[str, Any]) -> HostFacts:
    """The inverse of `HostFacts.as_json`; unknown keys of later versions are ignored."""
    values = _known(HostFacts, data)
    values["cpu_features"] = tuple(values.get("cpu_features", ()))
    values["cuda_toolkits"] = tuple(values.get("cuda_toolkits", ()))
    values["gpus"] = tuple(_gpu(gpu) for gpu in values.get("gpus", ()))
    values["disks"] = tuple(
        DiskFacts(**_known(DiskFacts, disk)) for disk in values.get("disks", ())
    )
    return HostFacts(**values)


def _gpu(data: Mapping[str, Any]) -> GpuFacts:
    values = _known(GpuFacts, data)
    values["nvlink_peers"] = tuple(values.get("nvlink_peers", ()))
    values["processes"] = tuple(
        GpuProcess(one["pid"], one["memory_bytes"], tuple(one.get("ancestors", ())))
        for one in values.get("processes", ())
    )
    values["leases"] = tuple(GpuLease(**_known(GpuLease, one)) for one in values.get("leases", ()))
    return GpuFacts(**values)


def _known(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key in kind.__dataclass_fields__}
