"""Who listens on a TCP port of this machine."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

COMMAND_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Listener:
    """A process that listens on a port."""

    pid: int | None
    name: str
    command: str

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        return f"{self.name} (pid {self.pid}): {self.command}"


def listener(port: int) -> Listener | None:
    """The process that listens on a TCP port of this machine, None when nothing does."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr[1:2] != (port,):
            continue
        if connection.pid is None:
            return Listener(pid=None, name="", command="")
        try:
            process = psutil.Process(connection.pid)
            command = " ".join(process.cmdline())[:COMMAND_SHOWN]
            return Listener(pid=process.pid, name=process.name(), command=command)
        except psutil.NoSuchProcess:
            continue
    return None
