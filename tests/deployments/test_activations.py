"""Activations as durable runs: overlap, swap, stop, failure, cancel, and a kill at every step."""

from __future__ import annotations

import signal

import pytest
from django.utils import timezone

from deployments import actions, tasks
from deployments.broker import feed
from deployments.jobs import activations, gates, recorder, watch
from deployments.models import (
    Activation,
    Alarm,
    AlarmKind,
    Deployment,
    Generation,
    Replica,
)
from mmadmin.core.errors import Conflict
from mmadmin.core.generations.activation import BACK_OVERLAP, BACK_SWAP, OVERLAP, SWAP, Phase
from mmadmin.core.generations.lifecycle import JobState
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
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, int]]:
    """Every route that this process tells the gates, in order, as a gate may be too slow to see."""
    real, routes = feed._to_redis, []

    def to_redis(text: str, version: int) -> None:
        for route in snapshot_from_json(text).routes.values():
            seen = (route.mode, route.generation, len(route.replicas))
            if routes[-1:] != [seen]:
                routes.append(seen)
        real(text, version)

    monkeypatch.setattr(feed, "_to_redis", to_redis)
    return routes


def test_the_first_generation_goes_live(people: People, gate: Gate) -> None:
    """Nothing was there: start, prove, route."""
    built(people)
    activation = go(people, 1)
    assert (activation.state, activation.mode, activation.error) == ("succeeded", "overlap", None)
    assert (live(), states(), running()) == (1, ["live"], ["smol/1"])
    replica = Replica.objects.get()
    assert (replica.state, replica.slots) == ("ready", 1)
    assert Generation.objects.get().report("probe_report") == {"ok": True, "whole": True}
    until(lambda: gate.routes and gate.routes[-1] == ("open", 1, 1))


def test_overlap_drains_the_old_before_it_ends(
    people: People, gate: Gate, published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old engine lives until its last request has ended, and no moment has no route."""
    looks: list[gates.GateView | None] = []
    real = gates.look
    monkeypatch.setattr(gates, "look", lambda: looks.append(real()) or looks[-1])
    built(people)
    go(people, 1)
    built(people, 4096)
    gate.inflight["smol/1"] = 1
    activation = actions.activate(people.bob, "smol", 2, reason="more")
    thread = in_thread(tasks.run_activation, activation.pk)
    until(lambda: live() == 2)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "drain")
    before = len(looks)
    until(lambda: len(looks) > before + 10)
    assert running() == ["smol/1", "smol/2"]
    gate.inflight.clear()
    thread.join(PATIENCE_S)
    assert (live(), states(), running()) == (2, ["retired", "live"], ["smol/2"])
    until(lambda: gate.routes[-1] == ("open", 2, 1))
    assert [route for route in published if route[1]] == [("open", 1, 1), ("open", 2, 1)]


def test_swap_holds_while_there_is_no_engine(people: People, gate: Gate, published) -> None:
    """Without memory for both, requests wait; the route goes from open over hold to open."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "swap")
    activation = go(people, 2)
    assert (activation.state, activation.mode) == ("succeeded", "swap")
    assert (live(), states(), running()) == (2, ["retired", "live"], ["smol/2"])
    until(lambda: gate.routes[-1] == ("open", 2, 1))
    modes = [mode for mode, generation, _ in published if generation]
    assert modes == ["open", "hold", "open"]
    assert Deployment.objects.get().hold_until is None
    stopped = machines.done().index(next(w for w in machines.done() if w.startswith("stop ")))
    started = [n for n, w in enumerate(machines.done()) if w.startswith("start smol.2")]
    assert stopped < started[0]


def test_a_swap_asks_what_decides_and_the_rest_once_it_serves(people: People, gate: Gate) -> None:
    """Held requests go on before the probes that decide nothing are asked."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "swap")
    machines.tell("hold", ["ask-rest"])
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    thread = in_thread(tasks.run_activation, activation.pk)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "examine")
    until(lambda: gate.routes[-1] == ("open", 2, 1))
    assert (live(), states()) == (2, ["retired", "live"])
    assert Generation.objects.get(number=2).report("probe_report") == {"ok": True, "whole": False}
    machines.tell("hold", [])
    thread.join()
    activation.refresh_from_db()
    assert activation.state == JobState.SUCCEEDED
    assert Generation.objects.get(number=2).report("probe_report") == {"ok": True, "whole": True}


def test_probes_stand_back_behind_clients_and_a_cancel(
    people: People, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While clients have every slot nothing is generated for us; a cancel ends the waiting only."""
    monkeypatch.setattr(activations, "ROOM_S", 3600)
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "swap")
    gate.inflight["smol/2"] = 1
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    thread = in_thread(tasks.run_activation, activation.pk)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "examine")
    actions.cancel_activation(people.bob, activation.pk)
    thread.join()
    activation.refresh_from_db()
    assert (activation.state, live()) == ("succeeded", 2)
    assert Generation.objects.get(number=2).report("probe_report") == {"ok": True, "whole": False}


def test_what_comes_after_the_flip_fails_nothing(people: People, gate: Gate) -> None:
    """The rest of the probes cannot be asked: the generation serves all the same."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "swap")
    machines.tell("ask-rest-fails", ["smol/2"])
    activation = go(people, 2)
    assert (activation.state, live()) == ("succeeded", 2)
    assert "not examined: its launch file is gone" in said(activation)


@pytest.mark.parametrize("fits", [True, False])
def test_a_dead_engine_is_not_waited_for(people: People, gate: Gate, fits: bool) -> None:
    """What the watch found dead never ends its requests: they are cut, not drained."""
    built(people)
    go(people, 1)
    built(people, 4096)
    go(people, 2)
    gate.inflight["smol/2"] = 1
    machines.tell("room", "overlap" if fits else "swap")
    deployment = Deployment.objects.get()
    Alarm.objects.create(
        deployment=deployment, generation=deployment.live, kind=AlarmKind.UNHEALTHY, subject="x"
    )
    activation = actions.rollback(people.bob, "smol", reason="2 is dead")
    tasks.run_activation(activation.pk)
    assert (live(), running()) == (1, ["smol/1"])
    assert "smol/2 is still busy after 0 s: cut" in said(activation)


def said(activation: Activation) -> str:
    """An activation's log."""
    return "".join(activation.log.values_list("text", flat=True))


@pytest.mark.parametrize("fits", [True, False])
def test_a_generation_that_does_not_prove_itself_fails(
    people: People, gate: Gate, published, fits: bool
) -> None:
    """It ends as failed, in words; the old one stayed (overlap) or is back (swap)."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "overlap" if fits else "swap")
    machines.tell("probe-fails", ["smol/2"])
    activation = go(people, 2)
    assert activation.state == JobState.FAILED
    assert activation.error["code"] == "probe_failed"
    assert (live(), states(), running()) == (1, ["live", "failed"], ["smol/1"])
    assert Generation.objects.get(number=2).state_reason == "smol/2 answers nothing (read its log)"
    until(lambda: gate.routes[-1] == ("open", 1, 1))
    assert not any(generation == 2 for _, generation, _ in published)
    machines.tell("probe-fails", [])
    assert go(people, 2).state == JobState.SUCCEEDED, "a failed one may be tried again"


def test_rollback_brings_the_earlier_one_back(people: People, gate: Gate) -> None:
    """Back to 1 without a build; the history says who, when and why."""
    built(people)
    go(people, 1)
    with pytest.raises(Conflict, match="nothing to go back to yet"):
        actions.rollback(people.bob, "smol", reason="too early")
    built(people, 4096)
    go(people, 2)
    before = len(machines.done())
    activation = actions.rollback(people.bob, "smol", reason="2 is worse")
    assert activation.target.number == 1
    tasks.run_activation(activation.pk)
    assert (live(), states(), running()) == (1, ["live", "retired"], ["smol/1"])
    did = {line.split()[0] for line in machines.done()[before:]}
    assert did == {"preflight", "start", "probe", "stop"}
    with pytest.raises(Conflict, match="no earlier generation") as caught:
        actions.rollback(people.bob, "smol", reason="further")
    assert caught.value.details["command"] == "mm rollback smol --to NUMBER"


def test_what_is_not_built_cannot_go_live(people: People) -> None:
    """It says what helps: to wait for a build that goes on, to build again what failed."""
    generation = actions.deploy(people.bob, spec(), reason="first", activate=False)
    with pytest.raises(Conflict, match="not built yet") as waits:
        actions.activate(people.bob, "smol", 1)
    assert waits.value.remedy == "wait for its build"
    actions.cancel_build(people.bob, generation.builds.get().pk)
    with pytest.raises(Conflict, match="its build failed or was cancelled") as failed:
        actions.activate(people.bob, "smol", 1)
    assert "build it again on its build's page" in failed.value.remedy
    with pytest.raises(Conflict, match="never built") as never:
        actions.rebuild(people.bob, "smol", 1)
    assert never.value.remedy == failed.value.remedy
    actions.retry_build(people.bob, generation.builds.get().pk)  # what the page's button does


def test_stop_takes_it_down(people: People, gate: Gate) -> None:
    """The route closes first, then the engine ends."""
    built(people)
    go(people, 1)
    activation = actions.stop(people.bob, "smol", reason="maintenance")
    tasks.run_activation(activation.pk)
    assert (live(), states(), running()) == (None, ["retired"], [])
    until(lambda: gate.routes[-1] == ("closed", None, 0))


@pytest.mark.parametrize("fits", [True, False])
def test_cancel_while_it_loads(people: People, gate: Gate, fits: bool) -> None:
    """Cancelled in the middle: the target is as before, the old one serves."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "overlap" if fits else "swap")
    machines.tell("hold", ["loading"])
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    thread = in_thread(tasks.run_activation, activation.pk)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "probe")
    actions.cancel_activation(people.bob, activation.pk)
    until(lambda: Activation.objects.get(pk=activation.pk).undoing)
    machines.tell("hold", [])
    thread.join(PATIENCE_S)
    activation.refresh_from_db()
    assert activation.state == JobState.CANCELLED
    assert (live(), states(), running()) == (1, ["live", "built"], ["smol/1"])
    until(lambda: gate.routes[-1] == ("open", 1, 1))


BEFORE = ("cancelled", 1, ["live", "built"], ["smol/1"])
RETURNED = ("cancelled", 1, ["live", "retired"], ["smol/1"])
TOO_LATE = ("succeeded", 2, ["retired", "live"], ["smol/2"])
CANCELS = {
    "overlap": dict(zip(OVERLAP, [BEFORE] * 3 + [RETURNED] * 2 + [TOO_LATE] * 2, strict=True)),
    "swap": dict(zip(SWAP, [BEFORE] * 6 + [TOO_LATE] * 3, strict=True)),
}
"""Job, live generation, generations and engines after a cancel in each phase."""


@pytest.mark.parametrize(("mode", "phase"), [(mode, p) for mode in CANCELS for p in CANCELS[mode]])
def test_cancel_at_each_phase(
    people: People, gate: Gate, monkeypatch: pytest.MonkeyPatch, mode: str, phase: Phase
) -> None:
    """As long as the old one can serve it does; after that it is too late, and is said to be."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", mode)
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    answers = cancel_in(people, monkeypatch, phase)
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    expected = CANCELS[mode][phase]
    assert (activation.state, live(), states(), running()) == expected
    heard = (
        "asked"
        if expected is not TOO_LATE or phase is Phase.EXAMINE
        else (f"activation {activation.pk} of smol can only be finished: smol/2 serves already")
    )
    assert answers == [heard]
    assert Deployment.objects.get().hold_until is None
    until(lambda: gate.routes[-1] == ("open", live(), 1))
    assert go(people, 1 if live() == 2 else 2).state == JobState.SUCCEEDED, "it may be tried again"


BACK = [("overlap", phase) for phase in BACK_OVERLAP] + [("swap", phase) for phase in BACK_SWAP]


@pytest.mark.parametrize(("mode", "phase"), BACK)
def test_cancel_of_one_that_goes_back(
    people: People, gate: Gate, monkeypatch: pytest.MonkeyPatch, mode: str, phase: Phase
) -> None:
    """It goes back already, and says so: neither the way nor the record's words change."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", mode)
    machines.tell("probe-fails", ["smol/2"])
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    answers = cancel_in(people, monkeypatch, phase)
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert answers == [f"activation {activation.pk} of smol is on its way back already"]
    assert (activation.state, activation.error["code"]) == ("failed", "probe_failed")
    assert (live(), states(), running()) == (1, ["live", "failed"], ["smol/1"])
    until(lambda: gate.routes[-1] == ("open", 1, 1))


def cancel_in(people: People, monkeypatch: pytest.MonkeyPatch, phase: Phase) -> list[str]:
    """Let a person cancel in the moment in which the phase has begun; what they were told."""
    answers: list[str] = []
    enter = activations.ActivationRun._enter

    def entered(run: activations.ActivationRun, now: Phase) -> None:
        enter(run, now)
        if now is not phase or answers:
            return
        try:
            actions.cancel_activation(people.bob, run.activation.pk)
        except Conflict as error:
            answers.append(error.message)
        else:
            answers.append("asked")

    monkeypatch.setattr(activations.ActivationRun, "_enter", entered)
    return answers


def test_a_return_while_the_old_one_is_busy(people: People, gate: Gate, published) -> None:
    """The old engine gets the requests again at once, and its name; the new one finishes its own."""
    built(people)
    go(people, 1)
    built(people, 4096, public_name="smol-talk")
    gate.inflight["smol/1"] = 1
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    thread = in_thread(tasks.run_activation, activation.pk)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "drain")
    assert (live(), Deployment.objects.get().public_name) == (2, "smol-talk")
    gate.inflight["smol/2"] = 1
    actions.cancel_activation(people.bob, activation.pk)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "redrain")
    assert (live(), Deployment.objects.get().public_name) == (1, "smol-chat")
    assert running() == ["smol/1", "smol/2"]
    gate.inflight["smol/2"] = 0
    thread.join(PATIENCE_S)
    activation.refresh_from_db()
    assert (activation.state, live(), states(), running()) == RETURNED
    routes = [(mode, generation) for mode, generation, _ in published if generation]
    assert routes == [("open", 1), ("open", 2), ("open", 1)]
    assert [line for line in machines.done() if line.startswith("start smol.1")][1:] == []


@pytest.mark.parametrize("why", ["no process", "found dead"])
def test_nobody_returns_to_an_engine_that_does_not_work(
    people: People, gate: Gate, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A cancel while the old one drains changes nothing then: the new one serves."""
    built(people)
    go(people, 1)
    built(people, 4096)
    if why == "no process":
        monkeypatch.setattr(machines.ToyMachine, "process", lambda *_: None)
    else:
        deployment = Deployment.objects.get()
        kind = AlarmKind.UNHEALTHY
        Alarm.objects.create(
            deployment=deployment, generation=deployment.live, kind=kind, subject="x"
        )
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    answers = cancel_in(people, monkeypatch, Phase.DRAIN)
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert answers == ["asked"]
    assert (activation.state, live(), states(), running()) == TOO_LATE


def test_a_cancel_that_came_too_late_for_a_killed_worker(
    people: People, gate: Gate, settings
) -> None:
    """The next worker finishes what serves already; it does not end as cancelled."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("suicide", ["stop"])
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    first = worker("run_activation", activation.pk, settings.HOME.root)
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    Activation.objects.filter(pk=activation.pk).update(cancel_requested_at=timezone.now())
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert (activation.state, live(), states(), running()) == TOO_LATE


def test_a_kill_on_the_way_back_from_a_drain(people: People, gate: Gate, settings) -> None:
    """SIGKILL as the new engine ends: the next worker goes on with the way back."""
    built(people)
    go(people, 1)
    built(people, 4096)
    gate.inflight["smol/1"] = 1
    machines.tell("suicide", ["stop"])
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    first = worker("run_activation", activation.pk, settings.HOME.root)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "drain")
    actions.cancel_activation(people.bob, activation.pk)
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert (activation.state, live(), states(), running()) == RETURNED


STEPS = [(True, "preflight"), (True, "start")]
STEPS += [(False, "preflight"), (False, "stop"), (False, "start")]


@pytest.mark.parametrize(("fits", "verb"), STEPS)
def test_cancel_in_the_middle_of_a_step(people: People, gate: Gate, fits: bool, verb: str) -> None:
    """Whatever is being done: it is undone, and the old one serves, by the same engine or again."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "overlap" if fits else "swap")
    machines.tell("hold", [verb])
    before = len(machines.done())
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    thread = in_thread(tasks.run_activation, activation.pk)
    until(lambda: any(line.startswith(f"{verb} ") for line in machines.done()[before:]))
    actions.cancel_activation(people.bob, activation.pk)
    machines.tell("hold", [])
    thread.join()
    activation.refresh_from_db()
    assert activation.state == JobState.CANCELLED
    assert (live(), states(), running()) == (1, ["live", "built"], ["smol/1"])
    until(lambda: gate.routes[-1] == ("open", 1, 1))


def test_cancel_while_the_old_one_drains_for_a_swap(people: People, gate: Gate) -> None:
    """Nothing was taken down yet: the held requests go on, to the same engine."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "swap")
    gate.inflight["smol/1"] = 1
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    thread = in_thread(tasks.run_activation, activation.pk)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "drain")
    actions.cancel_activation(people.bob, activation.pk)
    thread.join()
    activation.refresh_from_db()
    assert activation.state == JobState.CANCELLED
    assert (live(), states(), running()) == (1, ["live", "built"], ["smol/1"])
    assert not any(line.startswith("stop smol.1") for line in machines.done())
    until(lambda: gate.routes[-1] == ("open", 1, 1))


def test_a_cancel_that_the_recorder_has_not_seen_is_heeded_before_the_flip(
    people: People, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says so; what a thread read some time ago does not count."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("hold", ["loading"])
    monkeypatch.setattr(recorder, "TICK_S", 60.0)
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    thread = in_thread(tasks.run_activation, activation.pk)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "probe")
    actions.cancel_activation(people.bob, activation.pk)
    machines.tell("hold", [])
    thread.join(PATIENCE_S)
    activation.refresh_from_db()
    assert activation.state == JobState.CANCELLED
    assert (live(), states(), running()) == (1, ["live", "built"], ["smol/1"])


def test_one_activation_a_deployment(people: People) -> None:
    """A second one is refused while the first is queued or runs."""
    built(people)
    built(people, 4096)
    actions.activate(people.bob, "smol", 1)
    with pytest.raises(Conflict, match="another activation"):
        actions.activate(people.bob, "smol", 2)


def test_an_incomplete_closure_is_refused(people: People, gate: Gate) -> None:
    """A failed preflight starts nothing and touches nothing."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("preflight-fails", ["smol/2"])
    activation = go(people, 2)
    assert activation.state == JobState.FAILED
    assert not any(line.startswith("start smol.2") for line in machines.done())
    assert (live(), running()) == (1, ["smol/1"])


def test_a_kept_one_that_is_refused_stays_what_it_was(people: People, gate: Gate) -> None:
    """Its store was damaged: once that is mended, a roll-back finds it again."""
    built(people)
    go(people, 1)
    built(people, 4096)
    go(people, 2)
    machines.tell("preflight-fails", ["smol/1"])
    refused = actions.rollback(people.bob, "smol", reason="2 is worse")
    tasks.run_activation(refused.pk)
    refused.refresh_from_db()
    assert refused.error["message"] == "smol/1 is not complete"
    assert (refused.state, live(), states()) == ("failed", 2, ["retired", "live"])
    machines.tell("preflight-fails", [])
    again = actions.rollback(people.bob, "smol", reason="mended")
    tasks.run_activation(again.pk)
    assert (live(), states(), running()) == (1, ["live", "retired"], ["smol/1"])


def test_one_that_failed_to_come_back_is_tried_again(people: People, gate: Gate) -> None:
    """There is no other to go back to; one that has not failed comes first."""
    for number, context in enumerate((2048, 4096, 8192), 1):
        built(people, context)
        go(people, number)
    machines.tell("probe-fails", ["smol/2"])
    assert go(people, 2).state == JobState.FAILED
    deployment = Deployment.objects.get()
    assert deployment.rollback_target().number == 1
    actions.mark(people.bob, "smol", 1, "bad")
    assert deployment.rollback_target().number == 2


def test_an_auto_activated_build_goes_live(people: People, broker) -> None:
    """`activate=True`: the end of the build queues the activation."""
    generation = actions.deploy(people.bob, spec(), reason="first")
    tasks.run_build(generation.builds.get().pk)
    activation = Activation.objects.get()
    assert broker.llen("host.local") == 2
    tasks.run_activation(activation.pk)
    assert live() == 1


def test_a_build_says_why_it_was_not_activated(people: People) -> None:
    """Another activation is under way: that one goes on, and the build's log says so."""
    first = actions.deploy(people.bob, spec(), reason="first")
    tasks.run_build(first.builds.get().pk)
    second = actions.deploy(people.bob, spec(context=4096), reason="second")
    tasks.run_build(second.builds.get().pk)
    assert Activation.objects.get().target == first
    text = "".join(second.builds.get().log.values_list("text", flat=True))
    assert "not activated: another activation of smol is under way" in text


KILLS = [(fits, verb) for fits in (True, False) for verb in ("preflight", "start", "probe", "stop")]


@pytest.mark.parametrize(("fits", "verb"), KILLS)
def test_a_kill_at_every_step(people: People, gate: Gate, settings, fits: bool, verb: str) -> None:
    """SIGKILL in a phase: the next worker goes on; one engine is left, the new one, and live."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "overlap" if fits else "swap")
    machines.tell("suicide", [verb])
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    first = worker("run_activation", activation.pk, settings.HOME.root)
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    activation.refresh_from_db()
    assert activation.state == JobState.RUNNING
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert (activation.state, activation.attempts) == ("succeeded", 2)
    assert (live(), states(), running()) == (2, ["retired", "live"], ["smol/2"])
    until(lambda: gate.routes[-1] == ("open", 2, 1))


@pytest.mark.parametrize("fits", [True, False])
def test_a_kill_while_it_undoes(people: People, gate: Gate, settings, fits: bool) -> None:
    """SIGKILL on the way back: the next worker goes on with the way back."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "overlap" if fits else "swap")
    machines.tell("probe-fails", ["smol/2"])
    machines.tell("hold", ["loading"])
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    first = worker("run_activation", activation.pk, settings.HOME.root)
    until(lambda: Activation.objects.get(pk=activation.pk).phase == "probe")
    machines.tell("suicide", ["stop"])
    machines.tell("hold", [])
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    assert Activation.objects.get(pk=activation.pk).undoing
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert activation.state == JobState.FAILED
    assert activation.error["code"] == "probe_failed"
    assert (live(), states(), running()) == (1, ["live", "failed"], ["smol/1"])
    until(lambda: gate.routes[-1] == ("open", 1, 1))


@pytest.mark.parametrize("fits", [True, False])
def test_one_that_breaks_off_leaves_nothing_half_way(
    people: People, gate: Gate, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """A bug on the way back: errored, the target failed in words, and it may be tried again."""
    built(people)
    go(people, 1)
    built(people, 4096)
    machines.tell("room", "overlap" if fits else "swap")
    machines.tell("probe-fails", ["smol/2"])

    def broken(machine: machines.ToyMachine, replica: Replica) -> None:
        if replica.generation.number == 2:
            raise RuntimeError("a bug of ours")
        stop(machine, replica)

    stop = machines.ToyMachine.stop
    monkeypatch.setattr(machines.ToyMachine, "stop", broken)
    activation = go(people, 2)
    assert activation.state == JobState.ERRORED
    assert Generation.objects.get(number=2).state == "failed"
    assert "a bug of ours" in Generation.objects.get(number=2).state_reason
    monkeypatch.undo()
    machines.tell("probe-fails", [])
    assert go(people, 2).state == JobState.SUCCEEDED
    assert live() == 2


def test_one_that_kills_its_worker_goes_back(people: People, gate: Gate, settings) -> None:
    """After a few lost workers the run turns back instead of looping."""
    built(people)
    go(people, 1)
    built(people, 4096)
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    Activation.objects.filter(pk=activation.pk).update(attempts=3)
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert activation.state == JobState.FAILED
    assert "worker killed" in activation.error["message"]
    assert (live(), running()) == (1, ["smol/1"])


def test_the_watch_ends_engines_that_nobody_wants(people: People) -> None:
    """A replica of a generation that is not live and not being activated is ended."""
    generation = built(people)
    go(people, 1)
    other = built(people, 4096)
    leftover = Replica.objects.create(
        uid="leftover", generation=other, host=generation.deployment.host
    )
    with machines.ToyMachine().engines() as engines:
        engines["leftover"] = "smol/2"
    watch.watch(machines.ToyMachine())
    leftover.refresh_from_db()
    assert leftover.state == "stopped"
    assert running() == ["smol/1"]
