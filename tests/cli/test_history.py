"""What became of a deployment, as `mm` tells it: the story of a generation, marks, requests."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.models import (
    Activation,
    AuditEvent,
    Build,
    BuildStep,
    Deployment,
    Generation,
    Host,
    Transition,
    UsageEvent,
    User,
)
from mmadmin.cli.main import app
from mmadmin.core.errors import NotFound
from mmadmin.core.generations.lifecycle import GenerationState, JobState
from tests.support.reports import report

pytestmark = pytest.mark.django_db
START = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.fixture
def tiny(alice: User) -> Deployment:
    """Two generations that differ in model and template; the second was built, proved, live."""
    host = Host.objects.create(name="local")
    deployment = Deployment.objects.create(name="tiny", public_name="tiny", host=host)
    for number in (1, 2):
        generation = Generation.objects.create(
            deployment=deployment,
            number=number,
            parent=deployment.generations.order_by("number").last(),
            author=alice,
            reason=f"reason {number}",
            state=GenerationState.RETIRED,
            size_bytes=number << 30,
        )
        report(
            generation,
            template=f"first\n{number}\nlast",
            renders={"plain": {"output": f"Be {number}\nHello"}, "turns": {"error": "no"}},
            model_report={"size_bytes": number << 30, "tensor_types": {"Q8_0": number << 30}},
        )
    build = Build.objects.create(
        deployment=deployment,
        generation=generation,
        host=host,
        actor=alice,
        state=JobState.SUCCEEDED,
        created_at=START,
        started_at=START,
        ended_at=START + timedelta(seconds=95),
    )
    for position, (state, seconds) in enumerate((("cached", 0), ("built", 90))):
        BuildStep.objects.create(
            build=build,
            position=position,
            derivation=str(position) * 64,
            name=f"part-{position}",
            recipe="merge",
            state=state,
            started_at=START if seconds else None,
            ended_at=START + timedelta(seconds=seconds) if seconds else None,
        )
    activated = START + timedelta(seconds=95)
    Activation.objects.create(
        deployment=deployment,
        target=generation,
        kind="activate",
        mode="swap",
        state=JobState.SUCCEEDED,
        reason="because",
        actor=alice,
        host=host,
        created_at=activated,
        started_at=activated,
        ended_at=activated + timedelta(seconds=30),
        phases=[
            {
                "phase": "probe",
                "started": activated.isoformat(),
                "ended": (activated + timedelta(seconds=12)).isoformat(),
            },
            {"phase": "flip", "started": activated.isoformat()},
        ],
    )
    live = activated + timedelta(seconds=30)
    Transition.objects.create(generation=generation, after=GenerationState.LIVE, at=live)
    Transition.objects.create(
        generation=generation,
        before=GenerationState.LIVE,
        after=GenerationState.DRAINING,
        at=live + timedelta(hours=2, minutes=5),
    )
    return deployment


def mm(*words: str) -> str:
    """Run a command that must succeed; its stdout."""
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def mm_json(*words: str):
    """Run a command with --json; the document."""
    return json.loads(mm(*words, "--json"))


def test_the_story_of_a_generation_says_what_took_how_long(tiny: Deployment) -> None:
    """Build steps, phases and live spans in order, each with its duration and who and why."""
    told = [
        " ".join(line.split()) for line in mm("history", "tiny", "--generation", "2").split("\n")
    ]
    story = [line for line in told if line]
    assert story[0] == "tiny/2 is retired"
    assert story[1].startswith("by alice, ")
    assert story[1].endswith(": reason 2")
    events = [line.split(" ", 2)[-1] if line[:2] == "20" else line for line in story[3:]]
    assert events[:5] == [
        f"1 min 35 s build {Build.objects.get().pk} by alice: succeeded",
        "1 min 30 s merge part-1: built",
        f"30 s activate {Activation.objects.get().pk} by alice: succeeded (swap), because",
        "12 s probe",
        "flip",
    ]
    assert events[5].startswith("2 h 05 min live until ")
    assert len(events) == 6


def test_the_story_as_data(tiny: Deployment) -> None:
    """The same for programs: every step and every phase with its moments."""
    told = mm_json("history", "tiny", "--generation", "2")
    assert [(s["name"], s["started_at"], s["ended_at"]) for s in told["builds"][0]["steps"]] == [
        ("part-0", None, None),
        ("part-1", "2026-11-30T12:00:00Z", "2026-11-30T12:01:30Z"),
    ]
    assert told["activations"][0]["phases"][0]["phase"] == "probe"
    assert told["live_spans"] == [
        {"since": "2026-11-30T12:02:05Z", "until": "2026-11-30T14:07:05Z"}
    ]
    assert told["live_s"] == 7500


def test_marks_and_pins_are_words_about_a_generation(tiny: Deployment) -> None:
    """They show in the list and can be taken back; each is in the audit log."""
    assert mm("mark", "tiny", "1", "good") == "tiny/1 is marked good\n"
    assert mm_json("pin", "tiny", "1")["pinned"] is True
    assert "good, pinned" in mm("history", "tiny")
    assert mm_json("mark", "tiny", "1", "none")["mark"] == ""
    assert mm("pin", "tiny", "1", "--off") == "tiny/1 is not pinned\n"
    assert "good" not in mm("history", "tiny")
    verbs = list(AuditEvent.objects.order_by("pk").values_list("verb", flat=True))
    assert verbs[-4:] == [
        "generation.mark",
        "generation.pin",
        "generation.mark",
        "generation.unpin",
    ]
    wrong = CliRunner().invoke(app, ["mark", "tiny", "1", "superb"])
    assert wrong.exit_code == 2


def test_a_diff_is_in_words_with_units_and_long_texts_as_lines(tiny: Deployment) -> None:
    """Sizes as sizes; template and rendering by the lines that differ."""
    told = [" ".join(line.split()) for line in mm("diff", "tiny", "1", "2").splitlines()]
    assert "model tensors in Q8_0 1.0 GiB 2.0 GiB (+100 %)" in told
    assert "size total with dependencies 1.0 GiB 2.0 GiB (+100 %)" in told
    at = told.index("template line 1")
    assert told[at + 1 : at + 6] == ["@@ -1,3 +1,3 @@", "first", "-1", "+2", "last"]
    at = told.index("rendering plain")
    assert told[at + 1 :] == ["@@ -1,2 +1,2 @@", "-Be 1", "+Be 2", "Hello"]
    rows = {(row["section"], row["field"]): row for row in mm_json("diff", "tiny", "1", "2")}
    assert rows["size", "closure_bytes"]["before"] == str(1 << 30)
    assert rows["size", "closure_bytes"]["now"] == "2.0 GiB (+100 %)"
    assert mm("diff", "tiny", "1", "1") == "no difference\n"


def test_the_history_is_written_into_a_file(tiny: Deployment, tmp_path: Path) -> None:
    """Complete, as JSON; to stdout with a dash."""
    path = tmp_path / "tiny.json"
    assert "2 generations of tiny written to" in mm("history", "tiny", "--export", str(path))
    data = json.loads(path.read_text(encoding="utf-8"))
    assert [g["number"] for g in data["generations"]] == [1, 2]
    assert data["generations"][1]["builds"][0]["steps"][1]["name"] == "part-1"
    assert data["generations"][1]["renders"]["plain"] == {"output": "Be 2\nHello"}
    assert data["generations"][1]["model_report"]["size_bytes"] == 2 << 30
    assert json.loads(mm("history", "tiny", "--export", "-"))["format"] == data["format"]


def test_a_request_leads_to_the_generation_that_answered_it(tiny: Deployment) -> None:
    """By the id of its answer; one that the usage records do not know is said so."""
    UsageEvent.objects.create(
        id="req_1",
        at=START,
        key_id="abc",
        deployment="tiny",
        generation=2,
        endpoint="chat",
        status=200,
        outcome="ok",
        prompt_tokens=21,
        completion_tokens=5,
        duration_ms=1500,
    )
    told = mm("request", "req_1")
    assert "answered by tiny/2: 200, ok" in told
    assert "chat, key abc, 21 + 5 tokens in 1.5 s" in told
    assert mm_json("request", "req_1")["generation"] == 2
    with pytest.raises(NotFound, match="there is no request req_2"):
        mm("request", "req_2")
