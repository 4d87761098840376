"""Hosts that are written down instead of looked at: a plan can be made for them on a laptop.

A description is a TOML file: CPU, memory, toolkit, and groups of like GPUs. It becomes the same
`HostFacts` that a real host reports, with all of its memory free.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmadmin.core.errors import InvalidInput, NotFound
from mmadmin.core.fit.facts import GpuFacts, HostFacts

GIB = 1024**3
FREE_SHARE_PERMILLE = 985
"""What the driver leaves of a GPU's memory, in thousandths: 31.5 of 32 GiB on a V100."""
_GROUP = {"count", "name", "compute_capability", "memory_gib", "nvlink"}
_HOST = {"name", "title", "arch", "cpu", "cpus", "cpu_features", "memory_gib", "disk_gib", "cuda"}
_HOST_ALL = _HOST | {"driver", "compiler", "gpus"}


def parse_host(text: str) -> tuple[str, HostFacts]:
    """Name and facts of a described host.

    Raises `InvalidInput` naming the field; unknown fields are refused.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(
            f"the host description is not TOML: {error}", remedy="see deployments/hosts"
        ) from error
    _refuse_unknown(data, _HOST_ALL, "")
    name = _text(data, "name", "")
    memory = _number(data, "memory_gib", "") * GIB
    disk = _number(data, "disk_gib", "", 1000) * GIB
    gpus: list[GpuFacts] = []
    for position, group in enumerate(data.get("gpus", [])):
        gpus += _group(group, f"gpus[{position}].", len(gpus))
    return name, HostFacts(
        arch=_text(data, "arch", "", "x86_64"),
        os="linux",
        libc="glibc-2.36",
        cpu_model=_text(data, "cpu", "", "described"),
        cpu_features=tuple(sorted(str(f) for f in data.get("cpu_features", ["avx2"]))),
        cpu_count=_number(data, "cpus", ""),
        memory_total_bytes=memory,
        memory_available_bytes=memory * FREE_SHARE_PERMILLE // 1000,
        compiler=_text(data, "compiler", "", "gcc-12.2.0"),
        cuda=_text(data, "cuda", "", ""),
        driver=_text(data, "driver", "", ""),
        gpus=tuple(gpus),
        disk_free_bytes=disk,
        disk_total_bytes=disk,
        cuda_toolkits=(str(data["cuda"]),) if data.get("cuda") else (),
    )


def described_hosts(folder: Path) -> Mapping[str, HostFacts]:
    """Every description of a folder, by name. Raises `InvalidInput` naming the file."""
    hosts: dict[str, HostFacts] = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            name, facts = parse_host(path.read_text(encoding="utf-8"))
        except InvalidInput as error:
            raise InvalidInput(f"{path.name}: {error.message}", remedy=error.remedy) from error
        if name in hosts:
            raise InvalidInput(f"{path.name}: there is another host named {name}")
        hosts[name] = facts
    return hosts


def described_host(folder: Path, name: str) -> HostFacts:
    """One description by its host's name. Raises `NotFound` listing the known ones."""
    hosts = described_hosts(folder)
    if name not in hosts:
        raise NotFound(f"no host named {name!r} is described", remedy=f"known: {', '.join(hosts)}")
    return hosts[name]


def _group(group: Mapping[str, Any], where: str, first: int) -> list[GpuFacts]:
    """The GPUs of one group, numbered from `first`."""
    _refuse_unknown(group, _GROUP, where)
    count = _number(group, "count", where, 1)
    total = _number(group, "memory_gib", where) * GIB
    linked = bool(group.get("nvlink", False))
    indices = range(first, first + count)
    capability = _text(group, "compute_capability", where)
    if not capability.replace(".", "", 1).isdecimal():
        raise InvalidInput(
            f"{where}compute_capability is {capability!r}", remedy='write it as text: "7.0"'
        )
    return [
        GpuFacts(
            index=index,
            name=_text(group, "name", where),
            compute_capability=capability,
            memory_total_bytes=total,
            memory_free_bytes=total * FREE_SHARE_PERMILLE // 1000,
            nvlink_peers=tuple(i for i in indices if linked and i != index),
        )
        for index in indices
    ]


def _refuse_unknown(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in data:
        if key not in known:
            raise InvalidInput(
                f"{where}{key} is not a field of a host",
                remedy=f"known: {', '.join(sorted(known))}",
            )


def _text(data: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = data.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise InvalidInput(f"{where}{key} is missing", remedy=f'write {key} = "…"')
    return value


def _number(data: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = data.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidInput(
            f"{where}{key} must be a whole number above 0", remedy=f"write {key} = 1"
        )
    return value
