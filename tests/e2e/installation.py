"""A whole installation for a test: real supervisord, broker, panel, gate, worker, beat, engines.

Brought up by `mm up` itself, in a folder and on ports of its own, its store seeded with the engine
of the test cache. Everything is done through the `mm` command, HTTP and signals, as a person would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from mmadmin.core.home import Home
from mmadmin.core.store import Store
from mmadmin.host.supervisor import Supervisor
from tests.support.engine import EngineStore
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
CATALOG = ROOT / "deployments" / "catalog"
MM = [sys.executable, "-c", "from mmadmin.cli.entry import main; main()"]
PATIENCE_S = 180.0


def wait_for(what: str, look: Callable[[], Any], *, patience_s: float = PATIENCE_S) -> Any:
    """The first true value that `look` gives; fails in words after a while."""
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        if found := look():
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {patience_s:.0f} s")


@dataclass
class Installation:
    """One installation and the ways in."""

    home: Home
    env: dict[str, str]

    @property
    def gate(self) -> str:
        """The gate's address."""
        return f"http://127.0.0.1:{self.env['MM_GATE_PORT']}"

    @property
    def panel(self) -> str:
        """The panel's address."""
        return f"http://127.0.0.1:{self.env['MM_PANEL_PORT']}"

    @property
    def supervisor(self) -> Supervisor:
        """Its supervisor's client."""
        return Supervisor(self.home)

    def run(self, *words: str, code: int = 0, timeout_s: float = 600) -> str:
        """Run `mm` with these words; it must end with `code`. What it said; errors stand alone."""
        done = subprocess.run(
            [*MM, *words],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == code, f"mm {' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout or done.stderr

    def json(self, *words: str, code: int = 0) -> Any:
        """Run `mm … --json`; the document."""
        return json.loads(self.run(*words, "--json", code=code))

    def deployment(self, name: str) -> dict[str, Any]:
        """One deployment out of `mm status`."""
        found = {d["name"]: d for d in self.json("status")["deployments"]}
        return found[name]

    def key(self) -> str:
        """A fresh client key."""
        return str(self.json("keys", "issue", "--owner", "test")["key"])

    def ask(
        self, key: str, model: str, *, words: str = "Hello!", tokens: int = 8
    ) -> httpx2.Response:
        """One chat completion through the gate."""
        return httpx2.post(
            f"{self.gate}/v1/chat/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={
                "model": model,
                "messages": [{"role": "user", "content": words}],
                "max_tokens": tokens,
                "temperature": 0,
            },
            timeout=PATIENCE_S,
            trust_env=False,
        )

    def answered(self, key: str, model: str) -> str:
        """Ask until it is answered (the gate may not know a fresh key yet); x-mm-generation."""
        answer = wait_for(
            "an answer",
            lambda: (a := self.ask(key, model)).status_code == httpx2.codes.OK and a,
        )
        assert answer.json()["choices"][0]["message"]["content"]
        return str(answer.headers["x-mm-generation"])

    def kill(self, program: str) -> int:
        """SIGKILL a supervised program (alone, as the kernel would); its pid."""
        pid = self.supervisor.pid(program)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    def family(self, program: str) -> list[psutil.Process]:
        """A supervised program with all that it has started, sandboxes and their content too."""
        pid = self.supervisor.pid(program)
        assert pid is not None
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]

    def restarted(self, program: str, old_pid: int) -> None:
        """Wait until the supervisor has started the program again."""
        wait_for(f"a new {program}", lambda: (self.supervisor.pid(program) or old_pid) != old_pid)

    def processes(self) -> list[psutil.Process]:
        """Every process of this installation, whoever its parent is now."""
        mark = f"unix://{self.home.supervisor_socket}"
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SUPERVISOR_SERVER_URL") == mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def store(self) -> Store:
        """Its store."""
        return Store(self.home.store)


def installation(
    folder: Path,
    engine: EngineStore,
    *,
    up: bool = True,
    more: Mapping[str, str] | None = None,
) -> Iterator[Installation]:
    """Bring an installation up (or leave that to the test); end it afterwards in any case.

    `more` are further variables of its environment.
    """
    panel, gate, metrics = free_ports(3)
    hidden = ("MM_", "DJANGO_", "DATABASE_URL", "REDIS_URL", "PUBLIC_ORIGIN", "PYTEST_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    env |= {
        "MM_HOME": str(folder),
        "MM_PANEL_PORT": str(panel),
        "MM_GATE_PORT": str(gate),
        "MM_METRICS_PORT": str(metrics),
        **(more or {}),
    }
    made = Installation(Home(folder), env)
    engine.seed(made.store())
    try:
        if up:
            made.run("up", "--no-demo")
        yield made
    finally:
        made.run("down")
        left = made.processes()
        for process in left:
            process.kill()
        assert not left, f"mm down left {left}"
