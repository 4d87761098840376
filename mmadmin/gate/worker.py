"""One gate worker: the application, its clock, its directory and its two servers.

The client port serves the endpoints and nothing else; health and metrics have their own port. On
shutdown, a worker takes no new connections, lets running requests finish within a bound, ends the
rest with an error, and delivers its usage records.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import uvicorn

from mmadmin.gate.app import Gate, Message, Receive, Send
from mmadmin.gate.cors import Cors
from mmadmin.gate.directory import RedisDirectory, connect
from mmadmin.gate.heartbeat import Heartbeat
from mmadmin.gate.limits import Limiter
from mmadmin.gate.metrics import merge
from mmadmin.gate.request import Stop
from mmadmin.gate.settings import GateSettings
from mmadmin.gate.spool import Spool
from mmadmin.gate.wire import GatheringProtocol

KEEP_ALIVE_S = 125
"""Longer than the idle limits of the proxies in front (nginx 60 s, Cloudflare 100 s)."""
LAST_WORDS_S = 5
PEER_TIMEOUT_S = 2.0
log = logging.getLogger("mmadmin.gate")


class QuietServer(uvicorn.Server):
    """A server that leaves the signals to somebody else."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take none."""
        yield


def front_of(gate: Gate) -> Any:
    """What serves clients: the gate, for the pages of other origins too where that is allowed."""
    origins = gate.settings.cors_origins
    return Cors(gate, origins) if origins else gate


def server(app: Any, *, graceful_s: int | None = None, keep_alive_s: int = 5) -> QuietServer:
    """A uvicorn server as the gate runs it: uvloop, httptools, no logs of its own."""
    return QuietServer(
        uvicorn.Config(
            app,
            http=GatheringProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=graceful_s,
            backlog=4096,
        )
    )


async def wind_down(
    gate: Gate, front: QuietServer, serving: asyncio.Task[None], *, within_s: float
) -> None:
    """Take no new connections, let requests finish, after `within_s` end the rest with an error."""
    gate.traffic.stopping = True
    gate.traffic.changed.set()
    front.should_exit = True
    await asyncio.wait({serving}, timeout=within_s)
    for request in tuple(gate.traffic.requests.values()):
        request.stop(Stop.STOPPING)
    await serving


class Worker:
    """Runs until it is stopped."""

    def __init__(self, settings: GateSettings, index: int = 0) -> None:
        self.settings = settings
        self.index = index
        self._stop = asyncio.Event()
        self._orphaned = False

    def orphan(self) -> None:
        """Begin to stop, and leave the ports to whoever comes after the dead parent."""
        self._orphaned = True
        self._stop.set()

    def stop(self) -> None:
        """Begin to stop; `run` returns when everything has ended."""
        self._stop.set()

    async def run(self, clients: socket.socket, metrics: socket.socket) -> None:
        """Serve on the two listening sockets."""
        settings = self.settings
        folder = settings.home.gate
        spool = Spool(folder / "spool", fsync=settings.spool_fsync)
        redis = connect(settings.redis_url)
        directory = RedisDirectory(redis, folder, spool)
        limiter = Limiter(redis)
        gate = Gate(settings, directory, limiter=limiter, worker=str(self.index))
        await directory.start()
        await gate.start()
        heartbeat = Heartbeat(gate.traffic, redis, spool.id)
        heartbeat.start()
        limiter.start()
        gate.traffic.metrics.gauges = lambda: {
            "mm_gate_snapshot_version": (
                "Version served from.",
                float(gate.traffic.snapshot.version),
            ),
            "mm_gate_broker_up": ("1 while the broker is connected.", float(directory.connected)),
            "mm_gate_usage_undelivered": (
                "Usage records not yet delivered.",
                float(directory.courier.undelivered),
            ),
            "mm_gate_spool_errors": ("Failed writes of the spool.", float(spool.errors)),
        }
        back = BackRoom(gate, settings.home.run_dir, settings.port, self.index, settings.workers)
        graceful_s = settings.stop_s + LAST_WORDS_S
        front = server(front_of(gate), graceful_s=graceful_s, keep_alive_s=KEEP_ALIVE_S)
        behind = server(back)
        serving = asyncio.create_task(front.serve(sockets=[clients]))
        health = asyncio.create_task(behind.serve(sockets=[metrics, *back.sockets()]))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, health, stopping}, return_when=asyncio.FIRST_COMPLETED)
        behind.should_exit = self._orphaned
        await wind_down(gate, front, serving, within_s=settings.stop_s)
        behind.should_exit = True
        await health
        stopping.cancel()
        await heartbeat.stop()
        await limiter.stop()
        await directory.stop()
        await redis.aclose()
        back.close()


class BackRoom:
    """`/healthz`, `/readyz` and `/metrics`; every worker can answer for all of them.

    Workers share the port, so the one that is asked for metrics collects its siblings' over their
    Unix sockets.
    """

    def __init__(self, gate: Gate, run_dir: Path, port: int, index: int, workers: int) -> None:
        self._gate = gate
        self._paths = {n: run_dir / f"gate-{port}-{n}.sock" for n in range(workers)}
        self._own = self._paths.pop(index)
        self._run_dir = run_dir

    def sockets(self) -> Iterable[socket.socket]:
        """The Unix socket for the siblings, when there are any."""
        if not self._paths:
            return ()
        self._run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._own.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(self._own))
        self._own.chmod(0o600)
        return (listening,)

    def close(self) -> None:
        """Take the Unix socket away."""
        if self._paths:
            self._own.unlink(missing_ok=True)

    async def __call__(self, scope: Message, _receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        gate = self._gate
        kind = b"application/json"
        status, body = 404, b'{"error":"unknown URL"}'
        match scope["path"]:
            case "/healthz":
                status, body = 200, b'{"alive":true}'
            case "/readyz":
                traffic = gate.traffic
                status = 200 if traffic.ready else 503
                state = {
                    "ready": traffic.ready,
                    "snapshot": traffic.snapshot.version,
                    "stopping": traffic.stopping,
                    "requests": len(traffic.requests),
                }
                body = json.dumps(state).encode()
            case "/metrics":
                kind = b"text/plain; version=0.0.4; charset=utf-8"
                status, body = 200, await self._metrics(alone=b"alone" in scope["query_string"])
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _metrics(self, *, alone: bool) -> bytes:
        text = self._gate.traffic.metrics.text()
        if alone or not self._paths:
            return text
        others = await asyncio.gather(*(_peer(path) for path in self._paths.values()))
        return merge([text, *(other for other in others if other)])


async def _peer(path: Path) -> bytes:
    """A sibling's metrics; empty when it does not answer (it is being restarted)."""
    try:
        async with asyncio.timeout(PEER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(b"GET /metrics?alone HTTP/1.0\r\n\r\n")
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
    return answer.partition(b"\r\n\r\n")[2]
