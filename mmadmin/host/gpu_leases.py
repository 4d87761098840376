"""GPUs that running build steps hold, from before a step starts until its last program ends.

A lease is a file beside the store's locks that its holder keeps locked, so that it ends with its
holder, however that ends. Whoever looks at the host's GPUs sees the leases (`GpuFacts.leases`):
placement, previews, activations and other steps count what a lease has not taken yet as taken.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from mmadmin.core.build.recipe import Requirements
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.callbacks import Report
from mmadmin.core.errors import DoesNotFit
from mmadmin.core.fit.facts import GpuFacts
from mmadmin.core.fit.placement import HOST_RESERVE_BYTES, RESERVE_BYTES, Running
from mmadmin.core.store.locks import file_lock
from mmadmin.host.facts import driver_and_gpus, lease_folder

POLL_S = 1.0
WHOLE_PERMILLE = 950
"""Of a GPU's memory, in thousandths, what counts as all of it: the driver keeps some."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The GPUs that a step was given."""

    gpus: tuple[GpuFacts, ...] = ()
    lock_fd: int | None = None
    """Descriptor of the lease."""

    @property
    def inherit(self) -> tuple[int, ...]:
        """Descriptors that keep the lease until the step's last process has ended."""
        return () if self.lock_fd is None else (self.lock_fd,)


@contextmanager
def hold(
    store: Path,
    wanted: Requirements,
    owner: str,
    *,
    starting: Callable[[], Sequence[Running]],
    check: Callable[[], None],
    on_wait: Report,
) -> Iterator[Granted]:
    """Wait until the host has what a step requires, and hold its GPUs until the step ends.

    `starting` are engines that have been given memory and still load; `check` raises to stop
    waiting; `on_wait` is told what is missing, at every look. Raises `DoesNotFit` when the host
    can never have it.
    """
    folder = lease_folder(store)
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        check()
        with file_lock(folder / "choosing.lock"):
            gpus = _without(driver_and_gpus(folder)[1], starting())
            chosen, missing = _choose(wanted, gpus)
            if chosen is not None:
                path, fd = _write(folder, wanted, owner, chosen)
                break
        on_wait(missing)
        time.sleep(POLL_S)
    try:
        yield Granted(chosen, fd)
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _write(
    folder: Path, wanted: Requirements, owner: str, chosen: Sequence[GpuFacts]
) -> tuple[Path, int]:
    path = folder / f"{uuid.uuid4().hex}.json"
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    fcntl.flock(fd, fcntl.LOCK_EX)
    data = {
        "owner": owner,
        "pid": os.getpid(),
        "gpus": {str(gpu.index): _need(wanted, gpu) for gpu in chosen},
    }
    os.write(fd, json.dumps(data).encode())
    fresh.rename(path)  # whoever sees it sees it locked
    return path, fd


def _without(gpus: Sequence[GpuFacts], starting: Sequence[Running]) -> list[GpuFacts]:
    promised: dict[int, int] = {}
    for one in starting:
        for index, size in one.devices.items():
            promised[index] = promised.get(index, 0) + size
    return [
        replace(gpu, memory_free_bytes=max(gpu.memory_free_bytes - promised.get(gpu.index, 0), 0))
        for gpu in gpus
    ]


def _need(wanted: Requirements, gpu: GpuFacts) -> int:
    return wanted.gpu_memory_bytes or gpu.memory_total_bytes * WHOLE_PERMILLE // 1000


def _choose(
    wanted: Requirements, gpus: Sequence[GpuFacts]
) -> tuple[tuple[GpuFacts, ...] | None, str]:
    """The emptiest GPUs that do, or what is missing."""
    if wanted.memory_bytes + HOST_RESERVE_BYTES > psutil.virtual_memory().total:
        raise DoesNotFit(
            f"the step needs {bytes_text(wanted.memory_bytes)} of main memory",
            remedy="build it on a host with more memory",
        )
    large = [gpu for gpu in gpus if _need(wanted, gpu) + RESERVE_BYTES <= gpu.memory_total_bytes]
    if len(large) < wanted.gpus:
        size = (
            f" with {bytes_text(wanted.gpu_memory_bytes)} each" if wanted.gpu_memory_bytes else ""
        )
        raise DoesNotFit(
            f"the step needs GPUs{size}: {wanted.gpus}; the host has {len(large)}",
            remedy="build it on a host that has them",
        )
    emptiest = sorted(large, key=lambda gpu: (-gpu.available_bytes, gpu.index))[: wanted.gpus]
    for gpu in emptiest:
        if _need(wanted, gpu) + RESERVE_BYTES > gpu.available_bytes:
            return None, f"{bytes_text(_need(wanted, gpu))} of GPU {gpu.index}{_holders(gpu)}"
    available = psutil.virtual_memory().available
    if wanted.memory_bytes and wanted.memory_bytes + HOST_RESERVE_BYTES > available:
        return None, f"{bytes_text(wanted.memory_bytes)} of main memory"
    return tuple(sorted(emptiest, key=lambda gpu: gpu.index)), ""


def _holders(gpu: GpuFacts) -> str:
    leased = {lease.pid: lease.owner for lease in gpu.leases}
    names = [f"{lease.owner} holds {bytes_text(lease.memory_bytes)}" for lease in gpu.leases]
    names += [
        f"{_name(process.pid)} holds {bytes_text(process.memory_bytes)}"
        for process in gpu.processes
        if not any(pid in leased for pid in (process.pid, *process.ancestors))
    ]
    return "".join(f"; {name}" for name in names)


def _name(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"
