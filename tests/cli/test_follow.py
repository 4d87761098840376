"""Watching jobs from the command line: what is said while the records change."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.utils import timezone

from deployments.models import (
    Activation,
    Build,
    BuildStep,
    Deployment,
    Generation,
    Host,
    Role,
    User,
)
from mmadmin.cli import follow
from mmadmin.core.errors import Cancelled, DiskFull, MmError, StepFailed
from mmadmin.core.generations.lifecycle import JobState

pytestmark = pytest.mark.django_db


@pytest.fixture
def build() -> Build:
    """A queued build of a first generation that is to go live."""
    host = Host.objects.create(name="local")
    alice = User.objects.create_user("alice", role=Role.OPERATOR)
    deployment = Deployment.objects.create(name="tiny", public_name="tiny", host=host)
    generation = Generation.objects.create(
        deployment=deployment, number=1, spec_toml="", author=alice
    )
    return Build.objects.create(
        deployment=deployment, generation=generation, host=host, spec_toml="", activate_after=True
    )


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What happens between one look at the records and the next, instead of sleeping."""
    acts: list[Callable[[], object]] = []
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += 5
        if acts:
            acts.pop(0)()

    fake = SimpleNamespace(sleep=sleep, monotonic=lambda: clock.now)
    monkeypatch.setattr(follow, "time", fake)
    return acts


def states(job: Build | Activation, state: JobState, **more: object) -> Callable[[], object]:
    """An act: the job's row gets this state."""
    return lambda: type(job).objects.filter(pk=job.pk).update(state=state, **more)


def test_a_build_is_told_step_by_step(build: Build, script: list, capsys) -> None:
    """Waiting, each step's state as it changes, progress of a long one; then quiet success."""

    def begin() -> None:
        states(build, JobState.RUNNING, phase="building")()
        for n, (recipe, state) in enumerate([("fetch", "cached"), ("merge", "running")]):
            BuildStep.objects.create(
                build=build, position=n, derivation=f"{n:064d}", name="m", recipe=recipe,
                state=state, why="pinned content is in the store",
                progress_done=5, progress_total=10, progress_unit="bytes",
            )  # fmt: skip

    def end() -> None:
        BuildStep.objects.filter(recipe="merge").update(state="built")
        states(build, JobState.SUCCEEDED)()

    script += [begin, lambda: None, lambda: None, end]
    follow.follow_build(build.pk)
    said = capsys.readouterr().out
    assert f"build {build.pk} waits for a worker" in said
    assert "= fetch m  cached: pinned content is in the store" in said
    assert said.count("▸ merge m") == 2, "again after ten seconds"
    assert "5 B of 10 B" in said
    assert "✓ merge m" in said


def test_a_step_that_another_build_makes_is_told(build: Build, script: list, capsys) -> None:
    """It is not shown as running: whom it waits for, then that it is there."""

    def wait() -> None:
        states(build, JobState.RUNNING, phase="waiting")()
        BuildStep.objects.create(
            build=build, position=0, derivation="0" * 64, name="llama.cpp",
            recipe="build-engine", waits_for="build 3 of other/1", why="its inputs are new",
        )  # fmt: skip

    def end() -> None:
        BuildStep.objects.update(state="cached", waits_for="", why="made by build 3 of other/1")
        states(build, JobState.SUCCEEDED)()

    script += [wait, lambda: None, end]
    follow.follow_build(build.pk)
    said = capsys.readouterr().out
    words = "· build-engine llama.cpp  waits for build 3 of other/1"
    assert said.count(words) == 1
    assert "= build-engine llama.cpp  cached: made by build 3 of other/1" in said
    assert "▸" not in said


def test_a_build_that_finds_no_place_says_so(build: Build, script: list, capsys, settings) -> None:
    """Where others take every place, no worker is missed, however long it waits."""
    settings.BUILDS_AT_ONCE = 1
    other = Build.objects.create(
        host=build.host,
        spec_toml="",
        state=JobState.RUNNING,
        lease_expires_at=timezone.now() + timedelta(hours=1),
    )
    script += [lambda: None] * 4
    script += [states(other, JobState.SUCCEEDED), states(build, JobState.SUCCEEDED)]
    follow.follow_build(build.pk)
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"  build {build.pk} waits for a free place: 1 build runs (MM_BUILDS_AT_ONCE)",
        f"  build {build.pk} waits for a worker (does a worker run? mm status)",
    ]


def test_a_missing_worker_is_suspected(build: Build, script: list, capsys) -> None:
    """A job that nobody takes up makes us say where to look."""
    script += [lambda: None] * 4 + [states(build, JobState.SUCCEEDED)]
    follow.follow_build(build.pk)
    assert "does a worker run? mm status" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DiskFull("no room", remedy="free some", need_bytes=2), DiskFull),
        (StepFailed("it broke", exit_code=3, log_tail=["last line"]), StepFailed),
    ],
)
def test_a_failed_build_raises_what_it_failed_of(
    build: Build, script: list, error: MmError, kind: type[MmError]
) -> None:
    """The recorded error comes back as itself: code, message, remedy, details."""
    script += [states(build, JobState.FAILED, error=error.as_json())]
    with pytest.raises(kind) as caught:
        follow.follow_to_live(build.pk)
    assert type(caught.value) is kind
    assert caught.value.message == error.message
    assert caught.value.details == error.details


def test_a_cancelled_build_says_so(build: Build, script: list) -> None:
    """Cancelled without a recorded error is still an error for the caller."""
    script += [states(build, JobState.CANCELLED)]
    with pytest.raises(Cancelled):
        follow.follow_build(build.pk)


def test_the_activation_is_watched_after_the_build(build: Build, script: list, capsys) -> None:
    """`mm deploy` ends only when the generation is live; phases are told."""

    def activation() -> None:
        made = Activation.objects.create(
            deployment=build.deployment, target=build.generation, kind="activate",
            host=build.host, state=JobState.RUNNING, phase="start",
        )  # fmt: skip
        script.extend(
            [states(made, JobState.RUNNING, phase="probe"), states(made, JobState.SUCCEEDED)]
        )

    script += [states(build, JobState.SUCCEEDED), activation]
    follow.follow_to_live(build.pk)
    said = capsys.readouterr().out
    assert ": start" in said
    assert ": probe" in said


def test_an_activation_that_never_comes_is_an_error(build: Build, script: list) -> None:
    """A build that succeeded and forgot its activation does not hang us permanently."""
    script += [states(build, JobState.SUCCEEDED)]
    with pytest.raises(MmError, match="was not activated"):
        follow.follow_to_live(build.pk)
