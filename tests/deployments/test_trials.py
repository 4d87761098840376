"""Trials as durable runs: open and ended, beside activations, and a kill at every step."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest
from django.utils import timezone

from deployments import actions, queries, tasks
from deployments.broker import feed
from deployments.jobs import lease, sweeper, watch
from deployments.models import (
    Activation,
    Alarm,
    AuditEvent,
    ClientKey,
    Deployment,
    Generation,
    Replica,
    Transition,
    Trial,
)
from mmadmin.core.errors import Conflict, InvalidInput, MmError, NotFound, Refused
from mmadmin.core.generations.lifecycle import JobState
from mmadmin.core.generations.trial import TrialStatus
from mmadmin.core.snapshot import snapshot_from_json
from tests.deployments import machines
from tests.deployments.conftest import People
from tests.deployments.processes import PATIENCE_S, until, worker
from tests.deployments.specs import spec
from tests.deployments.world import Gate, built, go, in_thread, live, running, states

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.database,
    pytest.mark.usefixtures("toy_machine", "broker", "quick"),
]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every change of what is on trial that this process tells the gates, in order."""
    real, changes = feed._to_redis, [[]]

    def to_redis(text: str, version: int) -> None:
        if (found := sorted(snapshot_from_json(text).trials)) != changes[-1]:
            changes.append(found)
        real(text, version)

    monkeypatch.setattr(feed, "_to_redis", to_redis)
    return changes


def two(people: People) -> None:
    """Generation 1 is live, generation 2 is built."""
    built(people)
    go(people, 1)
    built(people, 4096)


def begin(people: People, number: int = 2, name: str = "smol") -> Trial:
    """Put a generation on trial and do the job as far as it goes."""
    trial = actions.begin_trial(people.bob, name, number, reason="look at it")
    return work(trial)


def work(trial: Trial) -> Trial:
    """Do what there is to do for a trial."""
    tasks.run_trial(trial.pk)
    trial.refresh_from_db()
    return trial


def over(trial: Trial) -> None:
    """Its time has come: it was begun half an hour ago."""
    now = timezone.now()
    Trial.objects.filter(pk=trial.pk).update(
        created_at=now - timedelta(minutes=30), ends_at=now - timedelta(seconds=1)
    )


def engines(verb: str) -> list[str]:
    """What was done to engines, by generation."""
    return [line.split()[1].rsplit(".", 1)[0] for line in machines.done() if line.startswith(verb)]


def test_a_trial_runs_beside_the_live_one(people: People, gate: Gate, told) -> None:
    """Two engines, two routes; no generation moves, and the job sleeps."""
    two(people)
    moves = Transition.objects.count()
    trial = begin(people)
    assert (trial.status, trial.state) == (TrialStatus.OPEN, JobState.QUEUED)
    assert (live(), states(), running()) == (1, ["live", "built"], ["smol/1", "smol/2"])
    assert Transition.objects.count() == moves
    assert trial.ends_at - trial.opened_at == timedelta(minutes=30)
    assert told[-1] == ["smol/2"]
    until(lambda: gate.routes[-1] == ("open", 1, 1))
    assert Generation.objects.get(number=2).report("probe_report") == {"ok": True, "whole": True}
    done = machines.done()
    tasks.run_trial(trial.pk)
    sweeper.sweep()
    trial.refresh_from_db()
    assert (trial.asleep, trial.attempts, machines.done()) == (True, 0, done)


def test_it_ends_by_itself(people: People, gate: Gate, told, broker) -> None:
    """When its time is over the sweeper adapter it out: route, engine and trial end, in this order."""
    two(people)
    trial = begin(people)
    assert told[-1] == ["smol/2"]
    broker.delete("host.local")
    assert sweeper.sweep() == 0
    over(trial)
    assert sweeper.sweep() == 1
    assert broker.llen("host.local") == 1
    gate.inflight["smol/2"] = 1
    thread = in_thread(tasks.run_trial, trial.pk)
    until(lambda: Trial.objects.get(pk=trial.pk).phase == "drain")
    assert told[-1] == []
    assert running() == ["smol/1", "smol/2"], "it may finish what it says"
    gate.inflight.clear()
    thread.join(PATIENCE_S)
    trial.refresh_from_db()
    assert (trial.state, trial.status, trial.ending) == (
        "succeeded",
        TrialStatus.ENDED,
        "its time was over",
    )
    assert (live(), states(), running()) == (1, ["live", "built"], ["smol/1"])
    event = AuditEvent.objects.get(verb="trial.end")
    assert (event.actor, event.summary) == (None, "trial of smol/2 ends: its time was over")


def test_a_person_ends_it(people: People, gate: Gate, told) -> None:
    """At a click: it is handed out at once, and the audit log says who."""
    two(people)
    trial = begin(people)
    ended = actions.end_trial(people.bob, trial.pk)
    assert not ended.asleep
    actions.end_trial(people.bob, trial.pk)
    work(trial)
    assert (trial.state, trial.error, trial.ending) == ("succeeded", None, "ended by bob")
    assert running() == ["smol/1"]
    assert told[-1] == []
    assert [e.actor for e in AuditEvent.objects.filter(verb="trial.end")] == [people.bob]
    with pytest.raises(Conflict, match="has ended already"):
        actions.end_trial(people.bob, trial.pk)


def test_one_that_has_not_begun_is_cancelled(people: People) -> None:
    """Nothing was started, so nothing has to be undone."""
    two(people)
    trial = actions.begin_trial(people.bob, "smol", 2)
    ended = actions.end_trial(people.bob, trial.pk)
    assert (ended.state, ended.status) == ("cancelled", TrialStatus.CANCELLED)
    work(trial)
    assert running() == ["smol/1"]


def test_one_that_loads_is_cancelled(people: People, gate: Gate, told) -> None:
    """Its engine ends; no gate has ever known it."""
    two(people)
    machines.tell("hold", ["loading"])
    trial = actions.begin_trial(people.bob, "smol", 2)
    thread = in_thread(tasks.run_trial, trial.pk)
    until(lambda: Trial.objects.get(pk=trial.pk).phase == "probe")
    actions.end_trial(people.bob, trial.pk)
    thread.join(PATIENCE_S)
    trial.refresh_from_db()
    assert (trial.state, trial.error["message"]) == ("cancelled", "ended by bob")
    assert (states(), running()) == (["live", "built"], ["smol/1"])
    assert told == [[]]


def test_ended_just_before_it_sleeps(people: People, gate: Gate, monkeypatch) -> None:
    """The worker has passed its last look at the cancel: the trial wakes at once."""
    two(people)
    sleep = lease.sleep

    def ended_meanwhile(trial: Trial) -> bool:
        actions.end_trial(people.bob, trial.pk)
        return sleep(trial)

    monkeypatch.setattr(lease, "sleep", ended_meanwhile)
    trial = begin(people)
    assert (trial.state, trial.asleep) == ("queued", False)
    work(trial)
    assert (trial.state, running()) == ("succeeded", ["smol/1"])


@pytest.mark.parametrize(
    ("prepare", "error", "words"),
    [
        (lambda p: actions.begin_trial(p.carol, "smol", 2), Refused, "operator role"),
        (lambda p: actions.begin_trial(p.bob, "smol", 1), Conflict, "is live already"),
        (lambda p: actions.begin_trial(p.bob, "smol", 9), NotFound, "no generation 9"),
        (lambda p: actions.begin_trial(p.bob, "smol", 2, minutes=0), InvalidInput, "1 to 480"),
        (lambda p: actions.begin_trial(p.bob, "smol", 2, minutes=481), InvalidInput, "1 to 480"),
    ],
)
def test_what_cannot_be_tried(people: People, prepare, error: type[MmError], words: str) -> None:
    """It is refused with a message, and nothing is recorded."""
    two(people)
    with pytest.raises(error, match=words):
        prepare(people)
    assert not Trial.objects.exists()


def test_a_trial_needs_a_live_one(people: People) -> None:
    """Beside nothing there is nothing to try: it is activated instead."""
    built(people)
    with pytest.raises(Conflict, match="no live generation") as refused:
        actions.begin_trial(people.bob, "smol", 1)
    assert refused.value.remedy == "activate smol/1 instead"


def test_what_is_not_built_cannot_be_tried(people: People) -> None:
    """It says what it waits for, also where none is live."""
    actions.deploy(people.bob, spec(), reason="first", activate=False)
    with pytest.raises(Conflict, match="smol/1 cannot be tried: it is not built yet") as refused:
        actions.begin_trial(people.bob, "smol", 1)
    assert refused.value.remedy == "wait for its build"


def test_one_trial_a_deployment_and_none_beside_an_activation(people: People) -> None:
    """Each refusal says what is in the way."""
    two(people)
    built(people, 8192)
    trial = actions.begin_trial(people.bob, "smol", 2)
    with pytest.raises(Conflict, match="on trial already"):
        actions.begin_trial(people.bob, "smol", 3)
    actions.end_trial(people.bob, trial.pk)
    actions.activate(people.bob, "smol", 3)
    with pytest.raises(Conflict, match="middle of an activation"):
        actions.begin_trial(people.bob, "smol", 2)


def test_without_room_it_says_what_would_have_to_end(people: People) -> None:
    """Nothing is started; the other deployment is named, and that the live one could give way."""
    two(people)
    built(people, name="other", public_name="other")
    tasks.run_activation(actions.activate(people.bob, "other", 1).pk)
    machines.tell("places", 2)
    trial = begin(people)
    assert (trial.state, trial.error["code"]) == ("failed", "does_not_fit")
    assert trial.error["message"] == (
        "smol/2 does not fit beside what runs: 2 of 2 places are taken"
    )
    assert trial.error["remedy"] == (
        "stop other first, or activate smol/2 instead: smol/1 ends for it"
    )
    assert engines("start") == ["smol.1", "other.1"]


def test_another_trial_in_the_way_is_named(people: People) -> None:
    """A trial never ends another one: a person decides."""
    two(people)
    built(people, name="other", public_name="other")
    tasks.run_activation(actions.activate(people.bob, "other", 1).pk)
    built(people, 4096, name="other", public_name="other")
    begin(people, 2, "other")
    machines.tell("places", 3)
    trial = begin(people)
    assert "stop the trial of other/2 or other first" in trial.error["remedy"]
    assert running() == ["other/1", "other/2", "smol/1"]


def test_one_that_does_not_prove_itself(people: People, gate: Gate, told) -> None:
    """The trial fails in words and its engine ends; the generation is what it was."""
    two(people)
    machines.tell("probe-fails", ["smol/2"])
    trial = begin(people)
    assert (trial.state, trial.status) == ("failed", TrialStatus.FAILED)
    assert trial.error["message"] == "smol/2 answers nothing"
    assert (states(), running()) == (["live", "built"], ["smol/1"])
    assert Generation.objects.get(number=2).report("probe_report") == {"completion": "none"}
    assert told == [[]]
    machines.tell("probe-fails", [])
    assert begin(people).status is TrialStatus.OPEN


def test_an_incomplete_closure_is_not_tried(people: People) -> None:
    """Nothing is started from a store that lacks something."""
    two(people)
    machines.tell("preflight-fails", ["smol/2"])
    trial = begin(people)
    assert (trial.state, engines("start")) == ("failed", ["smol.1"])


def test_going_live_takes_its_engine_over(people: People, gate: Gate, told) -> None:
    """The proved engine is not started again: it answers as the live one."""
    two(people)
    trial = begin(people)
    replica = trial.replicas.get()
    machines.tell("places", 2)
    activation = go(people, 2)
    assert (activation.state, activation.mode) == ("succeeded", "overlap")
    assert (live(), states(), running()) == (2, ["retired", "live"], ["smol/2"])
    replica.refresh_from_db()
    assert (replica.state, replica.trial, replica.activation) == ("ready", None, activation)
    trial.refresh_from_db()
    assert (trial.state, trial.ending) == ("succeeded", "smol/2 goes live with its engine")
    assert Replica.objects.filter(generation__number=2).count() == 1
    until(lambda: gate.routes[-1] == ("open", 2, 1))
    assert told[-1] == []
    assert {mode for mode, generation, _ in gate.routes if generation} == {"open"}
    watch.watch(machines.ToyMachine())
    assert running() == ["smol/2"]


def test_one_taken_over_that_fails_ends(people: People, gate: Gate) -> None:
    """It is an activation's engine by then: it is undone like any other."""
    two(people)
    begin(people)
    machines.tell("probe-fails", ["smol/2"])
    activation = go(people, 2)
    assert activation.state == "failed"
    assert (live(), states(), running()) == (1, ["live", "failed"], ["smol/1"])


def test_an_activation_that_fails_before_it_began_leaves_the_trial(
    people: People, gate: Gate, told
) -> None:
    """What it undoes is its own: the engine on trial is not."""
    two(people)
    trial = begin(people)
    machines.tell("preflight-fails", ["smol/2"])
    assert go(people, 2).state == "failed"
    trial.refresh_from_db()
    assert (live(), running(), trial.status) == (1, ["smol/1", "smol/2"], TrialStatus.OPEN)
    assert told[-1] == ["smol/2"]


@pytest.mark.parametrize("change", ["gone", "other command"])
def test_an_engine_that_is_not_right_is_not_taken_over(
    people: People, gate: Gate, change: str
) -> None:
    """Its process is gone, or it would be started otherwise today: it ends, a new one starts."""
    two(people)
    trial = begin(people)
    if change == "gone":
        with machines.ToyMachine().engines() as now:
            del now[trial.replicas.get().uid]
    else:
        replica = trial.replicas.get()
        replica.launch["argv"] = ["before"]
        replica.save()
    activation = go(people, 2)
    assert (activation.state, live(), running()) == ("succeeded", 2, ["smol/2"])
    trial.refresh_from_db()
    assert (trial.state, trial.ending) == ("succeeded", "smol/2 goes live")
    assert engines("start") == ["smol.1", "smol.2", "smol.2"]
    assert set(Replica.objects.filter(trial=trial).values_list("state", flat=True)) == {"stopped"}


def test_another_generation_going_live_ends_it_first(people: People, gate: Gate) -> None:
    """The trial's engine has ended before the new one starts."""
    two(people)
    trial = begin(people)
    built(people, 8192)
    assert go(people, 3).state == "succeeded"
    trial.refresh_from_db()
    assert (trial.state, trial.ending) == ("succeeded", "smol/3 goes live")
    assert (live(), running()) == (3, ["smol/3"])
    done = [line.split(".")[0] + line.split(".")[1] for line in machines.done() if "." in line]
    assert done.index("stop smol2") < done.index("start smol3")


def test_one_that_is_just_starting_is_cancelled_by_an_activation(
    people: People, gate: Gate
) -> None:
    """Another worker loads it: it is told, and the activation waits until it has ended."""
    two(people)
    built(people, 8192)
    machines.tell("hold", ["loading"])
    trial = actions.begin_trial(people.bob, "smol", 2)
    starting = in_thread(tasks.run_trial, trial.pk)
    until(lambda: Trial.objects.get(pk=trial.pk).phase == "probe")
    activation = actions.activate(people.bob, "smol", 3)
    activating = in_thread(tasks.run_activation, activation.pk)
    until(lambda: not Trial.objects.get(pk=trial.pk).active)
    machines.tell("hold", [])
    starting.join(PATIENCE_S)
    activating.join(PATIENCE_S)
    trial.refresh_from_db()
    assert (trial.state, trial.error["message"]) == ("cancelled", "smol/3 goes live")
    assert (live(), running()) == (3, ["smol/3"])


def test_another_deployment_gets_the_memory(people: People, gate: Gate) -> None:
    """An activation that does not fit beside what runs ends the host's trials; one that does, not."""
    two(people)
    trial = begin(people)
    built(people, name="other", public_name="other")
    machines.tell("places", 3)
    tasks.run_activation(actions.activate(people.bob, "other", 1).pk)
    assert running() == ["other/1", "smol/1", "smol/2"]
    built(people, 4096, name="other", public_name="other")
    activation = actions.activate(people.bob, "other", 2)
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert (activation.state, activation.mode) == ("succeeded", "overlap")
    trial.refresh_from_db()
    assert (trial.state, trial.ending) == ("succeeded", "other/2 needs the memory")
    assert running() == ["other/2", "smol/1"]


@pytest.mark.parametrize("name", ["smol", "other"])
def test_one_that_is_refused_ends_none(people: People, gate: Gate, name: str) -> None:
    """There is no room even without the trials: they go on, the deployment's own one too."""
    two(people)
    trial = begin(people)
    generation = built(people, 8192, name=name, public_name=f"{name}-chat")
    machines.tell("places", 0)
    activation = actions.activate(people.bob, name, generation.number)
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert (activation.state, activation.error["code"]) == ("failed", "does_not_fit")
    trial.refresh_from_db()
    assert (trial.status, running()) == (TrialStatus.OPEN, ["smol/1", "smol/2"])


def test_no_more_end_than_make_room(people: People, gate: Gate) -> None:
    """Two are on trial, and the memory of one is enough."""
    two(people)
    first = begin(people)
    built(people, name="other", public_name="other")
    tasks.run_activation(actions.activate(people.bob, "other", 1).pk)
    built(people, 4096, name="other", public_name="other")
    second = begin(people, 2, "other")
    built(people, name="third", public_name="third")
    machines.tell("places", 4)
    tasks.run_activation(actions.activate(people.bob, "third", 1).pk)
    first.refresh_from_db()
    second.refresh_from_db()
    assert (first.ending, second.status) == ("third/1 needs the memory", TrialStatus.OPEN)
    assert running() == ["other/1", "other/2", "smol/1", "third/1"]


def test_a_stop_ends_it_too(people: People, gate: Gate) -> None:
    """Who takes a deployment down wants its memory."""
    two(people)
    trial = begin(people)
    activation = actions.stop(people.bob, "smol", reason="maintenance")
    tasks.run_activation(activation.pk)
    trial.refresh_from_db()
    assert (live(), running(), trial.ending) == (None, [], "smol is stopped")


def test_it_is_in_the_way_of_the_archive(people: People, gate: Gate) -> None:
    """A deployment with something on trial is in use."""
    two(people)
    begin(people)
    Deployment.objects.update(live=None)
    with pytest.raises(Conflict, match="in use"):
        actions.archive(people.bob, "smol")


KILLS = ["preflight", "start", "probe"]


@pytest.mark.parametrize("verb", KILLS)
def test_a_kill_on_the_way(people: People, gate: Gate, settings, verb: str) -> None:
    """SIGKILL in a phase: the next worker goes on, with the same engine."""
    two(people)
    machines.tell("suicide", [verb])
    trial = actions.begin_trial(people.bob, "smol", 2)
    assert worker("run_trial", trial.pk, settings.HOME.root).wait(PATIENCE_S) == -signal.SIGKILL
    assert Trial.objects.get(pk=trial.pk).state == JobState.RUNNING
    work(trial)
    assert trial.status is TrialStatus.OPEN
    assert running() == ["smol/1", "smol/2"]
    assert Replica.objects.filter(trial=trial).count() == 1


def test_a_kill_while_it_ends(people: People, gate: Gate, settings) -> None:
    """SIGKILL as the engine is being ended: the next worker finishes that."""
    two(people)
    trial = begin(people)
    over(trial)
    machines.tell("suicide", ["stop"])
    assert worker("run_trial", trial.pk, settings.HOME.root).wait(PATIENCE_S) == -signal.SIGKILL
    work(trial)
    assert (trial.state, running()) == ("succeeded", ["smol/1"])
    assert AuditEvent.objects.filter(verb="trial.end").count() == 1


def test_a_kill_of_the_activation_that_takes_it_over(people: People, gate: Gate, settings) -> None:
    """SIGKILL just after: the engine is the activation's, which goes on with it."""
    two(people)
    begin(people)
    machines.tell("suicide", ["start"])
    activation = actions.activate(people.bob, "smol", 2)
    first = worker("run_activation", activation.pk, settings.HOME.root)
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    watch.watch(machines.ToyMachine())
    tasks.run_activation(activation.pk)
    assert (live(), running()) == (2, ["smol/2"])
    assert Replica.objects.filter(generation__number=2).count() == 1


def test_a_kill_of_the_activation_that_ends_it(people: People, gate: Gate, settings) -> None:
    """SIGKILL in the middle of the trial's end: the next worker ends it and goes on."""
    two(people)
    trial = begin(people)
    built(people, 8192)
    machines.tell("suicide", ["stop"])
    activation = actions.activate(people.bob, "smol", 3)
    first = worker("run_activation", activation.pk, settings.HOME.root)
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    tasks.run_activation(activation.pk)
    trial.refresh_from_db()
    assert (trial.state, live(), running()) == ("succeeded", 3, ["smol/3"])


def test_one_that_kills_its_worker_is_given_up(people: People, gate: Gate) -> None:
    """After a few lost workers its engine ends instead."""
    two(people)
    trial = actions.begin_trial(people.bob, "smol", 2)
    Trial.objects.filter(pk=trial.pk).update(attempts=3, phase="probe")
    work(trial)
    assert (trial.state, running()) == ("failed", ["smol/1"])
    assert "worker killed" in trial.error["message"]


def test_the_watch_ends_an_engine_that_outlived_its_trial(people: People, gate: Gate, told) -> None:
    """The trial was given up by the sweeper: nobody else would end its engine."""
    two(people)
    trial = begin(people)
    lease.end(Trial.objects.get(pk=trial.pk), JobState.FAILED, lease.KILLED.as_json())
    watch.watch(machines.ToyMachine())
    assert running() == ["smol/1"]
    assert trial.replicas.get().state == "stopped"
    feed.publish_snapshot()
    assert told[-1] == []


def test_the_watch_leaves_a_trial_alone(people: People, gate: Gate) -> None:
    """Neither a leftover nor a live engine: not ended, not asked, no alarm, no roll-back."""
    two(people)
    trial = begin(people)
    machines.tell("hangs", ["smol/2"])
    machines.tell("drift", {"argv": "differs"})
    for _ in range(3):
        watch.watch(machines.ToyMachine())
    assert running() == ["smol/1", "smol/2"]
    assert {alarm.generation.number for alarm in Alarm.objects.filter(cleared_at=None)} == {1}
    assert engines("alive") == ["smol.1"]
    assert not Activation.objects.filter(kind="rollback").exists()
    trial.refresh_from_db()
    assert trial.asleep


def test_a_trial_without_an_engine_ends(people: People, gate: Gate) -> None:
    """One look without a process may be the supervisor's restart; two are an end."""
    two(people)
    trial = begin(people)
    with machines.ToyMachine().engines() as now:
        del now[trial.replicas.get().uid]
    watch.watch(machines.ToyMachine())
    trial.refresh_from_db()
    assert trial.asleep
    watch.watch(machines.ToyMachine())
    work(trial)
    assert (trial.state, trial.ending) == ("succeeded", "its engine has ended")
    assert running() == ["smol/1"]


def test_the_live_one_falls_back_beside_a_trial(people: People, gate: Gate) -> None:
    """What goes back by itself is the live generation; the trial makes way."""
    two(people)
    go(people, 2)
    built(people, 8192)
    trial = begin(people, 3)
    machines.tell("hangs", ["smol/2"])
    watch.watch(machines.ToyMachine())
    watch.watch(machines.ToyMachine())
    back = Activation.objects.get(kind="rollback")
    assert (back.target.number, back.previous.number) == (1, 2)
    tasks.run_activation(back.pk)
    trial.refresh_from_db()
    assert (live(), running(), trial.ending) == (1, ["smol/1"], "smol/1 goes live")


def test_history_says_only_when_it_was_live(people: People, gate: Gate) -> None:
    """A trial is no live interval; it stands in a list of its own, and on the deployment's row."""
    two(people)
    trial = begin(people)
    row = queries.generation(people.carol, "smol", 2)
    assert (row.live_spans, row.live_s, row.is_live) == ([], 0, False)
    assert [t.pk for t in queries.trials(people.carol, name="smol", number=2).rows] == [trial.pk]
    assert queries.trials(people.carol, name="smol", number=1).rows == []
    assert queries.trial(people.carol, trial.pk) == trial
    assert queries.deployment(people.carol, "smol").trial == trial
    assert queries.deployment(people.carol, "smol").state == "live"


def test_only_playground_keys_may_try(people: People, gate: Gate) -> None:
    """The panel makes them for an hour; a rotated or issued key is none."""
    key, _ = actions.playground_key(people.carol)
    issued, _ = actions.issue_key(people.alice, owner="somebody")
    rotated, _ = actions.rotate_key(people.alice, key.key_id)
    found = feed.current_snapshot().keys
    assert {k.key_id for k in found.values() if k.trials} == {key.key_id}
    assert set(found) == {key.key_id, issued.key_id, rotated.key_id}
    assert ClientKey.objects.get(key_id=key.key_id).playground
