"""Runs the gate: `python -m mmadmin.gateway`.

One worker serves in this process. With `MM_GATE_WORKERS` > 1 this process only opens the ports,
starts the workers on them and replaces those that die. It passes SIGTERM and SIGINT on, and a
worker stops when its parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time

import uvloop

from mmadmin.core.errors import MmError
from mmadmin.gate.open_files import raise_limit
from mmadmin.gate.settings import GateSettings
from mmadmin.gate.worker import Worker

RESTART_PAUSE_S = 0.5
COMMAND = (sys.executable, "-m", "mmadmin.gateway")
"""How the parent starts a worker; it is this module."""
GC_THRESHOLDS = (20_000, 20, 50)
"""A request leaves few cycles behind; the default thresholds cost pauses and free little."""
log = logging.getLogger("mmadmin.gateway")


def listening(host: str, port: int) -> socket.socket:
    """A listening TCP socket, inheritable by workers."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise SystemExit(f"the gate cannot listen on {host}:{port}: {error.strerror}") from error
    sock.listen(4096)
    sock.setblocking(False)  # noqa: FBT003 (a socket's own method)
    return sock


async def serve(
    settings: GateSettings,
    clients: socket.socket,
    metrics: socket.socket,
    *,
    index: int = 0,
    parent: int = -1,
) -> None:
    """Run one worker until a signal or the end of the parent."""
    loop = asyncio.get_running_loop()
    worker = Worker(settings, index)
    gc.freeze()  # what is loaded now is never freed: do not scan it again
    gc.set_threshold(*GC_THRESHOLDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    if parent >= 0:
        loop.add_reader(parent, _orphaned, loop, parent, worker)
    await worker.run(clients, metrics)


def _orphaned(loop: asyncio.AbstractEventLoop, parent: int, worker: Worker) -> None:
    loop.remove_reader(parent)
    worker.orphan()


class Parent:
    """Keeps N workers alive on shared sockets."""

    def __init__(self, settings: GateSettings) -> None:
        self._settings = settings
        self._sockets = (
            listening(settings.host, settings.port),
            listening(settings.metrics_host, settings.metrics_port),
        )
        self._alive, self._held = os.pipe()
        """Workers read `_alive`; it ends when this process, the only holder of `_held`, does."""
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def run(self) -> int:
        """Start the workers and replace those that die, until a signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        for index in range(self._settings.workers):
            self._start(index)
        while not self._stopping:
            time.sleep(0.1)
            for index, worker in tuple(self._workers.items()):
                if worker.poll() is not None and not self._stopping:
                    log.warning("gate worker %d ended with %s", index, worker.returncode)
                    time.sleep(RESTART_PAUSE_S)
                    self._start(index)
        for sock in self._sockets:
            sock.close()
        self._pass_on(signal.SIGTERM, None)  # one that was just being started has had no signal
        codes = [worker.wait() for worker in self._workers.values()]
        stopped = (-signal.SIGTERM, -signal.SIGINT)  # before it had begun to serve
        return max(0 if code in stopped else abs(code) for code in codes)

    def _start(self, index: int) -> None:
        descriptors = [sock.fileno() for sock in self._sockets] + [self._alive]
        self._workers[index] = subprocess.Popen(
            [*COMMAND, "worker", str(index), *map(str, descriptors)],
            pass_fds=descriptors,
        )

    def _pass_on(self, number: int, _frame: object) -> None:
        self._stopping = True
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(number)


def main(arguments: list[str]) -> int:
    """Run the gate as the environment says; `worker …` is how the parent starts its workers."""
    logging.basicConfig(
        level=os.environ.get("MM_LOG_LEVEL") or "INFO",
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        settings = GateSettings.from_env()
    except MmError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    raise_limit()
    if arguments[:1] == ["worker"]:
        index, clients, metrics, parent = map(int, arguments[1:])
        uvloop.run(
            serve(
                settings,
                socket.socket(fileno=clients),
                socket.socket(fileno=metrics),
                index=index,
                parent=parent,
            )
        )
        return 0
    if settings.workers > 1:
        return Parent(settings).run()
    uvloop.run(
        serve(
            settings,
            listening(settings.host, settings.port),
            listening(settings.metrics_host, settings.metrics_port),
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
