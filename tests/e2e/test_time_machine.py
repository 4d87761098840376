"""An earlier generation again, from its record alone, on a store that is empty: the same hashes."""

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from mmadmin.core.engines.system import read_system
from mmadmin.core.home import Home
from mmadmin.core.store import Store
from tests.e2e.installation import CATALOG, Installation
from tests.support.engine import EngineStore
from tests.support.server import running_server

NAME = "time-machine"
"""A deployment of its own: the site is shared."""
SENTENCE = "You are a terse assistant"


def named(text: str) -> str:
    """The catalog's small deployment under the name of these tests."""
    return text.replace('name = "smollm2-135m"', f'name = "{NAME}"', 1)


def from_files(folder: Path, engine: EngineStore) -> str:
    """A deployment of ready files of the host: nothing to compile, but a template to patch."""
    model = folder / "model.gguf"
    shutil.copyfile(engine.model, model)
    archive = folder / "engine.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(engine.server.parent, "bin")
    return f"""
name = "{NAME}"
[model]
source = "path"
path = "{model}"
[engine]
source = "path"
path = "{archive}"
prebuilt = true
subtree = "bin"
[[template.patches]]
kind = "replace"
old = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
new = "{SENTENCE}"
[serve]
context = 512
gpu_layers = 0
"""


def elsewhere(site: Installation, folder: Path) -> Installation:
    """Another machine, as good as: a home of its own, nothing in it, nothing running."""
    return replace(site, home=Home(folder), env=site.env | {"MM_HOME": str(folder)})


@pytest.mark.timeout(1800)
def test_a_generation_comes_back_on_an_empty_store(
    site: Installation, engine_store: EngineStore, tmp_path: Path
) -> None:
    """From a binary cache without building, from its sources by building; what is gone is said."""
    (tmp_path / "sources").mkdir()
    spec = tmp_path / "deployment.toml"
    spec.write_text(named((CATALOG / "smollm2-135m.toml").read_text(encoding="utf-8")))
    first = site.json("deploy", str(spec), "--no-activate", "--reason", "compiled")
    spec.write_text(from_files(tmp_path / "sources", engine_store))
    second = site.json("deploy", str(spec), "--no-activate", "--reason", "from files")
    history = tmp_path / "history.json"
    site.run("history", NAME, "--export", str(history))
    recorded = json.loads(history.read_text(encoding="utf-8"))["generations"]
    assert [row["system"] for row in recorded] == [first["system"], second["system"]]
    assert SENTENCE not in recorded[0]["renders"]["plain"]["output"]
    assert SENTENCE in recorded[1]["renders"]["plain"]["output"]
    assert recorded[0]["model_report"]["architecture"] == "llama"
    differing = site.json("diff", NAME, "1", "2")
    assert {"spec", "sources", "build", "template", "rendering"} <= {
        r["section"] for r in differing
    }

    public = site.run("store", "key", "tests").strip().split()[-1]
    cache = tmp_path / "cache"
    site.run("store", "push", str(cache), f"{NAME}/1")

    trusting = elsewhere(site, tmp_path / "trusting")
    trusting.home.root.mkdir()
    (trusting.home.root / "substituters.json").write_text(
        json.dumps({"caches": [str(cache)], "trusted": [public], "need": 1, "revoked": []})
    )
    again = trusting.json("rebuild", str(history), "1")
    assert again["system"] == first["system"]
    assert "build-engine" not in {s["recipe"] for s in again["steps"] if s["state"] == "built"}
    assert answers(trusting.store(), first["system"], tmp_path / "server.log")

    bare = elsewhere(site, tmp_path / "bare")
    again = bare.json("rebuild", str(history), "2")
    assert again["system"] == second["system"]
    built = {step["recipe"] for step in again["steps"] if step["state"] == "built"}
    assert {"fetch", "engine-prebuilt", "patch-template", "system"} <= built

    lacking = elsewhere(site, tmp_path / "lacking")
    with (tmp_path / "sources" / "model.gguf").open("ab") as file:
        file.write(b"more")
    assert "where the pin says" in refused(lacking, history)
    (tmp_path / "sources" / "model.gguf").unlink()
    said = refused(lacking, history)
    assert "No such file" in said
    assert "push it to a binary cache" in said


def refused(where: Installation, history: Path) -> str:
    """What is said of a rebuild that cannot be."""
    return where.run("rebuild", str(history), "2", "--json", code=1)


def answers(store: Store, system: str, log: Path) -> str:
    """What the engine of a system says, run from that store."""
    found = read_system(store.object_path(system))
    with running_server(
        found.parts["engine"] / "bin" / "llama-server",
        found.parts["model"],
        log,
        "--ctx-size",
        "512",
    ) as client:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == httpx2.codes.OK, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])
