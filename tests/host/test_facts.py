"""What a machine says about itself."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from mmadmin.core.fit.facts import host_facts_from_json
from mmadmin.host import facts as host_facts_module
from mmadmin.host.facts import host_facts


class FourCards:
    """NVML of a host with four linked cards, as far as it is asked."""

    NVMLError = pynvml.NVMLError

    def nvmlInit(self) -> None:  # noqa: N802
        """Nothing to prepare."""

    nvmlShutdown = nvmlInit  # noqa: N815

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        """Older bindings answer in bytes."""
        return b"550.54.15"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Four."""
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        """The index is the handle."""
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        """One bus a card."""
        return SimpleNamespace(busId=f"0000:{handle:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        """32 GiB, 1 used."""
        return SimpleNamespace(total=32 << 30, free=31 << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        """Volta."""
        return 7, 0

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        """A V100."""
        return "Tesla V100-SXM2-32GB"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        """Any."""
        return f"GPU-{handle}"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        """One program on the first card."""
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=1 << 30)] if handle == 0 else []

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        """Six links, the last one down."""
        if link > 5:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(link < 5)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:  # noqa: N802
        """Links go round to the other three cards."""
        return SimpleNamespace(busId=f"0000:{(handle + 1 + link % 3) % 4:02x}:00.0")


def test_this_machine_has_facts_that_survive_json() -> None:
    """CPU, memory, disks and compiler are there, and come back from a record as they were."""
    facts = host_facts()
    assert facts.cpu_count > 0
    assert facts.memory_total_bytes > facts.memory_available_bytes > 0
    assert facts.disk_total_bytes >= facts.disk_free_bytes > 0
    assert facts.cpu_features
    assert host_facts_from_json(facts.as_json()) == facts


def test_gpus_with_links_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capability, memory, the cards at the other ends of the links, and who holds memory."""
    monkeypatch.setattr(host_facts_module, "pynvml", FourCards())
    facts = host_facts()
    assert facts.driver == "550.54.15"
    assert facts.cuda_architectures == (70,)
    assert [gpu.nvlink_peers for gpu in facts.gpus] == [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]
    pid, parent = os.getpid(), os.getppid()
    assert [(p.pid, p.memory_bytes) for p in facts.gpus[0].processes] == [(pid, 1 << 30)]
    assert facts.gpus[0].held_by(parent) == facts.gpus[0].held_by(pid) == 1 << 30
    assert facts.gpus[0].held_by(2**22 + 5) == 0
    assert facts.gpus[1].processes == ()
    assert host_facts_from_json(facts.as_json()) == facts


def test_facts_of_later_versions_are_read() -> None:
    """Keys that this version does not know are left out."""
    data = host_facts().as_json() | {"quantum_cores": 7}
    assert host_facts_from_json(data) == host_facts_from_json(host_facts().as_json() | data)
