"""Reports of a generation: one a kind, small ones in their row, large ones in the store."""

from __future__ import annotations

import pytest

from deployments import actions
from deployments.jobs import lease, reports
from deployments.jobs.retention import tidy
from deployments.models import Build, Generation, GenerationReport, ReportKind
from mmadmin.core.errors import LeaseLost
from mmadmin.core.generations.lifecycle import JobState
from tests.deployments import machines
from tests.deployments.conftest import People
from tests.deployments.specs import spec

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("toy_machine")]


@pytest.fixture
def build(people: People) -> Build:
    """A build that this process works on."""
    generation = actions.deploy(people.bob, spec(), reason="first", activate=False)
    claimed = lease.claim(Build, generation.builds.get().pk)
    assert claimed is not None
    return claimed


def test_a_later_report_takes_the_place_of_the_earlier(build: Build) -> None:
    """The newest of a kind is what is known, and says which job made it."""
    store, generation = machines.ToyMachine().store(), Generation.objects.get()
    for ok in (False, True):
        reports.write(generation, {ReportKind.PROBES: {"ok": ok}}, build, store)
    assert generation.report(ReportKind.PROBES) == {"ok": True}
    assert generation.report(ReportKind.MODEL) is None
    assert GenerationReport.objects.get().made_by == f"build {build.pk}"


def test_a_large_report_lies_in_the_store(build: Build, settings) -> None:
    """It is read from there, survives a collection, and is nothing where the store lacks it."""
    store, generation = machines.ToyMachine().store(), Generation.objects.get()
    large = {"plain": {"output": "x" * reports.INLINE_MAX_BYTES}}
    reports.write(generation, {ReportKind.RENDERS: large}, build, store)
    row = GenerationReport.objects.get()
    assert (row.data, row.content) == (None, large)
    tidy(store)
    assert generation.report(ReportKind.RENDERS) == large
    settings.HOME = type(settings.HOME)(settings.HOME.root / "another")
    assert generation.report(ReportKind.RENDERS) is None


def test_a_worker_that_lost_its_lease_writes_no_report(build: Build) -> None:
    """Another one has gone on from the record."""
    Build.objects.update(fence=build.fence + 1)
    with pytest.raises(LeaseLost):
        reports.write(
            Generation.objects.get(),
            {ReportKind.PROBES: {}},
            build,
            machines.ToyMachine().store(),
        )
    assert not GenerationReport.objects.exists()


def test_a_job_that_has_ended_is_moved_no_more(build: Build) -> None:
    """By the table of moves, whatever somebody asks for."""
    assert Build.objects.filter(pk=build.pk).move(JobState.FAILED) == 1
    for after in JobState:
        assert Build.objects.filter(pk=build.pk).move(after) == 0
    assert not build.cancel()
