"""What runs against what should run: command, environment, files, launch file."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.engines.llama_server.options import read_options
from mmadmin.core.engines.protocol import System
from mmadmin.core.store import Store
from mmadmin.host import engine_process
from mmadmin.host.drift import differing, drift
from tests.host.test_engine_process import SECRET, home, path, stub, uid

__all__ = ["home", "path", "uid"]


@pytest.fixture
def store(tmp_path) -> Store:
    """A store of its own."""
    return Store(tmp_path / "store")


@pytest.fixture
def system(store) -> System:
    """A sealed engine and a sealed model."""
    paths = {}
    with store.lease("test") as lease:
        for name, file in (("engine", "bin/llama-server"), ("model", "m.gguf")):
            with store.staging(lease) as staging:
                path = staging.out / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(name.encode() * 100)
                paths[name] = store.object_path(store.seal(staging, name).name)
    return System(
        parts={"engine": paths["engine"], "model": paths["model"] / "m.gguf"},
        options=read_options({}),
        engine_kind="llama-server",
        alias="model",
    )


@pytest.fixture
def look(home, uid, path, system, store):
    """Start the stub, then look at it under some changes."""
    made = stub(path)
    engine_process.start(home, uid, made, SECRET)

    def found(launch=made, secret=SECRET) -> list[tuple[str, str]]:
        rows = drift(home, uid, launch, system=system, secret=secret, store=store)
        return [(row.what, row.message) for row in rows]

    return made, found


def writable(path: Path) -> Path:
    """Take the seal off, as someone with root's rights would."""
    path.parent.chmod(0o755)
    path.chmod(0o644)
    return path


def test_an_engine_as_planned_has_no_drift(look):
    """Nothing to tell."""
    _made, found = look
    assert found() == []


def test_another_command_is_told(look):
    """What runs, and what its next start would run."""
    made, found = look
    planned = replace(made, argv=[*made.argv, "--jinja", "--temp", "0.5"])
    less = "--jinja is missing, --temp 0.5 is missing"
    assert found(planned) == [
        ("command", less),
        ("launch-file", f"its launch file was changed, for its next start: {less}"),
    ]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("engine --host /s --jinja --temp 0.5", ""),
        ("engine --host /s --jinja --temp 1.9", "--temp is 1.9, planned was 0.5"),
        ("engine --host /s --temp 0.5", "--jinja is missing"),
        ("engine --host /s --jinja --temp 0.5 --swa-full", "--swa-full was not planned"),
        ("engine --host /s --jinja on --temp 0.5", "--jinja is on, planned was without a value"),
        (
            "other --host /s --jinja --temp",
            "the program is other, planned was engine, --temp is without a value, planned was 0.5",
        ),
        ("engine --jinja --host /s --temp 0.5", "it has the planned options in another order"),
    ],
)
def test_a_command_differs_option_by_option(runs, message):
    """Each by its name, with what it is and what was planned."""
    assert (
        differing(runs.split(), ["engine", "--host", "/s", "--jinja", "--temp", "0.5"]) == message
    )


def test_another_secret_or_environment_is_told_without_the_secret(look):
    """The gate would get 401; an operator must not read the secret in an alarm."""
    made, found = look
    assert found(secret="other") == [
        ("environment", "its secret is not the one that the gate uses"),
        ("launch-file", "its launch file has another secret than the gate uses"),
    ]
    planned = replace(made, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert found(planned) == [
        ("environment", "CUDA_VISIBLE_DEVICES is not set, planned was 0"),
        ("launch-file", "its launch file has another environment than planned"),
    ]


def test_files_under_a_live_engine_are_watched(look, system):
    """Deleted, grown, rewritten in place, made writable."""
    _made, found = look
    model = writable(system.parts["model"])
    assert found()[0][1].endswith("m.gguf was made writable")
    content = model.read_bytes()
    model.write_bytes(content + b"x")
    assert "501 bytes, sealed were 500" in found()[0][1]
    model.write_bytes(content)
    model.chmod(0o444)
    assert found()[0][1].endswith("m.gguf was written to")
    os.utime(model, (1, 1))
    assert found() == []
    model.unlink()
    assert found()[0][1].endswith("m.gguf was deleted")


def test_an_engine_that_is_down_is_told(look, home, uid):
    """It should run and does not."""
    _made, found = look
    engine_process.stop(home, uid)
    assert found() == [("process", f"{uid} should run and does not")]


def test_the_launch_file_is_watched(look, home, uid):
    """Without it the supervisor could not start the engine again."""
    _made, found = look
    path = engine_process.launch_file(home, uid)
    path.chmod(0o644)
    assert "others may read" in found()[0][1]
    path.chmod(0o600)
    as_planned = path.read_text()
    path.write_text("{")
    assert found()[0][1].startswith("its launch file is damaged")
    path.write_text(as_planned)
    assert found() == []
    path.unlink()
    assert found() == [("launch-file", "its launch file is gone; the engine would not start again")]


def test_a_program_that_is_gone_is_told(look, tmp_path):
    """The planned program no longer exists."""
    made, found = look
    planned = replace(made, argv=[str(tmp_path / "gone"), *made.argv[1:]])
    assert [what for what, _message in found(planned)] == ["command", "program", "launch-file"]
    assert Path(sys.executable).exists()
