"""A worker that is killed while it quantises, or while the result is saved, leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.planner import Outputs
from mmadmin.core.build.recipe import Json, PathSource
from mmadmin.core.formats.checkpoint.recipes import quantize_checkpoint as module
from mmadmin.core.spec.lock import LockedFile
from mmadmin.core.spec.steps import fetch, step
from mmadmin.core.store import Store, hash_file
from tests.core.formats.checkpoint.recipes.test_quantize_checkpoint import params
from tests.support.checkpoints import make_checkpoint
from tests.support.engine import toolbox_for

STUB = Path(__file__).resolve().parents[1] / "support" / "stub_quantizer.py"
PATIENCE_S = 60
CHILD = """
import sys
from pathlib import Path
from tests.host.test_quantizing_killed import build
build(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
"""


def fetched(folder: Path) -> Derivation:
    """The files of a folder as a step."""
    files = [
        LockedFile(file.name, *hash_file(file), PathSource(str(file)))
        for file in sorted(folder.iterdir())
    ]
    return fetch(folder.name, files)


def goal_of(inputs: Path, dampening: str) -> Derivation:
    """A quantising step; the stub takes the dampening for where to stop."""
    wanted: dict[str, Json] = params(dampening=dampening, program="stub")
    steps = {name: fetched(inputs / name) for name in ("model", "environment", "calibration")}
    return step("quantize-checkpoint", "small", wanted, steps)


def build(root: Path, inputs: Path, program: Path, dampening: str) -> None:
    """Build it as a worker does."""
    goal, store, own = goal_of(inputs, dampening), Store(root, floor_bytes=0), module.PROGRAM
    module.PROGRAM = program
    try:
        realise(goal, store, toolbox_for(store), UNOBSERVED)
    finally:
        module.PROGRAM = own


def script(folder: Path, name: str, *, goes_on: bool) -> Path:
    """The stub with this interpreter's packages; one that goes on never waits."""
    path = folder / f"{name}.py"
    lines = [
        "import runpy, sys, time",
        f"sys.path[:0] = {sys.path!r}",
        *(["time.sleep = lambda _: None"] if goes_on else []),
        f"runpy.run_path({str(STUB)!r}, run_name='__main__')",
    ]
    path.write_text("\n".join(lines))
    return path


def running(program: Path) -> list[int]:
    """Processes that run a script."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(program).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_for(condition: object, what: str) -> None:
    """Until it holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("dampening", "line"),
    [("0.8", "layer 1 of 2"), ("0.75", "saving")],
    ids=["quantising", "saving"],
)
def test_a_killed_worker_leaves_nothing(tmp_path: Path, dampening: str, line: str) -> None:
    """Its program ends, no object is there, its folder goes; the next attempt builds it."""
    inputs, root = tmp_path / "inputs", tmp_path / "store"
    make_checkpoint(inputs / "model")
    for name, text in (("environment", "{}"), ("calibration", json.dumps({"text": "a"}))):
        (inputs / name).mkdir()
        (inputs / name / "file.jsonl").write_text(text)
    root.mkdir()
    stuck = script(tmp_path, "stuck", goes_on=False)
    argv = [sys.executable, "-c", CHILD, str(root), str(inputs), str(stuck), dampening]
    worker = subprocess.Popen(argv, cwd=STUB.parents[2])
    store = Store(root, floor_bytes=0)

    def said() -> bool:
        assert worker.poll() is None, "it ended by itself"
        logs = store.layout.logs.rglob("*") if store.layout.logs.exists() else ()
        return any(line in log.read_text() for log in logs if log.is_file())

    wait_for(said, f"the log never said {line}")
    assert running(stuck)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    wait_for(lambda: not running(stuck), "the script outlives its worker")
    goal = goal_of(inputs, dampening)
    assert Outputs(store).of(goal).object is None
    time.sleep(1.1)  # a folder younger than a second may belong to a lease not yet seen
    with store.lease("next"):
        assert list(store.layout.staging.iterdir()) == []
        assert list(store.layout.reservations.iterdir()) == []
    build(root, inputs, script(tmp_path, "sound", goes_on=True), dampening)
