"""Builds as jobs: lease, fence, kill, cancel, retry, the record of what happened."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import OperationalError, connections
from django.utils import timezone

from deployments import actions, queries, tasks
from deployments.jobs import lease, sweeper
from deployments.jobs.recorder import recording
from deployments.models import Build, BuildStep, Generation, LogChunk, StepState, Transition
from mmadmin.core.errors import Conflict, LeaseLost
from mmadmin.core.generations.lifecycle import GenerationState, JobState
from mmadmin.core.home import Home
from tests.deployments import machines
from tests.deployments.conftest import People, use_broker
from tests.deployments.processes import PATIENCE_S, until, worker
from tests.deployments.specs import spec

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.database,
    pytest.mark.usefixtures("toy_machine"),
]


def deployed(people: People, **kwargs: object) -> tuple[Generation, Build]:
    """A first generation and its build."""
    kwargs = {"activate": False} | kwargs
    generation = actions.deploy(people.bob, spec(), reason="first", **kwargs)
    return generation, generation.builds.get()


def test_a_build_ends_with_a_system(people: People) -> None:
    """A build locks, plans, builds each step once, and leaves a system with its history."""
    generation, build = deployed(people)
    tasks.run_build(build.pk)
    build.refresh_from_db()
    generation.refresh_from_db()
    assert (build.state, build.attempts, build.error) == (JobState.SUCCEEDED, 1, None)
    assert generation.state == GenerationState.BUILT
    assert generation.lock
    assert generation.graph
    assert generation.host_facts
    store = machines.ToyMachine().store()
    assert store.object(generation.system) is not None
    assert [root.key for root in store.roots()] == ["smol/1"]
    steps = list(build.steps.values_list("recipe", "state"))
    assert sorted(steps) == [
        ("toy-engine", StepState.BUILT),
        ("toy-model", StepState.BUILT),
        ("toy-system", StepState.BUILT),
    ]
    assert "building toy-engine" in "".join(LogChunk.objects.values_list("text", flat=True))
    moves = list(Transition.objects.values_list("before", "after"))
    assert moves == [("", "planned"), ("planned", "building"), ("building", "built")]


def test_what_the_patches_change_is_kept(people: People) -> None:
    """The template's report stays with the generation, so that its page needs no store."""
    report = {"format": 1, "changes": ["a default"], "rows": []}
    machines.tell("rendering", report)
    generation, build = deployed(people)
    tasks.run_build(build.pk)
    generation.refresh_from_db()
    assert generation.report("rendering") == report


def test_a_second_generation_builds_only_what_changed(people: People) -> None:
    """The planner's word and the record agree: two steps cached, one built."""
    _, build = deployed(people)
    tasks.run_build(build.pk)
    second = actions.deploy(people.bob, spec(context=4096), reason="more", activate=False)
    tasks.run_build(second.builds.get().pk)
    again = second.builds.get()
    assert again.plan["cached"] == 2
    states = dict(again.steps.values_list("recipe", "state"))
    assert states == {"toy-engine": "cached", "toy-model": "cached", "toy-system": "built"}


def test_a_dry_run_changes_nothing(people: People) -> None:
    """A plan holds the steps, and there is neither generation nor object."""
    build = actions.plan(people.bob, spec())
    tasks.run_build(build.pk)
    build.refresh_from_db()
    assert build.state == JobState.SUCCEEDED
    assert build.plan["build"] == 3
    assert not Generation.objects.exists()
    assert not list(machines.ToyMachine().store().objects())


def test_what_will_fit_is_said_before_the_build(people: People) -> None:
    """The forecast's words are in the build's log, its data with the plan."""
    machines.tell("pinned", ["toy-model"])
    machines.tell("forecast", [["it fits on GPU 0"], [{"host": "local", "ok": True}]])
    _, build = deployed(people)
    tasks.run_build(build.pk)
    build.refresh_from_db()
    assert build.plan["fit"] == [{"host": "local", "ok": True}]
    text = "".join(c.text for c in queries.build_log(people.carol, build_id=build.pk))
    assert "locking the sources" in text
    assert "it fits on GPU 0" in text
    assert text.index("it fits on GPU 0") < text.index("building toy-engine")


def test_a_failed_step_fails_in_words(people: People) -> None:
    """Step, build and generation say what failed and what to do; a retry is a new build."""
    generation, build = deployed(people)
    machines.tell("fail", ["toy-model"])
    tasks.run_build(build.pk)
    build.refresh_from_db()
    generation.refresh_from_db()
    assert build.state == JobState.FAILED
    assert build.error["message"] == "toy-model cannot be built"
    assert generation.state == GenerationState.FAILED
    assert generation.state_reason == "toy-model cannot be built (mend it)"
    assert build.steps.get(recipe="toy-model").state == StepState.FAILED
    machines.tell("fail", [])
    again = actions.retry_build(people.bob, build.pk)
    tasks.run_build(again.pk)
    generation.refresh_from_db()
    assert generation.state == GenerationState.BUILT
    build.refresh_from_db()
    assert build.state == JobState.FAILED


def test_a_bug_is_errored_and_logged(people: People, caplog) -> None:
    """What is not an expected failure has a traceback in the log and another state."""
    _, build = deployed(people)
    machines.tell("bug", ["toy-model"])
    tasks.run_build(build.pk)
    build.refresh_from_db()
    assert build.state == JobState.ERRORED
    assert "ZeroDivisionError" in build.error["message"]
    assert "Traceback" in caplog.text


def test_a_killed_worker_is_followed_by_another(people: People, settings) -> None:
    """SIGKILL in a step: the next worker takes over at once, and each object exists once."""
    generation, build = deployed(people)
    machines.tell("hold", ["toy-model"])
    first = worker("run_build", build.pk, settings.HOME.root)
    until(lambda: any(line.startswith("begin toy-model") for line in machines.done()))
    until(lambda: BuildStep.objects.filter(recipe="toy-model", progress_done=1).exists())
    first.send_signal(signal.SIGKILL)
    first.wait()
    machines.tell("hold", [])
    tasks.run_build(build.pk)  # the same message, delivered again
    build.refresh_from_db()
    generation.refresh_from_db()
    assert (build.state, build.attempts) == (JobState.SUCCEEDED, 2)
    assert generation.state == GenerationState.BUILT
    ends = [line.split()[1] for line in machines.done() if line.startswith("end")]
    assert sorted(ends) == ["toy-engine", "toy-model", "toy-system"]
    assert machines.done().count("resolve") == 1
    store = machines.ToyMachine().store()
    assert len(list(store.objects())) == 3
    until(lambda: store.sweep() or not list(store.layout.staging.iterdir()))


def test_two_deliveries_at_once_build_once(people: People, settings) -> None:
    """The second worker sees the lease and leaves."""
    _, build = deployed(people)
    machines.tell("hold", ["toy-engine"])
    first = worker("run_build", build.pk, settings.HOME.root)
    until(lambda: "begin toy-engine" in " ".join(machines.done()))
    second = worker("run_build", build.pk, settings.HOME.root)
    assert second.wait(PATIENCE_S) == 0
    assert first.poll() is None
    machines.tell("hold", [])
    assert first.wait(PATIENCE_S) == 0
    build.refresh_from_db()
    assert (build.state, build.attempts) == (JobState.SUCCEEDED, 1)
    assert sum(line.startswith("begin toy-engine") for line in machines.done()) == 1


def test_claims_at_a_barrier(people: People) -> None:
    """Of eight claims at the same moment, one wins, and the fence counts once."""
    _, build = deployed(people)
    barrier = threading.Barrier(8)
    won: list[object] = []

    def claim() -> None:
        barrier.wait()
        try:
            won.append(lease.claim(Build, build.pk))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(job is not None for job in won) == 1
    build.refresh_from_db()
    assert (build.fence, build.attempts) == (1, 1)


def test_a_job_that_kills_its_worker_ends_as_failed(people: People, settings) -> None:
    """Attempts are counted and capped: it neither loops nor is lost."""
    generation, build = deployed(people)
    machines.tell("suicide", ["toy-engine"])
    for _ in range(3):
        assert worker("run_build", build.pk, settings.HOME.root).wait(PATIENCE_S) == -9
    Build.objects.update(enqueued_at=timezone.now() - timedelta(minutes=5))
    sweeper.sweep()
    build.refresh_from_db()
    generation.refresh_from_db()
    assert (build.state, build.attempts) == (JobState.FAILED, 3)
    assert build.error["message"] == "worker killed (likely out of memory)"
    assert generation.state == GenerationState.FAILED
    assert "worker killed" in generation.state_reason


def test_a_cancelled_build_stops(people: People) -> None:
    """Cancel of a running build ends its step, and the record names who did it."""
    generation, build = deployed(people)
    machines.tell("hold", ["toy-model"])
    thread = threading.Thread(target=_in_thread, args=(build.pk,))
    thread.start()
    until(lambda: "begin toy-model" in " ".join(machines.done()))
    actions.cancel_build(people.bob, build.pk)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    build.refresh_from_db()
    generation.refresh_from_db()
    assert build.state == JobState.CANCELLED
    assert generation.state == GenerationState.FAILED
    assert build.steps.get(recipe="toy-model").state == StepState.CANCELLED
    assert not list(machines.ToyMachine().store().layout.staging.iterdir())
    assert generation.transitions.last().actor == people.bob


def sharing(people: People) -> tuple[Build, Build, threading.Thread]:
    """Two builds that need the same engine: the first makes it (and holds), the second waits."""
    _, first = deployed(people)
    second = actions.deploy(people.bob, spec(context=4096), reason="x", activate=False)
    machines.tell("hold", ["toy-engine"])
    holder = threading.Thread(target=_in_thread, args=(first.pk,))
    holder.start()
    until(lambda: "begin toy-engine" in " ".join(machines.done()))
    return first, second.builds.get(), holder


def test_a_build_says_whose_step_it_waits_for(people: People) -> None:
    """Phase, step and log name the build that makes the step; then it is cached as ever."""
    first, second, holder = sharing(people)
    waiter = threading.Thread(target=_in_thread, args=(second.pk,))
    waiter.start()
    engine = BuildStep.objects.filter(build=second, recipe="toy-engine")
    try:
        until(lambda: engine.exclude(waits_for="").exists())
        step = engine.get()
        words = f"waits for build {first.pk} of smol/1"
        assert (step.state, step.message, step.started_at) == (StepState.WAITING, words, None)
        second.refresh_from_db()
        assert (second.state, second.phase) == (JobState.RUNNING, "waiting")
    finally:
        machines.tell("hold", [])
        holder.join(PATIENCE_S)
        waiter.join(PATIENCE_S)
    second.refresh_from_db()
    step = engine.get()
    assert (second.state, second.phase) == (JobState.SUCCEEDED, "building")
    assert (step.state, step.waits_for) == (StepState.CACHED, "")
    assert step.message == f"made meanwhile by build {first.pk} of smol/1"
    text = "".join(step.log.values_list("text", flat=True))
    assert text == f"{words}\nbuild {first.pk} of smol/1 has made it\n"
    assert sum(line.startswith("begin toy-engine") for line in machines.done()) == 1


def test_a_build_that_waits_for_another_can_be_cancelled(people: People) -> None:
    """It ends while the other one still builds, and its step with it."""
    first, second, holder = sharing(people)
    waiter = threading.Thread(target=_in_thread, args=(second.pk,))
    waiter.start()
    engine = BuildStep.objects.filter(build=second, recipe="toy-engine")
    try:
        until(lambda: engine.exclude(waits_for="").exists())
        actions.cancel_build(people.bob, second.pk)
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
        assert holder.is_alive()
        second.refresh_from_db()
        first.refresh_from_db()
        assert (second.state, first.state) == (JobState.CANCELLED, JobState.RUNNING)
        step = engine.get()
        assert (step.state, step.waits_for) == (StepState.CANCELLED, "")
    finally:
        machines.tell("hold", [])
        holder.join(PATIENCE_S)
        waiter.join(PATIENCE_S)
    first.refresh_from_db()
    assert first.state == JobState.SUCCEEDED


def test_a_build_that_waits_heeds_the_loss_of_its_lease(people: People) -> None:
    """Another worker has the job: the wait ends, and nothing more is written."""
    _, second, holder = sharing(people)
    waiter = threading.Thread(target=_in_thread, args=(second.pk,))
    waiter.start()
    engine = BuildStep.objects.filter(build=second, recipe="toy-engine")
    try:
        until(lambda: engine.exclude(waits_for="").exists())
        Build.objects.filter(pk=second.pk).update(fence=7, holder="elsewhere:1:1:x")
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
        assert holder.is_alive()
        second.refresh_from_db()
        assert (second.state, second.fence) == (JobState.RUNNING, 7)
        assert engine.get().state == StepState.WAITING
    finally:
        machines.tell("hold", [])
        holder.join(PATIENCE_S)
        waiter.join(PATIENCE_S)


def _in_thread(build_id: int) -> None:
    try:
        tasks.run_build(build_id)
    finally:
        connections.close_all()


def test_a_cancelled_queued_build_never_starts(people: People) -> None:
    """Cancel before a worker took it: the message that comes later does nothing."""
    generation, build = deployed(people)
    actions.cancel_build(people.bob, build.pk)
    tasks.run_build(build.pk)
    assert machines.done() == []
    generation.refresh_from_db()
    assert generation.state == GenerationState.FAILED
    with pytest.raises(Conflict):
        actions.cancel_build(people.bob, build.pk)


def test_a_lost_lease_writes_nothing_more(people: People) -> None:
    """A worker that comes back after its lease went to another one is fenced off."""
    _, build = deployed(people)
    with recording(Build, build.pk) as recorder:
        assert recorder is not None
        Build.objects.filter(pk=build.pk).update(
            lease_expires_at=timezone.now() - timedelta(seconds=1), holder="elsewhere:1:1"
        )
        taken = lease.claim(Build, build.pk)
        assert taken is not None
        assert taken.fence == 2
        with pytest.raises(LeaseLost):
            recorder.phase("building")
        recorder.log("a late word", 1)
        until(recorder.cancelled)
    build.refresh_from_db()
    assert (build.state, build.phase, build.fence) == (JobState.RUNNING, "", 2)
    assert not LogChunk.objects.exists()


def test_a_holder_is_dead_only_when_its_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is put right kills nobody; another boot, start or pid does."""
    mine = lease.me()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1.0)
    assert not lease.is_dead(mine)
    assert len(mine) <= Build._meta.get_field("holder").max_length
    host, pid, started, boot = mine.split(":")
    assert lease.is_dead(f"{host}:{pid}:{int(started) + 1}:{boot}")
    assert lease.is_dead(f"{host}:{pid}:{started}:another-boot")
    assert lease.is_dead(f"{host}:{2**22 + 1}:{started}:{boot}")
    for unknown in ("elsewhere:1:1:x", f"{host}:{pid}:12.34", "", f"{host}:x:y:z"):
        assert not lease.is_dead(unknown)


def test_the_heartbeat_keeps_the_lease(people: People, monkeypatch) -> None:
    """While the job runs its lease does not end."""
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.1)
    _, build = deployed(people)
    with recording(Build, build.pk):
        before = Build.objects.get(pk=build.pk).lease_expires_at
        until(lambda: Build.objects.get(pk=build.pk).lease_expires_at > before)


def test_the_sweeper_sends_what_was_never_sent(people: People, broker, monkeypatch) -> None:
    """An enqueue lost to a broker that was down is made up for."""
    monkeypatch.setattr(sweeper, "UNSENT_AFTER_S", 3600)
    from mmadmin.celery import app

    good = app.conf.broker_url
    use_broker("redis+socket:///nonexistent/broker.sock")
    _, build = deployed(people)
    build.refresh_from_db()
    assert build.enqueued_at is None
    use_broker(good)
    assert sweeper.sweep() == 0, "a fresh row may still be on its way"
    Build.objects.update(created_at=timezone.now() - timedelta(hours=2))
    assert sweeper.sweep() == 1
    assert broker.llen("host.local") == 1
    build.refresh_from_db()
    assert build.enqueued_at is not None
    assert sweeper.sweep() == 0


def test_builds_wait_for_a_slot(people: People, settings) -> None:
    """More builds than slots: the rest waits in the queue."""
    settings.BUILDS_AT_ONCE = 1
    _, first = deployed(people)
    assert lease.claim(Build, first.pk) is not None
    second = actions.deploy(people.bob, spec(context=4096), reason="x", activate=False)
    waiting = second.builds.get()
    assert lease.claim(Build, waiting.pk) is None
    assert waiting.crowded_out_by() == 1
    lease.end(Build.objects.get(pk=first.pk), JobState.SUCCEEDED)
    assert waiting.crowded_out_by() == 0
    assert lease.claim(Build, waiting.pk) is not None


def test_an_import_is_a_built_generation(people: People) -> None:
    """Its records come from elsewhere, its objects are here: it may go live without a build."""
    made, build = deployed(people)
    tasks.run_build(build.pk)
    made.refresh_from_db()
    brought = actions.import_generation(
        people.bob,
        spec_toml=made.spec_toml,
        lock=made.lock,
        graph=made.graph,
        system=made.system,
        reason="from the other host",
        reports={"template": "{{ x }}", "needs": {"of": "another machine"}, "number": 1},
    )
    assert [row.kind for row in brought.reports.all()] == ["template"]
    assert (brought.number, brought.state) == (2, GenerationState.BUILT)
    assert not brought.builds.exists()
    assert actions.activate(people.bob, "smol", 2).target == brought


def test_an_earlier_generation_is_made_again_on_an_empty_store(
    people: People, settings, tmp_path: Path
) -> None:
    """From its own record, on a host that is another one now: the same hashes, the same state."""
    generation, build = deployed(people)
    tasks.run_build(build.pk)
    generation.refresh_from_db()
    settings.HOME = Home(tmp_path / "elsewhere")
    machines.tell("facts", {"compiler": "gcc-99"})
    assert machines.ToyMachine().store().object(generation.system) is None
    again = actions.rebuild(people.bob, "smol", 1)
    tasks.run_build(again.pk)
    again.refresh_from_db()
    assert (again.state, again.error) == (JobState.SUCCEEDED, None)
    assert machines.ToyMachine().store().object(generation.system) is not None
    before, recorded = generation.state, generation.host_facts
    generation.refresh_from_db()
    assert (generation.state, generation.host_facts) == (before, recorded)
    machines.tell("other", value=True)
    settings.HOME = Home(tmp_path / "third")
    machines.tell("other", value=True)
    differs = actions.rebuild(people.bob, "smol", 1)
    tasks.run_build(differs.pk)
    differs.refresh_from_db()
    assert differs.error["code"] == "digest_mismatch"


def test_a_database_that_goes_away_ends_nothing(people: People, monkeypatch) -> None:
    """The job is not failed for it: the lease ends, and the next worker goes on."""
    generation, build = deployed(people)
    real = machines.ToyMachine.describe

    def gone(self: object, system: str, spec: object) -> object:
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(machines.ToyMachine, "describe", gone)
    tasks.run_build(build.pk)
    build.refresh_from_db()
    assert (build.state, build.error) == (JobState.RUNNING, None)
    monkeypatch.setattr(machines.ToyMachine, "describe", real)
    tasks.run_build(build.pk)
    build.refresh_from_db()
    assert build.state == JobState.RUNNING, "its lease is not over yet"
    Build.objects.update(lease_expires_at=timezone.now() - timedelta(seconds=1))
    tasks.run_build(build.pk)
    generation.refresh_from_db()
    assert generation.state == GenerationState.BUILT
