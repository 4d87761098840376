"""The main job from end to end: deploy, key, chat, change, roll back, revoke."""

import json
import stat
from pathlib import Path

import httpx2
import pytest

from mmadmin.core.home import Home
from tests.e2e.installation import CATALOG, Installation, wait_for
from tests.support.engine import EngineStore

NAME = "smollm2-135m"


def quantized(tmp_path: Path) -> Path:
    """The catalog's deployment with its model quantized anew."""
    text = (CATALOG / f"{NAME}.toml").read_text(encoding="utf-8")
    path = tmp_path / "q8.toml"
    path.write_text(text.replace("[model]\n", '[model]\nquantize = "Q8_0"\n'), encoding="utf-8")
    return path


@pytest.mark.timeout(1800)
def test_deploy_change_roll_back(
    site: Installation, engine_store: EngineStore, tmp_path: Path
) -> None:
    """Generation 1, then 2 (only what changed is built), then 1 again; the gate follows."""
    first = site.json("deploy", str(CATALOG / f"{NAME}.toml"), "--reason", "first")
    assert (first["number"], first["state"]) == (1, "live")
    assert {step["state"] for step in first["build"]["steps"]} == {"cached"}
    assert (
        site.deployment(NAME).items()
        >= {
            "name": NAME,
            "public_name": NAME,
            "host": "local",
            "live_generation": 1,
            "newest_generation": 1,
            "state": "live",
            "alarms": [],
        }.items()
    )
    key = site.key()
    assert site.answered(key, NAME) == f"{NAME}/1"

    engine_store.seed(site.store(), "tools")
    second = site.json("deploy", str(quantized(tmp_path)), "--reason", "better weights")
    assert (second["number"], second["state"]) == (2, "live")
    states = {(step["recipe"], step["state"]) for step in second["build"]["steps"]}
    assert ("build-engine", "built") not in states
    assert ("quantize-gguf", "built") in states
    assert second["system"] != first["system"]
    assert site.answered(key, NAME) == f"{NAME}/2"
    changes = site.json("diff", NAME, "1", "2")
    assert any("quantize" in row["field"] for row in changes), changes

    back = site.json("rollback", NAME, "--reason", "worse answers")
    assert (back["target"], back["kind"], back["state"]) == (1, "rollback", "succeeded")
    assert site.answered(key, NAME) == f"{NAME}/1"
    rows = site.json("history", NAME)
    assert [(r["number"], r["state"], r["reason"]) for r in rows] == [
        (2, "retired", "better weights"),
        (1, "live", "first"),
    ]
    assert rows[1]["system"] == first["system"]
    tried = site.json("template", "test", NAME)
    assert tried["engine_asked"]
    assert {row["conversation"]: row["ok"] for row in tried["rows"]}["plain"]

    site.run("keys", "revoke", key.split("-")[2])
    refused = wait_for(
        "the refusal",
        lambda: (a := site.ask(key, NAME)).status_code == httpx2.codes.UNAUTHORIZED and a,
    )
    assert refused.json()["error"]["code"]


def test_secrets_are_private_and_nowhere_else(site: Installation) -> None:
    """A client key and the installation's secrets are in no log, argv or generated file."""
    key = site.key()
    site.ask(key, NAME)
    secrets = [p.read_text().strip() for p in site.home.secrets.iterdir()] + [key]
    modes = {stat.S_IMODE(p.stat().st_mode) for p in site.home.secrets.iterdir()}
    assert modes == {0o600}
    texts = [p for p in site.home.logs.rglob("*") if p.is_file()]
    texts += [p for p in site.home.supervisor.rglob("*") if p.is_file()]
    argvs = "\n".join(" ".join(p.cmdline()) for p in site.processes())
    for secret in secrets:
        assert secret not in argvs
        for path in texts:
            assert secret not in path.read_text(errors="replace"), path


def test_export_and_import(site: Installation, tmp_path: Path) -> None:
    """A generation in a folder, taken over by another installation: the same system object."""
    if NAME not in {d["name"] for d in site.json("status")["deployments"]}:
        site.run("deploy", str(CATALOG / f"{NAME}.toml"), "--reason", "to export", "--no-activate")
    folder = tmp_path / "bundle"
    sent = site.json("export", NAME, str(folder), "--generation", "1")
    assert sent["generation"] == f"{NAME}/1"
    there = Installation(Home(tmp_path / "there"), {**site.env, "MM_HOME": str(tmp_path / "there")})
    there.run("init")
    taken = there.json("import", str(folder))
    assert (taken["deployment"], taken["number"], taken["state"]) == (NAME, 1, "built")
    assert taken["system"] == sent["system"]
    (row,) = there.json("history", NAME)
    assert row["system"] == sent["system"]
    assert row["reason"].startswith(f"imported {NAME}/1 by admin")
    assert {root.key for root in there.store().roots()} == {f"{NAME}/1"}
    theirs, ours = (
        {name: site_.store().object(name) for name in site_.store().closure(sent["system"])}
        for site_ in (there, site)
    )
    assert theirs.keys() == ours.keys()
    refused = there.json("import", str(tmp_path), code=1)
    assert refused["error"]["code"] == "not_found"


def test_a_second_up_changes_nothing(site: Installation) -> None:
    """`mm up` again: same processes."""
    before = {s["name"]: s["pid"] for s in site.json("status")["services"]}
    again = json.loads(site.run("up", "--no-demo", "--json"))
    assert {s["name"]: s["pid"] for s in again["services"]} == before
    assert again["password"] is None
