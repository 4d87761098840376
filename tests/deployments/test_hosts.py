"""A host's name belongs to one machine and home; one that is away is noticed."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from deployments import actions, queries, tasks
from deployments.broker import feed
from deployments.jobs import gates, hosts
from deployments.models import Alarm, Build, Deployment, Host, Replica
from mmadmin.core.errors import Conflict, InvalidSpec
from mmadmin.core.generations.lifecycle import JobState
from mmadmin.core.home import Home
from mmadmin.host.broker_health import broker_problem
from tests.deployments import machines
from tests.deployments.conftest import People
from tests.deployments.specs import spec

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("toy_machine", "broker"),
]


@pytest.fixture
def one(people: People, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """A deployment whose first generation is live, on a host that reports."""
    monkeypatch.setattr(gates, "QUIET_S", 0)
    hosts.register(machines.FACTS)
    generation = actions.deploy(people.bob, spec(), reason="go")
    tasks.run_build(generation.builds.get().pk)
    tasks.run_activation(generation.activations.get().pk)
    return Deployment.objects.get(live__number=1)


def later(**by: int) -> None:
    """The host reported this long ago."""
    Host.objects.update(seen_at=timezone.now() - timedelta(**by))


def second(tmp_path) -> Home:
    """Another installation."""
    folder = tmp_path / "second"
    folder.mkdir()
    return Home(folder)


def test_a_second_holder_of_a_name_is_refused(settings, tmp_path) -> None:
    """By name, place and remedy; it may have the name once the first gave it back or died."""
    other, first = second(tmp_path), settings.HOME
    hosts.register(machines.FACTS)
    with pytest.raises(Conflict) as refused:
        hosts.take(other)
    assert "`local`" in refused.value.message
    assert str(first.root) in refused.value.message
    assert "MM_HOST_NAME" in refused.value.remedy
    hosts.take(first)  # the same one again, after a restart
    hosts.give_back(first)
    hosts.take(other)
    hosts.give_back(first)  # no longer its own to give
    Host.objects.update(seen_at=timezone.now())
    with pytest.raises(Conflict):
        hosts.register(machines.FACTS)
    later(minutes=10)
    hosts.register(machines.FACTS)
    assert hosts.identity(first) in Host.objects.get().holder


def test_a_moved_home_keeps_its_name(settings, tmp_path) -> None:
    """The holder is the installation on its machine, not a path."""
    hosts.register(machines.FACTS)
    place = tmp_path.parent / f"{tmp_path.name}-moved"
    tmp_path.rename(place)
    hosts.take(Home(place))
    assert Host.objects.get().holder_place.endswith("-moved")
    place.rename(tmp_path)


def test_a_worker_without_the_name_ends_before_any_job(settings, tmp_path) -> None:
    """It says why, and does not start."""
    hosts.take(second(tmp_path))
    Host.objects.update(seen_at=timezone.now())
    with pytest.raises(SystemExit, match="held by another worker"):
        tasks._before_the_fork()


def test_a_host_that_is_away_is_noticed(one: Deployment, people: People) -> None:
    """An alarm and another state while its worker does not report; neither once it does."""
    tasks.sweep()
    assert not Alarm.objects.exists()
    assert queries.deployment(people.carol, "smol").state == "live"
    later(minutes=4)
    tasks.sweep()
    tasks.sweep()
    alarm = Alarm.objects.get(cleared_at=None)
    assert (alarm.kind, alarm.subject) == ("host", "host")
    assert queries.deployment(people.carol, "smol").state == "host away"
    hosts.register(machines.FACTS)
    tasks.sweep()
    assert not Alarm.objects.filter(cleared_at=None).exists()


def test_a_host_without_an_address_is_refused(people: People) -> None:
    """The gate could not reach its engines."""
    Host.objects.create(name="hostb")
    with pytest.raises(InvalidSpec, match="no address"):
        actions.deploy(people.bob, f'host = "hostb"\n{spec()}', reason="x")


def starts() -> list[str]:
    """The starts of engines so far."""
    return [line for line in machines.done() if line.startswith("start ")]


def test_missing_bytes_raise_an_alarm_until_they_are_back(
    one: Deployment, people: People, settings
) -> None:
    """After a restore without the store: told, not started again and again; then it serves."""
    hosts.forget_place()
    machines.tell("engines", {})
    objects = settings.HOME.store / "objects"
    objects.rename(settings.HOME.store / "away")
    for _ in range(3):
        tasks.watch_engines()
    alarm = Alarm.objects.get(cleared_at=None)
    assert (alarm.kind, alarm.generation.number) == ("bytes", 1)
    assert "mm rebuild --live" in alarm.message
    assert queries.deployment(people.carol, "smol").state == "bytes missing"
    assert len(starts()) == 1, "by the activation"
    (settings.HOME.store / "away").rename(objects)
    for _ in range(2):
        tasks.watch_engines()
    assert not Alarm.objects.filter(cleared_at=None).exists()
    assert queries.deployment(people.carol, "smol").state == "live"


def test_engines_and_jobs_of_the_old_place_are_taken_for_ended(
    one: Deployment, people: People
) -> None:
    """The new engine has another name, and so another secret; what was under way has failed."""
    before = Replica.objects.get().uid
    build = actions.plan(people.bob, spec(context=4096))
    hosts.forget_place()
    assert Build.objects.get(pk=build.pk).state == JobState.FAILED
    assert Host.objects.get().holder == ""
    machines.tell("engines", {})
    for _ in range(2):
        tasks.watch_engines()
    fresh = Replica.objects.get(state="ready")
    assert fresh.uid != before
    assert not Alarm.objects.filter(cleared_at=None).exists()


def test_a_broker_that_refuses_writes_is_noticed(settings) -> None:
    """It answers PING as if all were well; jobs wait meanwhile."""
    client = feed.client()
    assert broker_problem(settings.REDIS_URL) is None
    client.config_set("maxmemory", 1)
    try:
        problem = broker_problem(settings.REDIS_URL)
    finally:
        client.config_set("maxmemory", 0)
    assert problem is not None
    assert problem.answers
    assert "maxmemory" in problem.fact


def test_the_sweep_tells_when_it_ran(one: Deployment) -> None:
    """What the doctor looks at."""
    feed.client().delete(feed.SWEPT_KEY)
    assert feed.swept_at() == 0
    tasks.sweep()
    assert 0 <= time.time() - feed.swept_at() < 60
