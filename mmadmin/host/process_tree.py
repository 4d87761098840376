"""What a process holds together with its descendants.

An engine may leave the work to worker processes: then they hold the GPU memory and the port, not
the process that the supervisor started. So an engine is always looked at as a tree.
"""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from mmadmin.core.process_identity import ProcessIdentity


def members(pid: int) -> list[ProcessIdentity]:
    """A process and its descendants, the process first; empty when it has ended."""
    return [found for one in _processes(pid) if (found := ProcessIdentity.of(one.pid)) is not None]


def resident_bytes(pid: int) -> int:
    """What a process tree has in main memory, files that it maps included.

    Pages that its processes share are counted once, as far as the kernel tells: by the largest.
    """
    memory = [(int(one.rss), int(one.shared)) for one in _memory(pid)]
    return sum(rss - shared for rss, shared in memory) + max((s for _, s in memory), default=0)


def own_memory_bytes(pid: int) -> int:
    """What the end of a process tree would free: its pages that no file is behind."""
    return sum(max(int(one.rss) - int(one.shared), 0) for one in _memory(pid))


def listens(pid: int, port: int) -> bool:
    """True when a process or one of its descendants listens on a TCP port."""
    return any(_listens(one, port) for one in _processes(pid))


def _processes(pid: int) -> Iterator[psutil.Process]:
    """The process first; its descendants are looked for only when they are asked for."""
    try:
        root = psutil.Process(pid)
        yield root
        yield from root.children(recursive=True)
    except psutil.NoSuchProcess:
        return


def _memory(pid: int) -> Iterator[psutil._ntuples.pmem]:
    for one in _processes(pid):
        try:
            yield one.memory_info()
        except psutil.NoSuchProcess:
            continue


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return False
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in connections
        if connection.laddr
    )
