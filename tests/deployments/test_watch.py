"""The watch: leftovers end, drift is told, the dead are restarted or rolled back."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from deployments import actions, tasks
from deployments.jobs import gates
from deployments.models import Activation, Alarm, AuditEvent, Deployment, Replica, UsageEvent
from mmadmin.core.lifecycle import JobState
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
    """How many restarts there were."""
    return sum(line.startswith("restart ") for line in machines.done())


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
