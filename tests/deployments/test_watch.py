"""The watch: leftovers end, drift is told, the dead are restarted or rolled back."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from django.utils import timezone

from deployments import actions, tasks
from deployments.broker import feed
from deployments.jobs import gates
from deployments.models import (
    Activation,
    Alarm,
    AuditEvent,
    Deployment,
    Generation,
    Replica,
    UsageEvent,
)
from mmadmin.core.generations.lifecycle import JobState
from mmadmin.core.snapshot import GATE_PRESENCE_PREFIX, Route
from tests.deployments import machines
from tests.deployments.conftest import People
from tests.deployments.specs import spec

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("toy_machine", "broker"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's broker counts as having heard every gate."""
    monkeypatch.setattr(gates, "QUIET_S", 0)


@pytest.fixture
def two(people: People) -> Deployment:
    """A deployment with generation 2 live and 1 retired."""
    for number in (1, 2):
        generation = actions.deploy(people.bob, spec(context=1024 * number), reason="go")
        tasks.run_build(generation.builds.get().pk)
        tasks.run_activation(generation.activations.get().pk)
    return Deployment.objects.get(live__number=2)


def asked() -> int:
    """How many tiny completions the engines got."""
    return sum(line.startswith("alive ") for line in machines.done())


def restarted() -> int:
    """How often an engine was started again in its seat."""
    starts = [line for line in machines.done() if line.startswith("start ")]
    return len(starts) - len(set(starts))


def test_a_healthy_engine_is_asked_now_and_then(two: Deployment) -> None:
    """Once, then not again for a while; traffic that went well makes it needless."""
    tasks.watch_engines()
    tasks.watch_engines()
    assert asked() == 1
    Replica.objects.update(checked_at=timezone.now() - timedelta(minutes=5))
    UsageEvent.objects.create(
        id="r", at=timezone.now(), deployment="smol", generation=2, status=200, outcome="ok"
    )
    tasks.watch_engines()
    assert asked() == 1
    UsageEvent.objects.update(outcome="failed")
    tasks.watch_engines()
    assert asked() == 2
    assert not Alarm.objects.exists()


def test_one_that_fell_soon_is_rolled_back(two: Deployment) -> None:
    """Twice no answer within the window: an alarm, and generation 1 comes back by itself."""
    machines.tell("hangs", ["smol/2"])
    tasks.watch_engines()
    assert not Activation.objects.filter(kind="rollback").exists(), "one failure may be chance"
    tasks.watch_engines()
    activation = Activation.objects.get(kind="rollback")
    assert activation.actor is None
    assert "the engine does not answer" in activation.reason
    assert Alarm.objects.get().kind == "unhealthy"
    assert AuditEvent.objects.filter(verb="deployment.rollback", actor=None).exists()
    tasks.watch_engines()
    tasks.run_activation(activation.pk)
    two.refresh_from_db()
    assert two.live.number == 1
    assert restarted() == 0
    tasks.watch_engines()
    assert not Alarm.objects.filter(cleared_at=None).exists()


def test_an_engine_on_a_tcp_port_is_started_anew_on_a_socket(two: Deployment) -> None:
    """As version 0.1 left it and the upgrade noted: held, ended, started, proved, routed again."""
    hold = timezone.now() + timedelta(minutes=20)
    Replica.objects.update(launch={"argv": ["engine", "--port", "21000"], "port": 21000})
    Replica.objects.filter(state="ready").update(state="starting")
    Deployment.objects.update(hold_until=hold)
    with machines.ToyMachine().engines() as running:
        (uid,) = running
    tasks.watch_engines()
    replica = Replica.objects.get(uid=uid)
    assert replica.launch["socket"].endswith("/engine.sock")
    assert machines.done()[-2:] == [f"stop {uid}", f"start {uid}"]
    assert feed.current_snapshot().routes["smol-chat"].mode == "hold"
    tasks.watch_engines()
    replica.refresh_from_db()
    assert replica.state == "ready"
    route = feed.current_snapshot().routes["smol-chat"]
    assert (route.mode, route.replicas[0].socket) == ("open", replica.launch["socket"])
    assert not Alarm.objects.filter(cleared_at=None).exists()


def test_a_replica_keeps_the_launch_that_it_was_started_with(two: Deployment) -> None:
    """Its record is whole, and what this version would launch now does not change it."""
    replica = Replica.objects.get(state="ready")
    assert replica.launch["argv"] == ["engine", "smol/2", replica.launch["socket"]]
    assert replica.launch["expect"]["context_per_slot"] == replica.context_per_slot == 2048
    Replica.objects.update(launch=replica.launch | {"argv": ["engine", "before"]})
    machines.tell("runs", ["engine", "before"])
    tasks.watch_engines()
    assert not Alarm.objects.exists()


@pytest.mark.parametrize("why", ["late", "off"])
def test_else_it_is_restarted_with_growing_pauses(two: Deployment, why: str) -> None:
    """After the window, or with auto-rollback off: restart, and not again at once."""
    if why == "late":
        Activation.objects.update(ended_at=timezone.now() - timedelta(days=1))
    else:
        Deployment.objects.update(auto_rollback=False)
    machines.tell("hangs", ["smol/2"])
    for _ in range(6):
        tasks.watch_engines()
    assert restarted() == 1
    assert not Activation.objects.filter(kind="rollback").exists()
    before = timezone.now() - timedelta(minutes=5)
    Replica.objects.filter(restarts=1).update(restarted_at=timezone.now(), checked_at=before)
    for _ in range(3):
        tasks.watch_engines()
    assert restarted() == 1, "the first pause is a minute"
    Replica.objects.filter(restarts=1).update(restarted_at=timezone.now() - timedelta(minutes=2))
    for _ in range(3):
        tasks.watch_engines()
    assert restarted() == 2
    machines.tell("hangs", [])
    Replica.objects.update(checked_at=None)
    tasks.watch_engines()
    assert not Alarm.objects.filter(cleared_at=None).exists()


def test_an_engine_whose_process_is_gone(two: Deployment) -> None:
    """It is not asked, and counts as not alive."""
    Deployment.objects.update(auto_rollback=False)
    machines.tell("engines", {})
    tasks.watch_engines()
    tasks.watch_engines()
    assert (asked(), restarted()) == (0, 1)


def fall(number: int) -> None:
    """The engine's process ends and is started again, works, and is looked at each time."""
    machines.tell("started", 100 + number)
    tasks.watch_engines()
    tasks.watch_engines()


def test_one_that_falls_again_and_again_is_rolled_back(two: Deployment) -> None:
    """It works in between, so no two looks in a row fail: three falls in the window are enough."""
    tasks.watch_engines()
    for number in range(2):
        fall(number)
        assert not Activation.objects.filter(kind="rollback").exists(), "it may be chance"
        assert Replica.objects.get(generation__number=2).failures == 0, "it works"
    fall(3)
    activation = Activation.objects.get(kind="rollback")
    assert activation.reason == (
        "automatic: smol/2 failed: its process ended 3 times, each soon after the other"
    )
    assert restarted() == 0


def test_a_fall_that_is_seen_twice_is_one(two: Deployment) -> None:
    """A look may come before the supervisor has started it again: the next look sees it work."""
    tasks.watch_engines()
    engines = machines.told("engines")
    machines.tell("engines", {})
    tasks.watch_engines()
    machines.tell("started", 100)
    machines.tell("engines", engines)
    tasks.watch_engines()
    assert not Alarm.objects.exists()
    assert Replica.objects.get(generation__number=2).failures == 0
    assert restarted() == 0


def test_nothing_goes_back_to_what_a_roll_back_left(two: Deployment) -> None:
    """It was left for a reason: the one that falls then is restarted where it is."""
    tasks.run_activation(
        actions.rollback(two.live.activations.get().actor, "smol", reason="2 is bad").pk
    )
    machines.tell("hangs", ["smol/1"])
    tasks.watch_engines()
    tasks.watch_engines()
    assert not Activation.objects.filter(actor=None).exists()
    assert restarted() == 1


def test_one_that_is_just_being_started_has_not_drifted(two: Deployment) -> None:
    """The supervisor's child becomes the engine a moment after it was started."""
    tasks.watch_engines()
    machines.tell("started", 100)
    machines.tell("drift", {"program": "it runs the launcher"})
    tasks.watch_engines()
    assert not Alarm.objects.exists()
    tasks.watch_engines()
    assert Alarm.objects.get().kind == "drift"


@pytest.mark.parametrize("why", ["off", "seldom", "with the supervisor"])
def test_one_that_falls_and_stays(
    two: Deployment, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Switched off, it only raises an alarm; falls now and then, or with everything, are none."""
    if why == "off":
        Deployment.objects.update(auto_rollback=False)
    if why == "with the supervisor":
        monkeypatch.setattr(
            machines.PROCESS.__class__, "me", lambda: replace(machines.PROCESS, started=999)
        )
    tasks.watch_engines()
    for number in range(5):
        fall(number)
        if why == "seldom":
            Replica.objects.update(fell_at=timezone.now() - timedelta(minutes=11))
    assert not Activation.objects.filter(kind="rollback").exists()
    assert Alarm.objects.exists() is (why == "off")
    assert not Alarm.objects.filter(cleared_at=None).exists(), "it works"


@pytest.fixture
def client_waits(toy_machine: None, broker, two: Deployment) -> None:
    """A gate has a request with generation 2, and it does not end."""
    gate_says(broker, {"smol/2": 1})


def gate_says(broker, inflight: dict[str, int]) -> None:
    """What a gate that has seen every snapshot has in flight."""
    said = {"version": 1 << 60, "inflight": inflight, "held": {}, "at": 0}
    broker.set(f"{GATE_PRESENCE_PREFIX}test", json.dumps(said))


def later(seconds: int) -> None:
    """So much time passes for what the watch has seen."""
    for replica in Replica.objects.exclude(worked_at=None):
        replica.worked_at -= timedelta(seconds=seconds)
        replica.save()


@pytest.mark.usefixtures("client_waits")
@pytest.mark.parametrize("mark", ["abc", "unreachable"])
def test_an_engine_that_hangs_while_clients_stay(two: Deployment, mark: str) -> None:
    """Nothing in work has moved, or it is silent, for `stall_s`: it fell, seen by two looks."""
    machines.tell("work", mark)
    for _ in range(3):
        tasks.watch_engines()
    later(150)
    tasks.watch_engines()
    assert not Alarm.objects.exists()
    later(151)
    tasks.watch_engines()
    assert not Alarm.objects.exists(), "one look may be chance, or a clock that jumped"
    tasks.watch_engines()
    assert Alarm.objects.get().message == "nothing of what it has in work has moved for 300 s"
    assert Activation.objects.filter(kind="rollback").exists()
    assert asked() == 0, "a tiny completion would stand behind the others in the line"


@pytest.mark.usefixtures("client_waits")
def test_an_engine_at_work_is_left_alone(two: Deployment) -> None:
    """However long a request takes, while the engine's counters move."""
    for mark in ("a", "b", "c", "d"):
        machines.tell("work", mark)
        tasks.watch_engines()
        later(3600)
    tasks.watch_engines()
    machines.tell("work", "e")
    tasks.watch_engines()
    assert not Alarm.objects.exists()
    assert Replica.objects.get(generation__number=2).failures == 0
    machines.tell("work", None)
    later(3600)
    for _ in range(3):
        tasks.watch_engines()
    assert not Alarm.objects.exists(), "one that does not tell is asked when its clients have left"
    assert asked() == 0


def test_work_that_was_done_is_forgotten(two: Deployment, broker) -> None:
    """A mark of yesterday does not count against an engine that is silent for a moment today."""
    gate_says(broker, {"smol/2": 1})
    machines.tell("work", "abc")
    tasks.watch_engines()
    later(3600)
    gate_says(broker, {})
    machines.tell("work", "")
    tasks.watch_engines()
    assert asked() == 1
    gate_says(broker, {"smol/2": 1})
    machines.tell("work", "unreachable")
    for _ in range(3):
        tasks.watch_engines()
    assert not Alarm.objects.exists()


@pytest.mark.usefixtures("client_waits")
def test_who_waits_for_ever_may(two: Deployment) -> None:
    """`stall_s = 0`: slow hosts with large prompts."""
    Generation.objects.update(spec_toml=f"{spec()}\n[activation]\nstall_s = 0\n")
    machines.tell("work", "abc")
    for _ in range(4):
        tasks.watch_engines()
        later(3600)
    assert not Alarm.objects.exists()


def test_an_engine_without_a_sandbox_raises_an_alarm_until_it_has_one(two: Deployment) -> None:
    """Each start records the level; the alarm ends with the first start that has a sandbox."""
    tasks.watch_engines()
    replica = Replica.objects.get(generation=two.live, state="ready")
    assert replica.sandbox == "bubblewrap"
    assert not Alarm.objects.exists()
    Replica.objects.filter(pk=replica.pk).update(sandbox="none")
    tasks.watch_engines()
    alarm = Alarm.objects.get()
    assert (alarm.kind, alarm.generation) == ("sandbox", two.live)
    assert "without a sandbox" in alarm.message
    Replica.objects.filter(pk=replica.pk).update(sandbox="bubblewrap")
    tasks.watch_engines()
    alarm.refresh_from_db()
    assert alarm.cleared_at is not None


def test_drift_raises_an_alarm_until_it_is_gone(two: Deployment) -> None:
    """Raised once, kept while it lasts, cleared when it does not differ any more."""
    machines.tell("drift", {"file": "model.gguf was deleted"})
    tasks.watch_engines()
    tasks.watch_engines()
    alarm = Alarm.objects.get()
    assert (alarm.kind, alarm.subject, alarm.message) == (
        "drift",
        "file",
        "model.gguf was deleted",
    )
    machines.tell("drift", {"file": "model.gguf was written to"})
    tasks.watch_engines()
    alarm.refresh_from_db()
    assert alarm.cleared_at is not None, "it says something else now: an alarm is never edited"
    alarm = Alarm.objects.get(cleared_at=None)
    assert alarm.message == "model.gguf was written to"
    machines.tell("drift", {})
    tasks.watch_engines()
    alarm.refresh_from_db()
    assert alarm.cleared_at is not None
    assert Activation.objects.filter(state=JobState.QUEUED).count() == 0


def test_a_process_of_an_earlier_form_is_unknown_until_it_was_seen(two: Deployment) -> None:
    """A row of before the upgrade names no process; the next look writes it down."""
    live = Replica.objects.filter(generation=two.live)
    live.update(pid=1, started=None, boot="")
    assert live.get().process is None
    tasks.watch_engines()
    assert live.get().process == machines.PROCESS


def test_an_engine_that_loads_is_not_dead(two: Deployment) -> None:
    """Started again by the supervisor, a large model takes minutes: it is given them."""
    machines.tell("hangs", ["smol/2"])
    machines.tell("loads", ["smol/2"])
    machines.tell("started", 2)
    for _ in range(5):
        tasks.watch_engines()
    assert (asked(), restarted()) == (0, 0)
    assert not Alarm.objects.exists()
    machines.tell("loads", [])
    machines.tell("hangs", [])
    tasks.watch_engines()
    assert Replica.objects.get(generation=two.live).failures == 0


def test_an_engine_that_falls_again_and_again_is_rolled_back(two: Deployment) -> None:
    """Each look finds it loading, and each time it is another process: that is no loading."""
    machines.tell("loads", ["smol/2"])
    for started in (2, 3):
        machines.tell("started", started)
        tasks.watch_engines()
    alarm = Alarm.objects.get()
    assert alarm.message == "its process ended and was started again"
    assert Activation.objects.filter(actor=None, target__number=1).exists()


def route() -> Route:
    """What the gate is told of the deployment."""
    return feed.current_snapshot().routes["smol-chat"]


@pytest.mark.parametrize("at", ["restart", "reprobe"])
def test_what_did_not_come_back_is_brought_back(people: People, two: Deployment, at: str) -> None:
    """An alarm, and the old engine is started until it proves itself; then requests go on."""
    generation = actions.deploy(people.bob, spec(context=4096), reason="3", activate=False)
    tasks.run_build(generation.builds.get().pk)
    machines.tell("room", "swap")
    machines.tell("probe-fails", ["smol/3", "smol/2"] if at == "reprobe" else ["smol/3"])
    machines.tell("start-fails", ["smol/2"] if at == "restart" else [])
    activation = actions.activate(people.bob, "smol", 3, reason="go")
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert (activation.state, activation.phase) == ("failed", at)
    assert (route().mode, route().generation) == ("hold", 2)
    for _ in range(4):
        tasks.watch_engines()
    assert "could not be restored" in Alarm.objects.get(cleared_at=None).message
    assert not Activation.objects.filter(kind="rollback").exists()
    assert route().mode == "hold"
    machines.tell("start-fails", [])
    machines.tell("probe-fails", [])
    Replica.objects.update(restarted_at=timezone.now() - timedelta(hours=1))
    for _ in range(3):
        tasks.watch_engines()
    assert (route().mode, route().generation, len(route().replicas)) == ("open", 2, 1)
    assert list(Generation.objects.order_by("number").values_list("state", flat=True)) == [
        "retired",
        "live",
        "failed",
    ]
    assert not Alarm.objects.filter(cleared_at=None).exists()


def test_a_live_generation_without_an_engine_gets_one(two: Deployment) -> None:
    """Whatever took its replica away."""
    Replica.objects.update(state="stopped")
    Generation.objects.filter(number=2).update(state="draining")
    machines.tell("engines", {})
    for _ in range(4):
        tasks.watch_engines()
    assert (route().mode, route().generation, len(route().replicas)) == ("open", 2, 1)
    assert Generation.objects.get(number=2).state == "live"
    assert list(machines.told("engines").values()) == ["smol/2"]
    assert not Alarm.objects.filter(cleared_at=None).exists()
