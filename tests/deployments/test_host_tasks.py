"""Host tasks: hub searches, collections, verifications, examinations, descriptions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from deployments import actions, queries, tasks
from deployments.jobs import host_tasks
from deployments.jobs.recorder import recording
from deployments.models import (
    AuditEvent,
    Deployment,
    Generation,
    GenerationReport,
    Host,
    HostTask,
    ReportKind,
    TaskKind,
)
from mmadmin.core.errors import Conflict, InvalidInput, NotFound, Refused
from mmadmin.core.generations.lifecycle import JobState
from tests.deployments import machines
from tests.deployments.conftest import People
from tests.deployments.specs import spec

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("toy_machine", "broker", "host"),
]


@pytest.fixture
def do(people: People) -> Callable[[str], HostTask]:
    """Ask for it and let the worker do it."""

    def done(kind: str) -> HostTask:
        job = actions.start_task(people.bob, kind)
        tasks.run_task(job.pk)
        job.refresh_from_db()
        return job

    return done


@pytest.fixture
def built(people: People) -> Generation:
    """A generation with three objects in the store."""
    generation = actions.deploy(people.bob, spec(), reason="first", activate=False)
    tasks.run_build(generation.builds.get().pk)
    generation.refresh_from_db()
    return generation


def test_a_preview_frees_nothing_and_a_collection_does(
    built: Generation, do: Callable[[str], HostTask]
) -> None:
    """What would go is said first; then it goes, and both stand in the records."""
    store = machines.ToyMachine().store()
    assert do("store-collect").result["objects"] == 0, "what is kept stays"
    Generation.objects.filter(pk=built.pk).update(state="failed", system="")
    preview = do("store-preview")
    assert preview.state == JobState.SUCCEEDED
    assert preview.result["let_go"] == [built.uid]
    assert store.object(built.system) is not None
    done = do("store-collect")
    assert done.result["objects"] == 3
    assert len(done.result["names"]) == 3
    assert done.result["freed_bytes"] > 0
    assert store.object(built.system) is None


def test_damage_is_found(built: Generation, do: Callable[[str], HostTask]) -> None:
    """The quick look sees nothing of a changed byte; reading the contents does, with progress."""
    assert do("store-verify").result["ok"] == 3
    victim = machines.ToyMachine().store().object_path(built.system) / "result"
    before = victim.stat()
    victim.chmod(0o644)
    text = victim.read_text()
    victim.write_text("X" + text[1:])
    victim.chmod(0o444)
    os.utime(victim, (before.st_atime, before.st_mtime))
    assert do("store-verify").result["corrupt"] == 0
    job = do("store-verify-contents")
    assert job.state == JobState.SUCCEEDED
    assert job.result["corrupt"] == 1
    assert job.result["damaged"][0]["name"] == built.system
    assert job.result["damaged"][0]["problems"][0]["path"] == "result"
    assert job.progress_done == job.progress_total == job.result["read_bytes"] > 0


def test_the_doctor_s_words_are_kept(people: People, do: Callable[[str], HostTask]) -> None:
    """The machine's checks and the database's, each with its remedy."""
    checks = {row["name"]: row for row in do("doctor").result["checks"]}
    assert checks["disk"]["remedy"] == "collect"
    assert checks["database"]["level"] == "ok"
    assert checks["administrator"]["fact"] == "1 active"
    people.alice.delete()
    checks = {row["name"]: row for row in do("doctor").result["checks"]}
    assert (checks["administrator"]["level"], checks["administrator"]["remedy"]) == (
        "fail",
        "run `mm up`: it makes one",
    )


def test_one_of_a_kind_at_a_time(people: People) -> None:
    """A second one is refused with a message; a cancelled one makes room."""
    first = actions.start_task(people.bob, "store-collect")
    with pytest.raises(Conflict, match="under way on local already"):
        actions.start_task(people.alice, "store-collect")
    actions.start_task(people.bob, "store-verify")
    assert actions.cancel_task(people.bob, first.pk).state == JobState.CANCELLED
    with pytest.raises(Conflict, match="has ended already"):
        actions.cancel_task(people.bob, first.pk)
    actions.start_task(people.alice, "store-collect")
    assert AuditEvent.objects.filter(verb="host.store-collect", subject="host:local").count() == 2


def test_a_verification_is_cancelled_while_it_reads(built: Generation, people: People) -> None:
    """The flag is seen at the next bytes."""
    job = actions.start_task(people.bob, "store-verify-contents")
    with recording(HostTask, job.pk) as recorder:
        assert recorder is not None
        actions.cancel_task(people.bob, job.pk)
        recorder._cancel_if_asked()
        host_tasks.run(recorder, machines.ToyMachine())
    job.refresh_from_db()
    assert (job.state, job.result) == (JobState.CANCELLED, None)


def test_who_may_and_on_what(people: People) -> None:
    """Viewers look at what was found and start nothing; hosts and kinds must exist."""
    with pytest.raises(Refused):
        actions.start_task(people.carol, "doctor")
    with pytest.raises(InvalidInput, match="not a kind of task"):
        actions.start_task(people.bob, "sweep")
    with pytest.raises(NotFound, match="no host moon"):
        actions.start_task(people.bob, "doctor", host="moon")
    Host.objects.create(name="other")
    there = actions.start_task(people.bob, "doctor", host="other")
    here = actions.start_task(people.bob, "doctor")
    assert there.host.queue == "host.other"
    found = queries.examinations(people.carol)
    assert {task.pk for task in found.values()} == {there.pk, here.pk}
    assert queries.host_tasks(people.carol) == {"doctor": here}
    assert not Deployment.objects.exists()


def test_a_hub_search_tells_what_a_repository_offers(people: People) -> None:
    """The worker searches; the result, or why there is none, is in the record."""
    found = actions.search_hub(people.bob, " https://huggingface.co/owner/name/ ")
    tasks.run_task(found.pk)
    found.refresh_from_db()
    assert (found.state, found.params["repo"]) == (JobState.SUCCEEDED, "owner/name")
    assert found.result["commit"] == "0" * 40
    gated = actions.search_hub(people.bob, "gated/model")
    tasks.run_task(gated.pk)
    gated.refresh_from_db()
    assert (gated.state, gated.error["code"]) == (JobState.FAILED, "source_gated")
    with pytest.raises(InvalidInput) as refused:
        actions.search_hub(people.bob, "not a repository")
    assert refused.value.details["field"] == "repo"


def test_two_people_search_at_once(people: People) -> None:
    """A search holds up no other, unlike work on the store."""
    first, second = (actions.search_hub(who, "owner/name") for who in (people.bob, people.alice))
    assert first.pk != second.pk


def test_reports_are_made_again(built: Generation, people: People) -> None:
    """For a generation of an earlier version; the task says who made them."""
    GenerationReport.objects.all().delete()
    task = actions.start_task(people.bob, "describe", generation=built.uid)
    tasks.run_task(task.pk)
    task.refresh_from_db()
    assert task.result == {"reports": ["command", "template"]}
    made = GenerationReport.objects.get(kind=ReportKind.COMMAND)
    assert (made.content, made.made_by) == (["engine", built.system], f"task {task.pk}")


@pytest.mark.parametrize(
    ("kind", "more", "field"),
    [
        ("describe", {}, "generation"),
        ("describe", {"generation": "smol"}, "generation"),
        ("doctor", {"generation": "smol/1"}, "generation"),
        ("doctor", {"params": {"deep": True}}, "params"),
        ("hub-search", {"params": {"repo": "a/b", "deep": True}}, "params"),
    ],
)
def test_what_a_kind_does_not_take_is_refused(
    people: People, kind: str, more: dict[str, Any], field: str
) -> None:
    """By name, before anything is queued."""
    with pytest.raises(InvalidInput) as refused:
        actions.start_task(people.bob, kind, **more)
    assert refused.value.details["field"] == field
    assert not HostTask.objects.exists()


def test_a_task_s_lines_are_kept(people: People, host: Host) -> None:
    """Like those of every other job."""
    task = actions.start_task(people.bob, "doctor")
    with recording(HostTask, task.pk) as recorder:
        assert recorder is not None
        recorder.log("looking at the disk")
    lines = queries.build_log(people.carol, task_id=task.pk)
    assert [chunk.text for chunk in lines] == ["looking at the disk\n"]


def test_every_kind_is_done_by_a_function() -> None:
    """A kind without one would fail only once somebody asked for it."""
    assert set(host_tasks.FUNCTIONS) == set(TaskKind)
