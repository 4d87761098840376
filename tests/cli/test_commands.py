"""What `mm` prints and how it ends: people's words, machines' JSON, exit codes."""

import errno
import json
import re
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from django.db import OperationalError
from django.utils import timezone
from typer.testing import CliRunner

from deployments.actions import token_user
from deployments.models import (
    Activation,
    Alarm,
    AuditEvent,
    Build,
    ClientKey,
    Deployment,
    Generation,
    Host,
    LogChunk,
    Replica,
    ReplicaState,
    Role,
    SecondFactorRule,
    Transition,
    Trial,
    UsageBucket,
    User,
)
from mmadmin.cli.main import app
from mmadmin.cli.output import of_the_disk, report, when_text
from mmadmin.core.errors import (
    Conflict,
    DiskFull,
    DoesNotFit,
    InvalidInput,
    NotFound,
    Refused,
)
from mmadmin.core.generations.lifecycle import GenerationState, JobState
from mmadmin.core.home import Home
from mmadmin.host.supervisor import ProgramStatus, Supervisor

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def served(alice: User) -> Deployment:
    """A deployment whose second generation is live."""
    host = Host.objects.create(name="local")
    deployment = Deployment.objects.create(name="tiny", public_name="tiny-chat", host=host)
    for number in (1, 2):
        generation = Generation.objects.create(
            deployment=deployment,
            number=number,
            parent=deployment.generations.order_by("number").last(),
            spec_toml="",
            author=alice,
            reason=f"reason {number}",
            system=f"{number:032d}-tiny",
            state=GenerationState.LIVE if number == 2 else GenerationState.RETIRED,
        )
        Transition.objects.create(generation=generation, after=GenerationState.LIVE, actor=alice)
    deployment.live = generation
    deployment.save()
    return deployment


def mm(*words: str) -> str:
    """Run a command that must succeed; its stdout."""
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def mm_json(*words: str):
    """Run a command with --json; the document."""
    return json.loads(mm(*words, "--json"))


def test_keys_issue_list_revoke(alice: User) -> None:
    """A key is shown whole once, afterwards by its prefix, and can be ended by either name."""
    issued = mm_json("keys", "issue", "--owner", "carol", "--note", "agent", "--rpm", "60")
    assert re.fullmatch(r"sk-mm-[0-9a-z]{12}-[0-9a-z]{39}", issued["key"])
    listed = mm_json("keys", "list")
    assert [(key["id"], key["owner"], key["rpm"], key["state"]) for key in listed] == [
        (issued["id"], "carol", 60, "active")
    ]
    secret = issued["key"].split("-")[3]
    assert secret not in json.dumps(listed) + mm("keys", "list")
    assert mm_json("keys", "suspend", issued["id"])["state"] == "suspended"
    assert mm_json("keys", "resume", f"sk-mm-{issued['id']}")["state"] == "active"
    assert mm_json("keys", "revoke", f"sk-mm-{issued['id']}")["state"] == "revoked"
    assert ClientKey.objects.get().revoked_at is not None
    assert AuditEvent.objects.filter(verb="key.revoke", actor=alice).count() == 1


def test_revoking_again_says_since_when_and_by_whom(alice: User) -> None:
    """The first time it is revoked, the second it had been, and nothing is written twice."""
    User.objects.create_superuser(username="bea", role=Role.ADMIN)
    key = mm_json("keys", "issue", "--owner", "carol")["id"]
    assert mm("--as", "bea", "keys", "revoke", key) == f"sk-mm-{key} of carol is revoked\n"
    since = ClientKey.objects.get().revoked_at
    again = mm("keys", "revoke", key)
    assert again == f"sk-mm-{key} of carol was revoked before: {when_text(since)}, by bea\n"
    told = mm_json("keys", "revoke", key)
    assert told["revoked_by"] == "bea"
    assert datetime.fromisoformat(told["revoked_at"]) == since.replace(microsecond=0)
    assert ClientKey.objects.get().revoked_at == since
    assert AuditEvent.objects.filter(verb="key.revoke").count() == 1


def test_keys_are_shown_and_edited(alice: User) -> None:
    """List and show say what a key may do, its limits and the use of its budgets; edit says both."""
    made = mm_json(
        *("keys", "issue", "--owner", "Ann", "--endpoint", "chat", "--rpm", "10"),
        *("--tokens-per-day", "1000", "--expires-in-days", "3"),
    )
    now = timezone.now().replace(minute=0, second=0, microsecond=0)
    UsageBucket.objects.create(
        hour=now, key_id=made["id"], deployment="d", requests=1, prompt_tokens=70
    )
    for words in (("keys", "list"), ("keys", "show", made["id"])):
        told = mm(*words)
        for text in ("chat only", "10 requests/min", "1000 tokens/day", "70 of 1000 today"):
            assert text in told, (words, text)
    assert mm_json("keys", "show", made["id"])["used_today"] == 70
    mm("keys", "edit", made["id"], "--rpm", "20", "--any-endpoint", "--never-expires")
    after = mm_json("keys", "show", made["id"])
    assert (after["rpm"], after["endpoints"], after["expires_at"]) == (20, [], None)
    assert after["tokens_per_day"] == 1000
    event = AuditEvent.objects.filter(verb="key.edit").get()
    assert event.details["changes"]["rpm"] == [10, 20]
    assert event.details["changes"]["endpoints"] == [["chat"], []]
    assert "rpm 10 → 20" in event.summary
    with pytest.raises(InvalidInput):
        mm("keys", "edit", made["id"])


def test_keys_for_unknown_endpoints_are_refused(alice: User) -> None:
    """The remedy lists the names, and so does the help."""
    with pytest.raises(InvalidInput, match="endpoint foo") as refused:
        mm("keys", "issue", "--owner", "Ann", "--endpoint", "foo")
    assert "embeddings" in refused.value.remedy
    assert "embeddings" in mm("keys", "issue", "--help")


def test_a_key_is_rotated_once(alice: User) -> None:
    """The second time names the successor; the first said when the old one ends."""
    made = mm_json("keys", "issue", "--owner", "Ann")
    told = mm("keys", "rotate", made["id"], "--overlap-hours", "1")
    assert f"sk-mm-{made['id']} keeps working until" in told
    successor = ClientKey.objects.get(rotated_from__key_id=made["id"])
    with pytest.raises(Conflict, match=str(successor)):
        mm("keys", "rotate", made["id"])
    mm("keys", "revoke", successor.key_id)
    assert mm_json("keys", "rotate", made["id"])["old_key_expires_at"]


def test_usage_by_owner_and_generation(alice: User) -> None:
    """As a table, as JSON and as CSV, from a date."""
    ClientKey.objects.create(key_id="k1", owner="Ann")
    now = timezone.now().replace(minute=0, second=0, microsecond=0)
    for days, deployment in ((0, "tiny"), (1, ""), (40, "tiny")):
        UsageBucket.objects.create(
            hour=now - timedelta(days=days),
            key_id="k1",
            deployment=deployment,
            generation=2 if deployment else 0,
            requests=3 if deployment else 0,
            refused=0 if deployment else 4,
            prompt_tokens=7,
        )
    (ann,) = mm_json("usage", "--by", "owner", "--since", "30d")
    assert (ann["owner"], ann["requests"], ann["refused"]) == ("Ann", 3, 4)
    assert "tiny/2" in mm("usage", "--by", "generation", "--since", "2d")
    assert "no deployment" in mm("usage", "--since", "2d")
    since = (now - timedelta(days=41)).strftime("%Y-%m-%d")
    lines = mm("usage", "--by", "key", "--since", since, "--csv").splitlines()
    assert lines[0].startswith("key_id,owner,requests,failed,prompt_tokens")
    assert lines[1].startswith("k1,Ann,6,0,21,")
    with pytest.raises(InvalidInput, match="not a date"):
        mm("usage", "--since", "yesterday")


def test_keys_rotate_gives_a_successor(alice: User) -> None:
    """The successor has another id; the old key ends after the overlap."""
    first = mm_json("keys", "issue", "--owner", "carol")
    second = mm_json("keys", "rotate", first["id"], "--overlap-hours", "1")
    assert second["id"] != first["id"]
    assert ClientKey.objects.get(key_id=second["id"]).owner == "carol"


def test_history_is_what_the_issue_of_a_release_needs(served: Deployment) -> None:
    """Newest first, with number, state, system, author, reason."""
    rows = mm_json("history", "tiny")
    assert [
        (r["number"], r["state"], r["system"][-4:], r["author"], r["reason"], r["is_live"])
        for r in rows
    ] == [
        (2, "live", "tiny", "alice", "reason 2", True),
        (1, "retired", "tiny", "alice", "reason 1", False),
    ]
    assert "reason 1" in mm("history", "tiny")


def test_history_says_who_went_back_and_why(served: Deployment, alice: User) -> None:
    """A roll-back is in the history of the generation that it brought back."""
    Activation.objects.create(
        deployment=served,
        target=served.generations.get(number=1),
        kind="rollback",
        reason="1 answered better",
        actor=alice,
        host=served.host,
    )
    assert "rolled back to by alice" in " ".join(mm("history", "tiny").split())
    gone_back = mm_json("history", "tiny")[1]["activations"]
    assert [(a["kind"], a["actor"], a["reason"]) for a in gone_back] == [
        ("rollback", "alice", "1 answered better")
    ]


def test_nothing_is_live_where_nothing_runs(served: Deployment, tmp_path: Path) -> None:
    """The records remember what is to be live; without the supervisor its engine is down."""
    assert mm_json("status")["deployments"][0]["state"] == "live", "engines are elsewhere"
    conf = Home(tmp_path).supervisor / "supervisord.conf"
    conf.parent.mkdir(exist_ok=True)
    conf.touch()
    [found] = mm_json("status")["deployments"]
    assert (found["state"], found["live_generation"]) == ("stopped", 2)


def test_gpus_are_in_the_status(served: Deployment, alice: User) -> None:
    """Each with its free memory and what holds it; an engine is found by its child process."""
    gib = 1 << 30
    served.host.facts = {
        "gpus": [
            {
                "index": 2,
                "name": "Tesla T4",
                "memory_total_bytes": 16 * gib,
                "memory_free_bytes": 5 * gib,
                "processes": [
                    {"pid": 701, "memory_bytes": 8 * gib, "ancestors": [700, 1]},
                    {"pid": 900, "memory_bytes": 2 * gib},
                ],
            }
        ]
    }
    served.host.save()
    Replica.objects.create(
        uid="tiny-2-0",
        generation=served.live,
        host=served.host,
        state=ReplicaState.READY,
        pid=700,
        devices=[{"index": 2, "uuid": "GPU-2"}],
    )
    told = " ".join(mm("status").split())
    assert "2 local Tesla T4 5.0 GiB of 16.0 GiB tiny/2 8.0 GiB, pid 900 2.0 GiB, driver" in told
    data = mm_json("status")
    [gpu] = data["gpus"]
    assert [(h["name"], h["memory_bytes"], h["ours"]) for h in gpu["used_by"]] == [
        ("tiny/2", 8 * gib, True),
        ("pid 900", 2 * gib, False),
        ("driver and other processes", gib, False),
    ]
    assert data["deployments"][0]["replicas"][0]["devices"] == [2]


def test_open_alarms_are_in_the_status(served: Deployment) -> None:
    """What is not as it should be, about which generation, in words; no more once it is cleared."""
    alarm = Alarm.objects.create(
        deployment=served,
        generation=served.live,
        kind="drift",
        subject="command",
        message="--temp is 1.9, planned was 0.5",
    )
    assert "alarm tiny/2 drift, command: --temp is 1.9, planned was 0.5 (since " in " ".join(
        mm("status").split()
    )
    [told] = mm_json("status")["deployments"][0]["alarms"]
    assert (told["kind"], told["subject"], told["generation"]) == ("drift", "command", 2)
    alarm.cleared_at = timezone.now()
    alarm.save()
    assert "alarm" not in mm("status")
    assert mm_json("status")["deployments"][0]["alarms"] == []


def test_a_key_state_that_does_not_exist_is_wrong_usage(alice: User) -> None:
    """Typed wrongly is 2, with the states that there are."""
    done = CliRunner().invoke(app, ["keys", "list", "--state", "broken"])
    assert done.exit_code == 2
    assert "suspended" in done.output
    assert mm_json("keys", "list", "--state", "revoked") == []


def test_acting_as_a_viewer_is_refused(served: Deployment) -> None:
    """`--as` takes the other person's rights: a viewer may look and may not change."""
    User.objects.create_user(username="bob", role=Role.VIEWER)
    assert "reason 2" in mm("--as", "bob", "history", "tiny")
    with pytest.raises(Refused):
        mm("--as", "bob", "stop", "tiny", "--detach")
    for words in (["history", "tiny"], ["status"], ["status", "--json"], ["keys", "list"]):
        with pytest.raises(NotFound, match="no user `mallory`") as caught:
            mm("--as", "mallory", *words)
        assert caught.value.remedy.endswith("/people/")


def test_rollback_asks_for_a_reason(served: Deployment) -> None:
    """Without --reason it is wrong usage (2), with it an activation is queued."""
    done = CliRunner().invoke(app, ["rollback", "tiny"])
    assert done.exit_code == 2
    queued = mm_json("rollback", "tiny", "--reason", "worse answers", "--detach")
    assert (queued["target"], queued["kind"], queued["state"]) == (1, "rollback", "queued")
    with pytest.raises(Conflict):
        mm("activate", "tiny", "1", "--detach")


def test_where_nothing_runs_what_is_asked_for_is_kept(
    served: Deployment, monkeypatch: pytest.MonkeyPatch, capsys, django_capture_on_commit_callbacks
) -> None:
    """The broker does not answer: nothing is lost, and it says how to start it, not the socket."""

    def away(*_args: object, **_more: object) -> None:
        raise ConnectionError("Error 2 connecting to unix socket")

    monkeypatch.setattr("mmadmin.celery.app.send_task", away)
    with django_capture_on_commit_callbacks(execute=True):
        mm_json("rollback", "tiny", "--reason", "x", "--detach")
    said = capsys.readouterr().err
    number = served.activations.get().pk
    assert "nothing runs here" in said
    assert f"activation {number} is kept and begins then. Start it: mm up" in said
    assert "socket" not in said
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    mm("cancel", "tiny")
    with django_capture_on_commit_callbacks(execute=True):
        mm_json("rollback", "tiny", "--reason", "x", "--detach")
    assert "the broker does not answer (Error 2" in capsys.readouterr().err


def test_what_is_not_there_names_the_command_that_lists_it(alice: User, capsys) -> None:
    """A remedy is for everybody; in a terminal the command is said with it."""
    with pytest.raises(NotFound) as caught:
        mm("follow", "nonexistent")
    report(caught.value, as_json=False)
    assert "remedy: see the list of deployments: mm status" in capsys.readouterr().err
    report(NotFound("gone", remedy="look elsewhere"), as_json=False)
    assert "remedy: look elsewhere\n" in capsys.readouterr().err


def test_a_dry_run_says_what_would_happen(served: Deployment) -> None:
    """Which generation, whether it overlaps, and who waits; nothing is queued."""
    told = mm_json("rollback", "tiny", "--dry-run")
    assert (told["target"], told["outlook"]) == (1, "refused"), told
    assert "build it again first" in told["message"]
    assert "tiny/1: refused" in mm("activate", "tiny", "1", "--dry-run")
    assert not served.activations.exists()


def test_cancel_ends_what_is_queued(served: Deployment) -> None:
    """A queued activation is cancelled at once, and a second cancel says that nothing is on."""
    mm("rollback", "tiny", "--reason", "x", "--detach")
    assert mm_json("cancel", "tiny") == {
        "build": None,
        "activation": served.activations.get().pk,
        "states": {"activation": "cancelled"},
        "other_builds": [],
    }
    assert "nothing is queued or running" in mm("cancel", "tiny")


def test_cancel_of_what_runs_is_a_request(served: Deployment, alice: User) -> None:
    """Its worker ends it: nothing is called cancelled before it is."""
    mm("rollback", "tiny", "--reason", "x", "--detach")
    served.activations.update(state=JobState.RUNNING)
    number = served.activations.get().pk
    said = mm("cancel", "tiny")
    assert said.startswith(f"activation {number} is asked to stop")
    assert "cancelled" not in said
    assert served.activations.get().cancel_requested_at is not None
    assert mm_json("cancel", "tiny")["states"] == {"activation": "running"}


@pytest.fixture
def building(served: Deployment) -> list[Build]:
    """Three builds under way, oldest first: two run, the newest waits."""
    states = (JobState.RUNNING, JobState.RUNNING, JobState.QUEUED)
    phases = ("building", "waiting", "")
    return [
        Build.objects.create(
            deployment=served, host=served.host, spec_toml="", state=state, phase=phase
        )
        for state, phase in zip(states, phases, strict=True)
    ]


def test_cancel_takes_the_newest_build_and_names_the_others(
    served: Deployment, building: list[Build]
) -> None:
    """Who cancels means most likely what was asked for last; nothing else is touched."""
    first, second, newest = building
    others = (
        f"also under way: build {second.pk} (waiting), build {first.pk} (building). "
        "Cancel one: mm cancel tiny --build NUMBER"
    )
    assert mm("cancel", "tiny").splitlines() == [
        f"build {newest.pk} is cancelled: it had not begun",
        others,
    ]
    assert not Build.objects.filter(state=JobState.RUNNING).exclude(cancel_requested_at=None)
    found = mm_json("cancel", "tiny")
    assert (found["build"], found["other_builds"]) == (second.pk, [first.pk])
    assert f"Cancel it: mm cancel tiny --build {first.pk}\n" in mm("cancel", "tiny")


def test_cancel_of_one_build_leaves_the_rest(served: Deployment, building: list[Build]) -> None:
    """With a number only that build is cancelled: no other, and no activation."""
    first, second, newest = building
    mm("rollback", "tiny", "--reason", "x", "--detach")
    said = mm("cancel", "tiny", "--build", str(first.pk))
    assert said.startswith(f"build {first.pk} is asked to stop")
    assert f"also under way: build {newest.pk} (queued), build {second.pk} (waiting)." in said
    asked = Build.objects.exclude(cancel_requested_at=None)
    assert [build.pk for build in asked] == [first.pk]
    assert served.activations.get().state == JobState.QUEUED
    with pytest.raises(NotFound, match=f"tiny has no build {newest.pk + 1} under way") as caught:
        mm("cancel", "tiny", "--build", str(newest.pk + 1))
    assert caught.value.remedy == f"builds under way: {newest.pk}, {second.pk}, {first.pk}"


def test_follow_takes_the_newest_build_or_the_named(
    served: Deployment, building: list[Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same build that a cancel would take, and the same words about the others."""
    followed: list[int] = []
    monkeypatch.setattr(
        "mmadmin.cli.follow.follow_to_live", lambda number, **_more: followed.append(number)
    )
    first, second, newest = building
    assert f"also under way: build {second.pk} (waiting)" in mm("follow", "tiny")
    mm("follow", "tiny", "--build", str(first.pk))
    assert followed == [newest.pk, first.pk]


@pytest.fixture
def said(served: Deployment) -> Build:
    """A build that has ended, and whose log has five lines in two pieces."""
    build = Build.objects.create(
        deployment=served, host=served.host, spec_toml="", state=JobState.SUCCEEDED
    )
    for text in ("one\ntwo\n", "three\nfour\nfive\n"):
        LogChunk.objects.create(build=build, text=text)
    return build


def test_logs_of_a_build_go_back_as_far_as_is_said(said: Build) -> None:
    """All lines, or the last ones, over the bounds of pieces; in JSON, too."""
    number = str(said.pk)
    assert mm("logs", "--build", number) == "one\ntwo\nthree\nfour\nfive\n"
    assert mm("logs", "--build", number, "-n", "2") == "four\nfive\n"
    assert mm("logs", "--build", number, "-n", "4") == "two\nthree\nfour\nfive\n"
    assert mm_json("logs", "--build", number, "-n", "1")["lines"] == ["five"]


def test_logs_that_are_followed_are_whole_from_there(
    said: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was there before is cut to the last lines."""
    Build.objects.update(state=JobState.RUNNING)

    def more(_seconds: float) -> None:
        LogChunk.objects.create(build=said, text="six\nseven\neight\n")
        Build.objects.update(state=JobState.SUCCEEDED)

    monkeypatch.setattr("mmadmin.cli.logs.time.sleep", more)
    shown = mm("logs", "--build", str(said.pk), "-n", "2", "-f")
    assert shown == "four\nfive\nsix\nseven\neight\n"


def test_an_engine_that_has_proved_itself_runs(
    served: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor calls it "starting" for a while yet; with another process it is believed."""
    made = served.live.replicas.create(
        uid="tiny.2.abc", host=served.host, pid=123, state=ReplicaState.READY
    )
    log = Path("x.log")
    running = [
        ProgramStatus("tiny.2.abc", "STARTING", 123, 3, 0, log, ""),
        ProgramStatus("tiny.1.abc", "STARTING", 124, 3, 0, log, ""),
    ]
    monkeypatch.setattr(Supervisor, "running", lambda _self: True)
    monkeypatch.setattr(Supervisor, "status", lambda _self: running)
    states = {s["name"]: s["state"] for s in mm_json("status")["services"]}
    assert states == {"tiny.2.abc": "running", "tiny.1.abc": "starting"}
    made.pid = 99
    made.save()
    assert {s["state"] for s in mm_json("status")["services"]} == {"starting"}


def test_password_is_new_and_works(alice: User) -> None:
    """The printed password logs in; the old one no longer does."""
    fresh = mm_json("password", "alice")["password"]
    alice.refresh_from_db()
    assert alice.check_password(fresh)
    assert len(fresh) >= 16


def test_a_lost_phone_is_helped_on_the_machine(alice: User) -> None:
    """A new password can turn the second factor off, also where the role needs one."""
    User.objects.filter(pk=alice.pk).update(
        second_factor_key="00" * 20, second_factor_at=timezone.now()
    )
    SecondFactorRule.objects.create(role="admin")
    mm_json("password", "alice")
    alice.refresh_from_db()
    assert alice.second_factor_at
    mm_json("password", "alice", "--reset-second-factor")
    alice.refresh_from_db()
    assert alice.second_factor_at is None


def test_a_token_is_made_on_the_machine(alice: User) -> None:
    """Of the person that `mm` acts for, with the scopes and the end that were asked for."""
    made = mm_json("token", "--scope", "deploy", "--days", "7")
    user = token_user(made["token"])
    assert user == alice
    assert made["scopes"] == ["read", "deploy"]
    assert made["expires_at"]
    assert mm_json("token", "--days", "0")["expires_at"] is None
    with pytest.raises(InvalidInput, match="everything"):
        mm("token", "--scope", "everything")
    text = mm("token")
    assert "pat-mm-" in text
    assert "read" in text


def test_deploy_of_a_bad_file_names_it(alice: User, tmp_path: Path) -> None:
    """A file that is not there, and one that is no deployment, are refused with a message."""
    with pytest.raises(NotFound, match="there is not a file"):
        mm("deploy", str(tmp_path / "none.toml"))
    bad = tmp_path / "bad.toml"
    bad.write_text("[deployment]\nnaem = 1\n")
    with pytest.raises(InvalidInput):
        mm("deploy", str(bad))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--version"], 0, "mm "),
        (["no-such-word"], 2, "No such command"),
        (["history"], 2, "Missing argument"),
        (["history", "--json"], 2, '"code": "invalid_input"'),
        (["no-such-word", "--json"], 2, "No such command"),
        (["history", "tiny", "--page", "0", "--json"], 2, '"message": "Invalid value'),
        (["history", "--help", "--json"], 0, "Usage"),
        (["history", "tiny"], 1, "nothing is set up"),
        (["history", "tiny", "--json"], 1, '"code": "conflict"'),
        (["logs"], 2, "whose log?"),
        (["diff", "tiny", "1", "9" * 30], 2, "Invalid value"),
        (["rollback", "tiny", "--to", "9" * 30], 2, "Invalid value"),
        (["keys", "issue", "--owner", "x", "--expires-in-days", "9" * 12], 2, "Invalid value"),
    ],
)
def test_exit_codes(words: list[str], code: int, says: str, tmp_path: Path) -> None:
    """0 done, 1 failed in words (or JSON), 2 wrong usage: as a shell sees it."""
    done = subprocess.run(
        [sys.executable, "-c", "from mmadmin.cli.entry import main; main()", *words],
        cwd=ROOT,
        env={"MM_HOME": str(tmp_path / "empty"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if "--json" in words and code:
        assert not done.stdout, "a pipe gets data only"
        assert json.loads(done.stderr)["error"]["message"]


@pytest.mark.parametrize("home", ["/tmp/" + "x" * 300, "/tmp/new\nline", "/tmp" + "/long" * 300])
def test_a_home_that_cannot_be_is_refused(home: str) -> None:
    """Before anything is made or read there."""
    with pytest.raises(InvalidInput, match="MM_HOME cannot be"):
        Home.from_env({"MM_HOME": home})


def test_a_full_disk_is_said_in_words() -> None:
    """Wherever it was met, also below another error; a bug of ours stays one."""
    full = OSError(errno.ENOSPC, "No space left on device", "/x")
    over = RuntimeError("over it")
    over.__cause__ = OperationalError("database or disk is full")
    assert isinstance(of_the_disk(full), DiskFull)
    assert isinstance(of_the_disk(over), DiskFull)
    assert of_the_disk(OSError(errno.ENOENT, "gone")) is None
    assert of_the_disk(OperationalError("no such table: x")) is None


def test_a_trial_is_begun_looked_at_and_ended(served: Deployment) -> None:
    """By number, without one, and by --end: each says how it stands, to people and machines."""
    assert mm("trial", "tiny") == "tiny has no trial\n"
    assert mm_json("trial", "tiny") is None
    begun = mm_json("trial", "tiny", "1", "--minutes", "5", "--reason", "look", "--detach")
    assert (begun["model"], begun["status"], begun["minutes"]) == ("tiny/1", "waiting", 5)
    trial = Trial.objects.get()
    Trial.objects.update(
        phase="open", opened_at=timezone.now(), ends_at=timezone.now() + timedelta(minutes=5)
    )
    words = mm("trial", "tiny")
    assert re.fullmatch(
        r"tiny/1 on trial is open for \d min \d\d s: ask it in the panel's playground\n", words
    )
    assert mm_json("trial", "tiny")["ends_at"]
    ended = mm_json("trial", "tiny", "--end", "--detach")
    assert (ended["id"], ended["ending"]) == (trial.pk, "ended by alice")
    Trial.objects.update(state="succeeded", phase="stop")
    assert mm("trial", "tiny") == "tiny/1 on trial is ended: ended by alice\n"
    with pytest.raises(NotFound, match="no generation on trial"):
        mm("trial", "tiny", "--end")
    both = CliRunner().invoke(app, ["trial", "tiny", "1", "--end"])
    assert (both.exit_code, "leave one of them out" in both.output) == (2, True)


def test_a_trial_that_failed_is_a_failure(served: Deployment, monkeypatch) -> None:
    """What the worker wrote down is said, with its remedy, and the command fails."""
    error = {"code": "does_not_fit", "message": "too large", "remedy": "stop other", "details": {}}

    def work(_seconds: float) -> None:
        Trial.objects.update(state="failed", phase="stop", error=error)

    monkeypatch.setattr("mmadmin.cli.trial.time.sleep", work)
    with pytest.raises(DoesNotFit, match="too large") as failed:
        mm("trial", "tiny", "1")
    assert failed.value.remedy == "stop other"


def test_logs_are_those_of_the_live_one(served: Deployment, tmp_path: Path) -> None:
    """An engine on trial does not hide the live one's; by its uid it has its own."""
    live, other = (served.generations.get(number=number) for number in (2, 1))
    trial = Trial.objects.create(deployment=served, generation=other, host=served.host)
    for generation, of in ((live, None), (other, trial)):
        uid = f"tiny.{generation.number}"
        Replica.objects.create(uid=uid, generation=generation, host=served.host, trial=of)
        log = tmp_path / "logs" / "engines" / f"{uid}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"engine of {uid}\n")
    assert mm("logs", "tiny") == "engine of tiny.2\n"
    assert mm("logs", "tiny/1") == "engine of tiny.1\n"
    with pytest.raises(NotFound, match="no generation 7"):
        mm("logs", "tiny/7")
    served.host.name = "gpu-2"
    served.host.save()
    assert "gpu-2" in mm("status")
    with pytest.raises(NotFound, match="host gpu-2"):
        mm("logs", "tiny")


def test_deployments_are_listed_and_archived(served: Deployment) -> None:
    """What is stopped can be put out of sight, and back."""
    (row,) = mm_json("list")
    assert (row["name"], row["state"], row["live_generation"]) == ("tiny", "live", 2)
    assert "tiny-chat" in mm("list")
    refused = CliRunner().invoke(app, ["archive", "tiny"])
    assert isinstance(refused.exception, Conflict)
    Deployment.objects.update(live=None)
    mm("archive", "tiny")
    assert mm_json("list") == []
    assert [row["name"] for row in mm_json("list", "--archived")] == ["tiny"]
    mm("archive", "tiny", "--undo")
    assert [row["name"] for row in mm_json("list")] == ["tiny"]
