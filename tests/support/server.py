"""A real llama-server for the length of a test, straight from the engine object."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

SECRET = "test-secret"
PATIENCE_S = 600


@contextmanager
def running_server(server: Path, model: Path, log: Path, *argv: str) -> Iterator[httpx2.Client]:
    """Start it, wait until it is healthy, hand over a client with the key; end it afterwards."""
    folder = tempfile.mkdtemp(prefix="mm-engine-")
    path = f"{folder}/engine.sock"
    command = [server, "--model", model, "--host", path, *argv]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={"LLAMA_API_KEY": SECRET}
        )
    try:
        with httpx2.Client(
            base_url="http://localhost",
            transport=httpx2.HTTPTransport(uds=path),
            headers={"Authorization": f"Bearer {SECRET}"},
            timeout=PATIENCE_S,
        ) as client:
            end = time.monotonic() + PATIENCE_S
            while not healthy(client):
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < end, log.read_text()[-2000:]
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder)


def healthy(client: httpx2.Client) -> bool:
    """True once the model is loaded."""
    try:
        return client.get("/health").status_code == 200
    except httpx2.TransportError:
        return False
