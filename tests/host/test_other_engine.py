"""An engine that is not llama-server: the host asks what its kind can answer, and nothing else."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.engines.probes import ALWAYS_REQUIRED
from mmadmin.core.engines.protocol import Expectation, LaunchSpec, System
from mmadmin.core.engines.questions import Context, Guarded, Health, Question, Questions
from mmadmin.core.errors import ProbeFailed
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.core.store import Store
from mmadmin.host import engine_process, process_tree
from mmadmin.host.drift import drift
from mmadmin.host.engine_client import EngineClient, Unanswered
from mmadmin.host.probe import NOT_APPLICABLE, liveness, require, run_probes, work
from mmadmin.host.readiness import is_loading, wait_ready
from mmadmin.host.template_matrix import render_on_engine, tokens_of
from tests.host.test_engine_process import SECRET, failure, files_of, home, path, uid, wait_for
from tests.support.python import PYTHON

__all__ = ["home", "path", "uid"]
TOY = Path(__file__).with_name("toy_engine.py")


def counters(text: str) -> str:
    """The tokens so far while a request runs."""
    values = dict(line.split() for line in text.splitlines())
    return values["toy_tokens_total"] if values["toy_running"] != "0" else ""


QUESTIONS = Questions(
    health=Health("/status", loading=(425,)),
    served_names=Question("/name", lambda text: [text.removeprefix("serving ")]),
    error_message=lambda text: str(json.loads(text)["detail"]),
    guarded=Guarded("/name", refusals=(403,)),
    progress=Question("/counters", counters),
    own_environment=("TOY_FLAG_",),
    keeps_command=False,
)


def toy(path: str, **plan) -> LaunchSpec:
    """The launch of a toy engine with some faults."""
    return LaunchSpec(
        engine_kind="toy",
        argv=[sys.executable, str(TOY), path, json.dumps({"alias": "model", **plan})],
        env={},
        secret_env="TOY_SECRET",
        expect=Expectation(alias="model", slots=2, context_per_slot=4096, model_file="/m"),
        questions=QUESTIONS,
        load_deadline_s=60,
        socket=path,
        readable=[*PYTHON, str(TOY.parent), *files_of(plan)],
    )


@pytest.fixture
def live(home, uid, path):
    """A toy engine that runs: its launch and what it has proved."""
    made = toy(path)
    engine_process.start(home, uid, made, SECRET)
    return made, wait_ready(home, uid, made, SECRET)


def test_it_loads_and_proves_itself_by_its_own_answers(home, uid, path, tmp_path):
    """Its status for loading, its worker's socket; context and model file are not asked."""
    loaded = tmp_path / "loaded"
    made = toy(path, load_until=str(loaded))
    process = engine_process.start(home, uid, made, SECRET)
    wait_for("its socket", lambda: process_tree.listener(path))
    assert is_loading(made, SECRET)
    loaded.touch()
    ready = wait_ready(home, uid, made, SECRET)
    assert ready.process == process
    assert (ready.model_path, ready.slots, ready.context_per_slot) == ("", 0, 0)
    assert ready.completion == " east."
    owner = process_tree.listener(path)
    assert owner is not None
    assert owner != process.pid, "its worker listens"
    engine_process.stop(home, uid, recorded=process)
    assert ProcessIdentity.of(owner) is None


def test_what_it_cannot_answer_is_not_applicable(live):
    """Skipped rows with the reason; they refuse only a deployment that requires them."""
    made, ready = live
    report = run_probes(made, SECRET, ready)
    rows = {row.name: row for row in report.rows}
    passed = {name for name, row in rows.items() if row.state == "passed"}
    assert passed == {"identity", "secret", "completion"}
    for name in ("context", "template.plain", "speed"):
        assert (rows[name].state, rows[name].message) == ("skipped", NOT_APPLICABLE)
    assert set(ALWAYS_REQUIRED) - passed == {"context"}
    require(report)
    with pytest.raises(ProbeFailed, match="speed"):
        require(run_probes(made, SECRET, ready, required=["speed"]))
    assert render_on_engine(made, SECRET) is None
    assert tokens_of(made, SECRET) == {}


def test_its_refusals_are_read_by_its_own_shape(live):
    """A failed row quotes the message, not the body around it."""
    made, ready = live
    report = run_probes(made, SECRET, ready)
    (row,) = (row for row in report.rows if row.name == "tool-call")
    assert row.state == "failed"
    assert row.message.startswith("422: cannot do [")
    with EngineClient(made, "wrong") as client, pytest.raises(Unanswered, match="403: who are you"):
        client.ask(QUESTIONS.served_names)


def test_its_progress_is_read_from_its_counters(live):
    """Whatever their form is, they make a mark."""
    made, _ready = live
    assert work(made, SECRET) == "17"
    liveness(made, SECRET)


@pytest.mark.parametrize(
    ("plan", "probe"),
    [({"open": True}, "secret"), ({"alias": "other"}, "identity")],
)
def test_the_wrong_engine_is_refused(home, uid, path, plan, probe):
    """Without authentication, or with another model."""
    made = toy(path, **plan)
    engine_process.start(home, uid, made, SECRET)
    assert failure(home, uid, made).details["probe"] == probe


def test_a_command_that_it_overwrites_is_not_drift(live, home, uid, tmp_path):
    """Its launch file still is compared; so is the command of a kind that keeps it."""
    made, _ready = live
    store = Store(tmp_path / "store")
    part = store.root / "objects" / f"{0:064}-part"
    system = System(engine_kind="toy", alias="model", parts={"engine": part}, options=None)

    def found(launch: LaunchSpec) -> set[str]:
        rows = drift(home, uid, launch, system=system, secret=SECRET, store=store)
        return {row.what for row in rows} - {"file"}

    assert found(made) == set()
    assert found(replace(made, argv=[*made.argv, "--more"])) == {"launch-file"}
    keeps = replace(made, questions=replace(QUESTIONS, keeps_command=True))
    assert "command" in found(keeps)


def test_it_has_a_private_folder_while_it_runs(live, home, uid):
    """Made at its start for its owner alone, removed at its end with all that is in it."""
    made, ready = live
    scratch = home.scratch(uid)
    assert scratch.stat().st_mode & 0o777 == 0o700
    (scratch / "cache").mkdir()
    (scratch / "cache" / "kernel").write_bytes(b"x")
    engine_process.start(home, uid, made, SECRET)
    assert (scratch / "cache" / "kernel").exists(), "one that runs already is left alone"
    engine_process.stop(home, uid, recorded=ready.process)
    assert not scratch.exists()


def test_the_cause_of_an_end_is_read_from_its_log(home, uid, path):
    """By its kind, from the last start on; a kind that cannot is quoted with its last line."""
    log = home.engine_log(uid)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(
        "mmadmin: starting toy\nboom: an old one\nmmadmin: starting toy\nboom: no memory\nbye\n"
    )
    found = replace(
        QUESTIONS, cause_of_end=lambda lines: next((x for x in lines if "boom" in x), "")
    )
    knows = replace(toy(path), questions=found)
    error = engine_process.failed_probe(home, uid, "process", "it ended", knows)
    assert error.message.endswith("it ended: boom: no memory")
    error = engine_process.failed_probe(home, uid, "process", "it ended", toy(path))
    assert error.message.endswith("its last line: bye")


def test_a_context_without_slots_is_proved(home, uid, path):
    """An engine that batches as it likes tells the tokens of a request, and no slots."""
    one = Question("/name", lambda _text: Context(slots=0, tokens_per_slot=4096))
    made = replace(toy(path), questions=replace(QUESTIONS, context=one))
    engine_process.start(home, uid, made, SECRET)
    ready = wait_ready(home, uid, made, SECRET)
    assert (ready.slots, ready.context_per_slot) == (0, 4096)
    rows = {row.name: row.message for row in run_probes(made, SECRET, ready, brief=True).rows}
    assert rows["context"] == "4096 tokens a request"
    short = replace(made, expect=replace(made.expect, context_per_slot=8192))
    with pytest.raises(ProbeFailed, match="a request has 4096 tokens of context"):
        wait_ready(home, uid, short, SECRET)
