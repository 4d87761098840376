"""The first `mm up`: the demo built by the worker, served, keyed, asked; interrupted and resumed."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from mmadmin.core.store.locks import file_lock
from tests.e2e.installation import MM, PATIENCE_S, ROOT, Installation, installation, wait_for
from tests.support.engine import EngineStore

NAME = "smollm2-135m"


@pytest.fixture
def fresh(engine_store: EngineStore, tmp_path: Path) -> Iterator[Installation]:
    """An installation that was never up."""
    yield from installation(tmp_path / "home", engine_store, up=False)


def hears_interrupts() -> None:
    """As in a terminal; a shell's background job would be born deaf to them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.timeout(1800)
def test_first_up_and_the_next_ones(fresh: Installation) -> None:
    """Interrupted once, run again: login, answer, key and a curl line that works.

    The next `mm up` has nothing to do. After `mm down` everything, engines too, is gone, and
    `mm up` brings back what was live.
    """
    with file_lock(fresh.store().layout.lock("gc")):  # the build waits for that
        first = subprocess.Popen(
            [*MM, "up"],
            cwd=ROOT,
            env=fresh.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=hears_interrupts,  # noqa: PLW1509 (no threads here)
        )
        try:
            wait_for("a deployment", (fresh.home.root / "first-run.json").exists)
        finally:
            first.send_signal(signal.SIGINT)
            said = first.communicate(timeout=PATIENCE_S)[0].decode()
    assert first.returncode == 130
    assert re.search(r"password \S{16}", said), "shown before what takes long"

    said = fresh.run("up")
    assert "What is 17 * 23?" in said
    assert re.search(r"[1-9][0-9.]* tokens/s", said)
    assert f"{fresh.panel}" in said
    key = re.search(r"^key +(sk-mm-\S+)", said, re.MULTILINE)
    line = re.search(r"^try +(curl .+)$", said, re.MULTILINE)
    assert key
    assert line
    asked = subprocess.run(["bash", "-c", line[1]], capture_output=True, text=True, check=True)
    assert json.loads(asked.stdout)["choices"][0]["message"]["content"]
    answer = fresh.ask(key[1], NAME)
    assert answer.headers["x-mm-generation"] == f"{NAME}/1"
    assert fresh.deployment(NAME)["newest_generation"] == 1
    page = httpx2.get(f"{fresh.panel}/login/", trust_env=False, timeout=PATIENCE_S)
    assert page.status_code == httpx2.codes.OK

    before = {s["name"]: s["pid"] for s in fresh.json("status")["services"]}
    again = fresh.run("up")
    assert {s["name"]: s["pid"] for s in fresh.json("status")["services"]} == before
    assert "sk-mm-" not in again
    assert "password as it was shown" in again

    fresh.run("down")
    assert not fresh.processes()
    assert fresh.json("status")["supervisor"] is False
    fresh.run("up", "--no-demo")
    wait_for("the model", lambda: fresh.ask(key[1], NAME).status_code == httpx2.codes.OK)


def test_a_taken_port_is_named(fresh: Installation) -> None:
    """Exit 1, the process by name and pid, the variable that moves our port; nothing started."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", int(fresh.env["MM_GATE_PORT"])))
        holder.listen()
        said = fresh.json("up", "--no-demo", code=1)
    assert f"pid {os.getpid()}" in said["error"]["message"]
    assert "MM_GATE_PORT=" in said["error"]["remedy"]
    assert not fresh.processes()
