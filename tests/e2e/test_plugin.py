"""An engine, a model format and recipes of another package go the whole way; nothing else knows them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.e2e.installation import ROOT, Installation, installation
from tests.support.engine import EngineStore

PLUGIN = ROOT / "tests" / "plugin"
NAME = "parrot"


@pytest.fixture(scope="module")
def site(
    engine_store: EngineStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """An installation that has the plug-in."""
    paths = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    yield from installation(
        tmp_path_factory.mktemp("plugin"), engine_store, more={"PYTHONPATH": paths}
    )


def deployment(folder: Path, **serve: int) -> Path:
    """A deployment file, and its model beside it."""
    model = folder / "parrot.toy"
    model.write_text(json.dumps({"name": "parrot", "context": 128, "words": ["cracker", "pretty"]}))
    file = folder / "parrot.toml"
    lines = [f"{name} = {value}" for name, value in {"load_ms": 300, **serve}.items()]
    file.write_text(
        f'name = "{NAME}"\n[model]\nsource = "path"\npath = "{model}"\n'
        '[engine]\nkind = "toy"\ngreeting = "Ahoy"\n[serve]\n' + "\n".join(lines) + "\n"
    )
    return file


def test_a_plug_in_is_planned_built_served_changed_and_rolled_back(
    site: Installation, tmp_path: Path
) -> None:
    """By `mm`, the gate, the REST API and the panel."""
    file = deployment(tmp_path)
    plan = site.json("plan", str(file))
    assert {step["recipe"] for step in plan["steps"]} == {
        *("fetch", "toy-engine", "toy-report", "system")
    }
    assert "fits" in site.run("fit", str(file))

    first = site.json("deploy", str(file), "--reason", "first words")
    assert (first["number"], first["state"]) == (1, "live")
    key = site.key()
    assert site.answered(key, NAME) == f"{NAME}/1"
    answer = site.ask(key, NAME, tokens=3).json()
    assert answer["choices"][0]["message"]["content"] == "Ahoy cracker pretty"
    with httpx2.stream(
        "POST",
        f"{site.gate}/v1/chat/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": NAME, "messages": [{"role": "user", "content": "hi"}], "stream": True},
        trust_env=False,
    ) as stream:
        events = [line for line in stream.iter_lines() if line.startswith("data:")]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 2
    refused = site.ask(key, NAME, words="word " * 65)
    assert refused.status_code == 400, "the engine says 500 to what is wrong with the request"

    second = site.json("deploy", str(deployment(tmp_path, lanes=3)), "--reason", "more lanes")
    states = {step["recipe"]: step["state"] for step in second["build"]["steps"]}
    assert (second["number"], second["state"], states["toy-engine"]) == (2, "live", "cached")
    changes = {row["field"] for row in site.json("diff", NAME, "1", "2")}
    assert any("lanes" in field for field in changes), changes
    back = site.json("rollback", NAME, "--reason", "fewer lanes")
    assert (back["target"], back["state"]) == (1, "succeeded")
    assert site.answered(key, NAME) == f"{NAME}/1"

    too_wide = site.json("deploy", str(deployment(tmp_path, window=4000)), "--reason", "x", code=1)
    assert "serve.window" in json.dumps(too_wide)
    unknown = deployment(tmp_path, lans=1)
    assert "lanes" in site.run("plan", str(unknown), code=1)
    assert site.json("doctor", code=0) is not None


def test_api_and_pages_show_it_as_any_other(site: Installation, tmp_path: Path) -> None:
    """The API takes its file; the pages of deployment, generation, new file and host answer."""
    password = site.json("password", "admin")["password"]
    with httpx2.Client(base_url=site.panel, trust_env=False, timeout=60) as http:
        http.get("/login/")
        form = {"username": "admin", "password": password}
        form["csrfmiddlewaretoken"] = http.cookies["csrftoken"]
        assert http.post("/login/", data=form, headers={"Referer": site.panel}).status_code == 302
        text = deployment(tmp_path, lanes=4).read_text()
        site.run("policy", "allow", "folder", str(tmp_path), "--reason", "for the panel")
        token = http.cookies["csrftoken"]
        made = http.post(
            "/api/v1/plans",
            json={"spec_toml": text},
            headers={"X-CSRFToken": token, "Referer": site.panel},
        )
        assert made.is_success, made.text
        for page in (
            "/",
            f"/deployments/{NAME}/",
            f"/deployments/{NAME}/generations/1/",
            "/hosts/",
            "/deployments/new/",
        ):
            answer = http.get(page, follow_redirects=True)
            assert answer.status_code == 200, page
