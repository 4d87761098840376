"""What a process holds together with its descendants.

An engine may leave the work to worker processes: then they hold the GPU memory and the socket, not
the process that the supervisor started. So an engine is always looked at as a tree.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import psutil

from mmadmin.core.process_identity import ProcessIdentity

CONNECT_S = 5.0
_UCRED = struct.Struct("3i")
"""pid, uid and gid of whoever called `listen`."""


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


def listener(path: str) -> int | None:
    """The pid of the process that listens on a Unix socket; None = nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(CONNECT_S)
        try:
            client.connect(path)
        except OSError:
            return None
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[0])


def listens(pid: int, path: str) -> bool:
    """True when a process or one of its descendants listens on a Unix socket."""
    found = listener(path)
    return found is not None and any(one.pid == found for one in _processes(pid))


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
