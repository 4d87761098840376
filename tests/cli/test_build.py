"""`mm plan`, `mm build`, `mm lock`, `mm store` on a store that has everything; no network, no records."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mmadmin.cli import build
from mmadmin.cli.main import app
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.rebuild import Check, Difference
from mmadmin.core.errors import InvalidSpec, NotFound
from mmadmin.core.home import Home
from mmadmin.core.spec.lock import lock_as_json
from mmadmin.core.spec.questions import questions
from mmadmin.core.spec.spec import parse_spec
from mmadmin.core.store import Store
from tests.support.engine import CATALOG, LOCK, EngineStore

FILE = str(CATALOG / "smollm2-135m.toml")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home whose lock for the catalog's deployment is made: nothing asks the network."""
    monkeypatch.setenv("MM_HOME", str(tmp_path))
    asked = questions(parse_spec(Path(FILE).read_text(encoding="utf-8")))
    path = build.lock_file(Home(tmp_path), "smollm2-135m")
    path.parent.mkdir()
    path.write_text(json.dumps(lock_as_json(LOCK) | {"asked": asked}), encoding="utf-8")
    return Home(tmp_path)


def mm(*words: str, code: int = 0) -> str:
    """Run a command; its stdout."""
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def test_plan_of_an_empty_store(home: Home) -> None:
    """Inputs first, each with what is to be done and why; bytes to fetch are known."""
    planned = json.loads(mm("plan", FILE, "--json"))
    kinds = [(step["recipe"], step["action"]) for step in planned["steps"]]
    assert kinds[0] == ("fetch", "fetch")
    assert kinds[-1] == ("system", "build")
    assert planned["fetch_bytes"] == sum(file.size for file in LOCK.files)
    assert all(step["why"] for step in planned["steps"])
    said = mm("plan", FILE)
    assert "0 in the store, 5 to build, 2 to fetch (124 MiB)" in said
    assert "124 MiB are written at least, of " in said


@pytest.mark.engine
def test_a_build_with_nothing_to_do(home: Home, engine_store: EngineStore) -> None:
    """All cached; the path is printed; a root keeps it; store commands find it."""
    engine_store.seed(Store(home.store))
    built = json.loads(mm("build", FILE, "--json"))
    assert {step["state"] for step in built["steps"]} == {"cached"}
    assert Path(built["path"], "manifest.json").exists()
    roots = {(root.kind, root.key) for root in Store(home.store).roots()}
    assert ("build", "smollm2-135m") in roots
    assert mm("store", "path", built["system"]).strip() == built["path"]
    with pytest.raises(NotFound):
        mm("store", "path", "no-such-object")


@pytest.mark.engine
def test_whether_a_package_fits_is_read_in_the_store(home: Home, engine_store: EngineStore) -> None:
    """Before the download its header cannot be seen, and it says what helps; then it is read."""
    with pytest.raises(InvalidSpec, match="before it is downloaded") as refused:
        mm("fit", FILE, "--on", "cpu")
    assert refused.value.details["command"] == "mm build FILE"
    engine_store.seed(Store(home.store))
    said = json.loads(mm("fit", FILE, "--on", "cpu", "--json"))
    assert said["answers"][0]["ok"] is True
    assert said["quant"] == engine_store.model.name
    assert said["size_bytes"] == engine_store.model.stat().st_size
    assert said["model"].startswith(str(home.store))


def test_a_mismatch_is_named_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """What differs is said, both sides are named, and scripts can tell."""
    same = Check("a" * 64, "match", "the same", "1-same")
    other = Check(
        "b" * 64, "mismatch", "1 file differs", "1-old", "2-new",
        (Difference("model.gguf", "2 tensors differ", ("output", "token_embd")),),
    )  # fmt: skip
    build._show_checks("tiny", [same], as_json=False)
    assert "1 of 1 steps came out as before" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        build._show_checks("tiny", [same, other], as_json=False)
    assert ended.value.exit_code == 1
    said = capsys.readouterr().out
    assert "1-old is kept beside 2-new" in said
    assert "model.gguf: 2 tensors differ" in said


def test_lock_is_kept_and_shown(home: Home) -> None:
    """What is pinned is answered from the file; a wrong part is wrong usage."""
    shown = json.loads(mm("lock", FILE, "--json"))
    assert shown["changed"] is False
    assert [f["sha256"] for f in shown["lock"]["pins"]["model"]] == [LOCK.one("model").sha256]
    mm("lock", FILE, "--update", "--only", "weights", code=2)


def test_a_step_that_another_builder_makes_is_told_once(capsys) -> None:
    """Asked many times a second, it says whom it waits for when that is new."""
    watcher = build.Watcher(quiet=False)
    engine = Derivation("llama.cpp", "build-engine", 1, {}, {})
    watcher.step_started(engine, "new")
    for holder in ("build 3 of a/1", "build 3 of a/1", "build 4 of b/1"):
        watcher.step_waiting(engine, holder)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "· build-engine llama.cpp  waits for build 3 of a/1",
        "· build-engine llama.cpp  waits for build 4 of b/1",
    ]
