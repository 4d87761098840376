"""Probe rows against a stub engine: what each one sees, and what refuses a generation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.chat_templates.patches import conversations
from mmadmin.core.engines.probes import ALWAYS_REQUIRED, PROBE_ROWS, ProbeReport
from mmadmin.core.engines.protocol import LaunchSpec
from mmadmin.core.errors import Cancelled, ProbeFailed, Unreachable
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.host import probe
from mmadmin.host.probe import ask_rest, floor_of, liveness, require, run_probes, work
from mmadmin.host.readiness import Ready
from tests.host.test_engine_process import SECRET, stub

READY = Ready(
    process=ProcessIdentity(1, 150, "a boot"),
    ready_after_ms=3000,
    alias="model",
    model_path="/m.gguf",
    context_per_slot=4096,
    slots=2,
    completion=" east.",
)
Start = Callable[..., LaunchSpec]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Start]:
    """Starts a stub engine without a supervisor; it ends with the test."""
    running: list[subprocess.Popen[bytes]] = []

    def start(**plan) -> LaunchSpec:
        made = stub(str(tmp_path / f"{len(running)}.sock"), **plan)
        env = {**os.environ, "LLAMA_API_KEY": SECRET}
        running.append(subprocess.Popen(made.argv, env=env, stdout=subprocess.PIPE))
        assert running[-1].stdout is not None
        running[-1].stdout.readline()
        return made

    yield start
    for one in running:
        one.kill()
        one.communicate()


def states(report: ProbeReport) -> dict[str, str]:
    """Row → state."""
    return {row.name: row.state for row in report.rows}


def message(report: ProbeReport, name: str) -> str:
    """What a row says."""
    return next(row.message for row in report.rows if row.name == name)


def test_a_good_engine_passes_every_row(engine):
    """All rows are there, in order; what does not apply is skipped with its reason."""
    report = run_probes(engine(), SECRET, READY, required=["template.tools", "tool-call"])
    assert [row.name for row in report.rows] == list(PROBE_ROWS)
    skipped = {name for name, state in states(report).items() if state == "skipped"}
    assert skipped == {"template.image", "reasoning"}
    assert "projector" in message(report, "template.image")
    assert set(states(report).values()) == {"passed", "skipped"}
    assert report.measured["generation_tokens_per_s_milli"] == 100_500
    assert report.measured["load_ms"] == 3000
    assert "ttft_ms" in report.measured
    require(report)
    data = report.as_json()
    assert data["ok"] is True
    assert data["process"]["pid"] == 1


def test_a_template_that_ignores_tools_is_said_and_refused_where_they_are_required(engine):
    """Its prompt lacks them: no client would get a tool call, whatever it asks for."""
    reported: list[str] = []
    made = engine(ignores_tools=True)
    free = run_probes(made, SECRET, READY, on_progress=reported.append)
    assert states(free)["template.tools"] == "skipped"
    assert "ignores the tools" in message(free, "template.tools")
    assert any(line.startswith("template.tools: ") for line in reported)
    bound = run_probes(made, SECRET, READY, required=["template.tools"])
    assert states(bound)["template.tools"] == "failed"


def test_the_template_rows_are_the_matrix():
    """What a patch is shown by is what an engine is asked."""
    rows = {name.removeprefix("template.") for name in PROBE_ROWS if name.startswith("template.")}
    assert rows == set(conversations())
    assert set(ALWAYS_REQUIRED) < set(PROBE_ROWS)


@pytest.mark.parametrize(
    ("plan", "row", "said"),
    [
        ({"strict": True}, "template.effort-low", 'must be either "none" or "high"'),
        ({"strict": True}, "template.effort-bogus", "500"),
        ({"broken_tools": True}, "template.tools", "braces"),
        ({"arguments": "{"}, "tool-call", "another form"),
        ({"arguments": "[]"}, "tool-call", "not a JSON object"),
        ({"talks": True}, "tool-call", "no tool call came; it said 'Well.'"),
        ({"pieces": 1}, "stream", "in 1 pieces"),
        ({"no_usage": True}, "stream", "told no usage"),
        ({"no_done": True}, "stream", "without [DONE]"),
        ({"status": 500}, "speed", "500"),
    ],
)
def test_a_row_fails_in_words_and_refuses_only_where_it_is_required(engine, plan, row, said):
    """Reported for everyone, a reason to stop for those who said so."""
    made = engine(**plan)
    report = run_probes(made, SECRET, READY)
    assert states(report)[row] == "failed"
    assert said in message(report, row)
    require(report)
    with pytest.raises(ProbeFailed, match=row) as refused:
        require(run_probes(made, SECRET, READY, required=[row]))
    assert refused.value.details["probe"] == row
    assert refused.value.details["report"]["ok"] is False


def test_a_strict_template_still_passes_what_it_allows(engine):
    """The rows are told apart: none and high render, low does not."""
    found = states(run_probes(engine(strict=True), SECRET, READY))
    assert found["template.effort-none"] == found["template.effort-high"] == "passed"
    assert found["template.plain"] == "passed"


def test_a_template_without_tools_is_not_asked_for_calls(engine):
    """The engine knows what its template can do."""
    report = run_probes(engine(no_tools=True), SECRET, READY)
    assert message(report, "tool-call") == "the chat template has no tools"


def test_reasoning_must_be_in_its_own_field(engine):
    """Tags in the text mean that the format was not understood."""
    made = engine(leaks=True)
    report = run_probes(made, SECRET, READY, required=["reasoning"])
    assert "<think>" in message(report, "reasoning")
    assert [row.name for row in report.refused] == ["reasoning"]


def test_reasoning_is_asked_where_the_options_speak_of_it(engine):
    """A deployment that sets --reasoning wants to know."""
    made = engine()
    assert states(run_probes(reasons(made), SECRET, READY))["reasoning"] == "passed"


def reasons(made: LaunchSpec) -> LaunchSpec:
    """The launch of a deployment whose options ask for reasoning."""
    capabilities = replace(made.expect.capabilities, reasoning=True)
    return replace(made, expect=replace(made.expect, capabilities=capabilities))


def test_an_answer_without_text_fails_the_reasoning_row(engine):
    """Everything in the field of the reasoning leaves clients with nothing."""
    made = engine(thinks_only=True)
    report = run_probes(made, SECRET, READY, required=["reasoning"])
    assert "empty" in message(report, "reasoning")
    assert [row.name for row in report.refused] == ["reasoning"]


def test_an_answer_that_was_cut_off_proves_nothing(engine):
    """At the limit of tokens: no failure where it is not required, no proof where it is."""
    made = engine(thinks_only=True, ends="length")
    assert states(run_probes(reasons(made), SECRET, READY))["reasoning"] == "skipped"
    report = run_probes(made, SECRET, READY, required=["reasoning"])
    assert [row.name for row in report.refused] == ["reasoning"]


@pytest.mark.parametrize(
    ("answer", "state"), [("391", "passed"), ("", "failed"), ("hm</think>391", "failed")]
)
def test_a_second_question_switches_thinking_off(engine, answer, state):
    """Its answer must have text too, and nothing of a thought in it."""
    made = reasons(engine(without_thinking=answer))
    report = run_probes(made, SECRET, READY)
    assert states(report)["reasoning"] == state
    if state == "passed":
        assert "none with thinking off" in message(report, "reasoning")


def test_a_speed_floor_is_against_the_parent(engine):
    """Half of what the parent measured is asked for; it is slower."""
    made = engine(speed=4.0)
    parent = {"measured": {"generation_tokens_per_s_milli": 9000}}
    floor = floor_of(50, parent)
    assert floor == 4500
    report = run_probes(made, SECRET, READY, required=["speed"], slowest_milli=floor)
    assert "the floor is 4.5" in message(report, "speed")
    assert states(run_probes(made, SECRET, READY, slowest_milli=4000))["speed"] == "passed"
    assert floor_of(50, None) == floor_of(0, parent) == 0


def test_an_engine_for_embeddings_is_not_asked_to_chat(engine):
    """Its rows are skipped, and say why."""
    made = engine()
    made = replace(made, expect=replace(made.expect, task="embedding"))
    found = states(run_probes(made, SECRET, READY))
    assert {found[name] for name in found if name not in ALWAYS_REQUIRED} == {"skipped"}


def test_a_required_row_that_is_skipped_refuses(engine):
    """What cannot be shown is not proved."""
    report = run_probes(engine(), SECRET, READY, required=["template.image"])
    with pytest.raises(ProbeFailed, match="projector"):
        require(report)


def test_probes_can_be_given_up_between_rows(engine):
    """A cancelled activation does not ask the rest."""
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise Cancelled("a person cancelled it")

    with pytest.raises(Cancelled):
        run_probes(engine(), SECRET, READY, check=check)


def test_liveness_tells_the_living_from_the_healthy(engine, monkeypatch):
    """One completion with a deadline."""
    made = engine(hang=True)
    with pytest.raises(Unreachable, match="did not come back within 0 s"):
        liveness(made, SECRET, timeout_s=0.3)
    with pytest.raises(Unreachable, match="answered with 401"):
        liveness(made, "wrong")
    monkeypatch.setattr(probe, "LIVENESS_S", 1.0)
    with pytest.raises(Unreachable, match="does not answer"):
        liveness(replace(made, socket="/nowhere/engine.sock"), SECRET)
    assert sys.executable in made.argv


def test_a_first_token_may_be_half_a_character(engine):
    """One token is asked for; where it is no text yet, a few more."""
    liveness(engine(half=True), SECRET)


def test_a_brief_report_decides_and_measures_and_the_rest_follows(engine):
    """What the file requires and what traffic would spoil first; then all else, in its order."""
    made = engine(strict=True)
    brief = run_probes(made, SECRET, READY, required=["template.tools"], brief=True)
    assert [row.name for row in brief.rows] == [
        *ALWAYS_REQUIRED,
        "stream",
        "template.tools",
        "speed",
    ]
    assert brief.as_json()["ok"] is True
    said: list[str] = []
    whole = ask_rest(
        made, SECRET, brief.as_json(), may_generate=lambda: True, on_progress=said.append
    )
    rows = {row["name"]: row for row in whole["rows"]}
    assert list(rows) == list(PROBE_ROWS)
    assert rows["template.tools"]["required"] is True
    assert rows["tool-call"]["state"] == "passed"
    assert rows["template.effort-low"]["state"] == "failed"
    assert any(line.startswith("template.effort-low: ") for line in said)
    assert whole["ok"] is True
    assert whole["measured"] == brief.measured


def test_clients_come_before_what_is_left_to_ask(engine):
    """Without room nothing is generated; templates cost them nothing. A dead engine is told."""
    made = engine()
    brief = run_probes(made, SECRET, READY, brief=True).as_json()
    whole = ask_rest(made, SECRET, brief, may_generate=lambda: False)
    rows = {row["name"]: row for row in whole["rows"]}
    assert (
        rows["tool-call"]["message"]
        == rows["reasoning"]["message"]
        == "its clients needed the engine"
    )
    assert rows["template.plain"]["state"] == "passed"
    dead = ask_rest(
        replace(made, socket="/nowhere/engine.sock"), SECRET, brief, may_generate=lambda: True
    )
    rows = {row["name"]: row for row in dead["rows"]}
    assert "stopped answering" in rows["template.plain"]["message"]
    assert dead["ok"] is True


def test_work_is_told_by_a_mark_that_moves(engine, tmp_path):
    """The engine's counters of what is in work; prompts and options in them do not count."""
    told = tmp_path / "slots.json"
    idle = {"id": 0, "is_processing": False}
    busy = {"id": 1, "is_processing": True, "id_task": 7, "next_token": [{"n_decoded": 3}]}
    made = engine(work=str(told))
    without = replace(made, questions=replace(made.questions, progress=None))
    assert work(without, SECRET) is None, "a kind of engine that does not tell"
    told.write_text(json.dumps([idle, {**idle, "id": 1}]))
    assert work(made, SECRET) == ""
    told.write_text(json.dumps([idle, busy]))
    mark = work(made, SECRET)
    assert mark
    assert work(made, SECRET) == mark
    told.write_text(json.dumps([{**idle, "params": {"seed": 1}}, {**busy, "params": {"seed": 2}}]))
    assert work(made, SECRET) == mark
    told.write_text(json.dumps([idle, {**busy, "next_token": [{"n_decoded": 4}]}]))
    assert work(made, SECRET) not in ("", mark)
    told.write_text(json.dumps({"another": "form"}))
    assert work(made, SECRET) is None
    assert work(made, "wrong") is None
    with pytest.raises(Unreachable, match="does not answer"):
        work(replace(made, socket="/nowhere/engine.sock"), SECRET)
