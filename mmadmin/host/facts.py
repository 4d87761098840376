"""What this machine is: CPU, memory, compiler, GPUs, CUDA toolkit, disk.

Blocking, a few tens of milliseconds; nothing is cached. A machine without NVIDIA's library simply
has no GPUs.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pynvml

from mmadmin.core.errors import ToolMissing
from mmadmin.core.fit.facts import DiskFacts, GpuFacts, GpuLease, GpuProcess, HostFacts
from mmadmin.host import compiler as toolchain

CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
_NVLINK_MAX = 18
"""`NVML_NVLINK_MAX_LINKS`."""


def host_facts(store: Path | None = None) -> HostFacts:
    """Look at this machine; `store` names a folder of the disk that is asked for its room."""
    memory = psutil.virtual_memory()
    model, features = _cpu()
    driver, gpus = driver_and_gpus(lease_folder(store) if store else None)
    disk = shutil.disk_usage(_existing(store or Path.cwd()))
    return HostFacts(
        arch=platform.machine(),
        os=platform.system().lower(),
        libc="-".join(platform.libc_ver()).strip("-"),
        cpu_model=model,
        cpu_features=features,
        cpu_count=len(os.sched_getaffinity(0)),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        compiler=compiler(),
        cuda=toolchain.cuda_version(),
        driver=driver,
        gpus=gpus,
        disk_free_bytes=disk.free,
        disk_total_bytes=disk.total,
        cuda_toolkits=cuda_toolkits(),
        disks=disks(),
    )


def compiler() -> str:
    """The C++ compiler that a build here would use, as `gcc-12.2.0`; empty = none."""
    try:
        return toolchain.compiler().label
    except ToolMissing:
        return ""


def cuda_toolkits() -> tuple[str, ...]:
    """Versions of every CUDA toolkit found; the first is the one that builds use."""
    versions = [toolchain.cuda_version()]
    for folder in sorted(Path("/usr/local").glob("cuda-*"), reverse=True):
        release = re.fullmatch(r"cuda-(\d+\.\d+)", folder.name)
        if release and (folder / "bin" / "nvcc").exists():
            versions.append(release[1])
    return tuple(dict.fromkeys(version for version in versions if version))


def disks() -> tuple[DiskFacts, ...]:
    """The physical file systems, each once, by mount point."""
    found: dict[str, DiskFacts] = {}
    for part in psutil.disk_partitions(all=False):
        try:
            usage = shutil.disk_usage(part.mountpoint)
        except OSError:  # a mount that went away, or may not be looked at
            continue
        if not Path(part.mountpoint).is_file():
            found.setdefault(part.device, DiskFacts(part.mountpoint, usage.total, usage.free))
    return tuple(sorted(found.values(), key=lambda disk: disk.path))


def gpu_processes() -> dict[int, int]:
    """GPU memory by process: pid → bytes, summed over the GPUs; empty without GPUs."""
    found: dict[int, int] = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return found
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                found[int(one.pid)] = found.get(int(one.pid), 0) + int(one.usedGpuMemory or 0)
    finally:
        pynvml.nvmlShutdown()
    return found


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(p for p in [path.absolute(), *path.absolute().parents] if p.exists())


def _cpu() -> tuple[str, tuple[str, ...]]:
    """Model name and sorted features, from the kernel's own table."""
    model, features = platform.processor() or platform.machine(), ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return model, ()
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            model = value
        elif key in ("flags", "Features"):
            features = value
            break
    return model, tuple(sorted(set(features.split())))


def lease_folder(store: Path) -> Path:
    """Where running steps of a store say which GPUs they hold (`mmadmin.host.gpu_leases`)."""
    return store / "locks" / "gpus"


def driver_and_gpus(leases: Path | None = None) -> tuple[str, tuple[GpuFacts, ...]]:
    """Driver version and GPUs; both empty without NVIDIA's library.

    `leases` is the folder of the leases that are put beside them.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        buses = {_bus(pynvml.nvmlDeviceGetPciInfo(h)): i for i, h in enumerate(handles)}
        gpus = [_gpu(i, handle, buses) for i, handle in enumerate(handles)]
    finally:
        pynvml.nvmlShutdown()
    return driver, tuple(with_leases(gpus, leases) if leases else gpus)


def gpu_nodes(indices: Sequence[int]) -> list[Path]:
    """The device files that a program needs to use these GPUs, and no other GPU's."""
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        minors = [pynvml.nvmlDeviceGetMinorNumber(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
    nodes = [Path("/dev") / name for name in CONTROL_NODES]
    nodes += [Path(f"/dev/nvidia{minor}") for minor in minors]
    return [node for node in nodes if node.exists()]


def with_leases(gpus: Sequence[GpuFacts], folder: Path) -> list[GpuFacts]:
    """The GPUs with what running steps hold of them; a lease that nobody holds is removed."""
    found: dict[int, list[GpuLease]] = {}
    for path in folder.glob("*.json"):
        if (lease := _lease(path)) is not None:
            for index, size in lease["gpus"].items():
                one = GpuLease(lease["owner"], lease["pid"], size)
                found.setdefault(int(index), []).append(one)
    return [replace(gpu, leases=tuple(found.get(gpu.index, ()))) for gpu in gpus]


def _lease(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return dict(json.load(file))
            path.unlink()  # its holder was killed
    except (FileNotFoundError, ValueError):  # it ended, or is being written
        pass
    return None


def _gpu(index: int, handle: Any, buses: Mapping[str, int]) -> GpuFacts:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return GpuFacts(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        compute_capability=f"{major}.{minor}",
        memory_total_bytes=int(memory.total),
        memory_free_bytes=int(memory.free),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        nvlink_peers=_nvlink_peers(handle, index, buses),
        processes=tuple(_process(int(p.pid), int(p.usedGpuMemory or 0)) for p in running),
    )


def _process(pid: int, memory_bytes: int) -> GpuProcess:
    try:
        ancestors = tuple(parent.pid for parent in psutil.Process(pid).parents())
    except psutil.Error:  # it has ended, or belongs to another namespace
        ancestors = ()
    return GpuProcess(pid, memory_bytes, ancestors)


def _nvlink_peers(handle: Any, index: int, buses: Mapping[str, int]) -> tuple[int, ...]:
    """The GPUs at the other ends of its active links; a GPU without NVLink has none.

    A link that ends at a switch names no GPU: every GPU of the host is then a peer.
    """
    peers: set[int] = set()
    for link in range(_NVLINK_MAX):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            remote = buses.get(_bus(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
        except pynvml.NVMLError:  # it has no more links, or does not answer this
            break
        peers |= set(buses.values()) if remote is None else {remote}
    return tuple(sorted(peers - {index}))


def _bus(pci: Any) -> str:
    return _text(pci.busId).lower()


def _text(value: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
