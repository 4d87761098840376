"""A real llama-server for the length of a test, straight from the engine object."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

SECRET = "test-secret"
START_TIMEOUT_S = 120


@contextmanager
def running_server(server: Path, model: Path, log: Path, *argv: str) -> Iterator[httpx.Client]:
    """Start it, wait until it is healthy, hand over a client with the key; end it afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [server, "--model", model, "--host", "127.0.0.1", "--port", str(port), *argv]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={"LLAMA_API_KEY": SECRET}
        )
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {SECRET}"},
            timeout=120,
        ) as client:
            end = time.monotonic() + START_TIMEOUT_S
            while not healthy(client):
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < end, log.read_text()[-2000:]
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def healthy(client: httpx.Client) -> bool:
    """True once the model is loaded."""
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
