"""What is of use for days only goes by its age; history stays."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from deployments import actions, tasks
from deployments.jobs import prune
from deployments.models import (
    AuditEvent,
    Build,
    BuildStep,
    ClientKey,
    Generation,
    Host,
    HostTask,
    LogChunk,
    Session,
    UsageEvent,
)
from mmadmin.core.generations.lifecycle import JobState
from tests.deployments.conftest import People
from tests.deployments.specs import spec

pytestmark = pytest.mark.django_db(transaction=True)


def test_old_rows_go_and_young_ones_stay(people: People, host: Host) -> None:
    """Each kind at its own age, however often it is looked at."""
    now = timezone.now()
    plan = {"dry_run": True, "spec_toml": spec()}
    rows = [
        (HostTask, prune.SEARCHES_KEPT, {"kind": "hub-search"}),
        (HostTask, prune.TASKS_KEPT, {"kind": "store-verify"}),
        (Build, prune.PLANS_KEPT, plan),
    ]
    for model, age, more in rows:
        for past in (age + timedelta(minutes=1), age - timedelta(minutes=1), timedelta(0)):
            job = model.objects.create(
                host=host, state=JobState.SUCCEEDED, ended_at=now - past, **more
            )
            if isinstance(job, Build):
                step = BuildStep.objects.create(build=job, position=0, derivation="0" * 64)
                LogChunk.objects.create(build=job, step=step, text="a line\n")
    assert prune.prune(now) == {"sessions": 0, "hub searches": 1, "host tasks": 1, "plans": 1}
    left = [model.objects.count() for model in (HostTask, Build, BuildStep, LogChunk)]
    assert left == [4, 2, 2, 2]
    assert not any(prune.prune(now).values())


def test_the_newest_task_of_a_kind_stays_whatever_its_age(people: People, host: Host) -> None:
    """The pages of hosts and store show it; what has not ended stays as well."""
    long_ago = timezone.now() - timedelta(days=400)
    other = Host.objects.create(name="other")
    ended = {"state": JobState.FAILED, "ended_at": long_ago}
    HostTask.objects.create(host=host, kind="store-collect", **ended)
    kept = {
        HostTask.objects.create(host=host, kind="store-collect", **ended),
        HostTask.objects.create(host=host, kind="doctor", **ended),
        HostTask.objects.create(host=other, kind="store-collect", **ended),
        HostTask.objects.create(host=host, kind="store-verify", created_at=long_ago),
    }
    kept.add(HostTask.objects.create(host=host, kind="hub-search", created_at=long_ago))
    assert prune.prune()["host tasks"] == 1
    assert set(HostTask.objects.all()) == kept


def test_expired_logins_go_by_the_timer(people: People) -> None:
    """The present ones stay; the task does what the timer asks for."""
    here, gone = Client(), Client()
    here.force_login(people.bob)
    gone.force_login(people.bob)
    Session.objects.filter(session_key=gone.session.session_key).update(
        expire_date=timezone.now() - timedelta(seconds=1)
    )
    tasks.prune_rows()
    assert [row.session_key for row in Session.objects.all()] == [here.session.session_key]


@pytest.mark.usefixtures("toy_machine")
def test_history_is_never_touched(people: People) -> None:
    """A generation with its build and lines, a revoked key, audit and usage: years old, all there."""
    generation = actions.deploy(people.bob, spec(), reason="first", activate=False)
    tasks.run_build(generation.builds.get().pk)
    key, _ = actions.issue_key(people.alice, owner="Dora")
    actions.revoke_key(people.alice, key.key_id)
    UsageEvent.objects.create(id="req-1", at=timezone.now(), status=200)
    history = (Generation, Build, BuildStep, LogChunk, ClientKey, AuditEvent, UsageEvent)
    before = [model.objects.count() for model in history]
    assert all(before)
    prune.prune(timezone.now() + timedelta(days=3650))
    assert [model.objects.count() for model in history] == before
