"""What this machine is: CPU, memory, compiler, GPUs, CUDA toolkit, disk.

Blocking, a few tens of milliseconds; nothing is cached. A machine without NVIDIA's library simply
has no GPUs.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import psutil
import pynvml

from mmadmin.core.errors import ToolMissing
from mmadmin.core.facts import GpuFacts, HostFacts
from mmadmin.host import compiler as toolchain


def host_facts(store: Path | None = None) -> HostFacts:
    """Look at this machine; `store` names a folder of the disk that is asked for its room."""
    memory = psutil.virtual_memory()
    model, features = _cpu()
    driver, gpus = _gpus()
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
    )


def compiler() -> str:
    """The C++ compiler that a build here would use, as `gcc-12.2.0`; empty = none."""
    try:
        return toolchain.compiler().label
    except ToolMissing:
        return ""


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


def _gpus() -> tuple[str, tuple[GpuFacts, ...]]:
    """Driver version and GPUs."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return driver, tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> GpuFacts:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return GpuFacts(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        compute_capability=f"{major}.{minor}",
        memory_total_bytes=int(memory.total),
        memory_free_bytes=int(memory.free),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
    )


def _text(value: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
