"""A real llama-server with a real small model, and a gate in front of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

import httpx2

from mmadmin.core.access import engine_secret
from mmadmin.core.snapshot import ReplicaRoute
from tests.gate.harness import MASTER, MODEL, Harness
from tests.gate.stub import StubEngine

START_S = 300
SECRET = engine_secret(MASTER, "small-3-0")


@dataclass
class Server:
    """A running llama-server."""

    socket: str
    process: subprocess.Popen

    def get(self, path: str) -> httpx2.Response:
        """An answer of its own."""
        transport = httpx2.HTTPTransport(uds=self.socket)
        with httpx2.Client(transport=transport, timeout=300) as client:
            headers = {"Authorization": f"Bearer {SECRET}"}
            return client.get(f"http://localhost{path}", headers=headers)

    def slots(self) -> list[dict]:
        """The engine's own view of its slots."""
        return self.get("/slots").json()

    def tokens_written(self) -> int:
        """Tokens that it has generated since its start."""
        text = self.get("/metrics").text
        name = "llamacpp:tokens_predicted_total "
        (line,) = (line for line in text.splitlines() if line.startswith(name))
        return int(float(line.removeprefix(name)))

    @property
    def busy(self) -> int:
        """Slots at work."""
        return sum(slot["is_processing"] for slot in self.slots())


@contextlib.contextmanager
def launched(engine_store, *more: str) -> Iterator[Server]:
    """A running engine; ended with the block, however that ends."""
    folder = tempfile.mkdtemp(prefix="mm-engine-")
    path = f"{folder}/engine.sock"
    process = subprocess.Popen(
        [engine_store.server, "--model", engine_store.model, "--host", path, "--alias", MODEL, "--ctx-size", "4096", "--parallel", "2",
         "--slots", "--metrics", "--jinja", "--threads", "2", *more],
        env={**os.environ, "LLAMA_API_KEY": SECRET},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    running = Server(path, process)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if running.get("/health").status_code == 200:
                    break
            assert process.poll() is None, "the engine ended at its start"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield running
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def opened(tmp_path, server: Server) -> AsyncIterator[Harness]:
    """A gate in front of a real engine."""
    harness = Harness(tmp_path, StubEngine())
    replicas = (ReplicaRoute(uid="small-3-0", socket=server.socket, slots=2),)
    harness.route = replace(harness.route, replicas=replicas, context_per_slot=2048)
    async with harness.open():
        yield harness
