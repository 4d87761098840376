"""A preview says what an activation would do, from the records and the store, and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from deployments import actions, queries, tasks
from deployments.models import (
    Activation,
    AuditEvent,
    Deployment,
    Generation,
    Host,
    Replica,
    Trial,
)
from mmadmin.core.errors import NotFound, Refused
from mmadmin.core.fit.preview import Footprint
from tests.deployments import machines
from tests.deployments.conftest import People
from tests.deployments.specs import spec
from tests.support.reports import report

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("toy_machine")]

GIB = 2**30
LOADED = {"measured": {"load_ms": 4000}}


@pytest.fixture
def served(people: People, host: Host) -> Deployment:
    """Two built generations of 5 GiB each; the second is live, on a host with 8 GiB free."""
    needs = Footprint((), (), 5 * GIB, 5 * GIB, 5 * GIB).as_json()
    for number in (1, 2):
        generation = actions.deploy(
            people.bob, spec(context=1024 * number), reason="", activate=False
        )
        tasks.run_build(generation.builds.get().pk)
        Generation.objects.filter(pk=generation.pk).update(size_bytes=GIB)
        report(generation, needs=needs)
    first, second = Generation.objects.order_by("number")
    Generation.objects.filter(pk=first.pk).update(state="retired")
    Generation.objects.filter(pk=second.pk).update(state="live")
    report(second, probe_report=LOADED)
    first.transitions.create(before="probing", after="live", actor=people.bob)
    Replica.objects.create(uid="r", generation=second, host=host, state="ready")
    Deployment.objects.update(live=second)
    Host.objects.update(facts=machines.FACTS.as_json(), seen_at=timezone.now())
    return Deployment.objects.get()


def free(memory_bytes: int) -> None:
    """The host says that so much memory is free."""
    facts = replace(machines.FACTS, memory_available_bytes=memory_bytes)
    Host.objects.update(facts=facts.as_json())


def test_overlap_and_swap_by_the_host_s_last_word(people: People, served: Deployment) -> None:
    """By the memory that the host reported; the time by how fast the host loads."""
    before = (Activation.objects.count(), AuditEvent.objects.count())
    found = queries.preview(people.carol, "smol", 1)
    assert (found.outcome.outlook, found.outcome.waits_s) == ("overlap", 0)
    assert (found.target.number, found.live and found.live.number) == (1, 2)
    assert found.outcome.load.seconds == pytest.approx(6)  # 1 GiB in 4 s, and the start
    free(3 * GIB)
    swap = queries.preview(people.carol, "smol", 1).outcome
    assert (swap.outlook, swap.ends, swap.drain_s) == ("swap", ("smol/2",), 300)
    assert "main memory is short of 2.5 GiB" in swap.message
    free(GIB // 4)
    assert queries.preview(people.carol, "smol", 1).outcome.outlook == "refused"
    assert (Activation.objects.count(), AuditEvent.objects.count()) == before


def test_without_a_number_it_is_the_roll_back_s(people: People, served: Deployment) -> None:
    """The generation that `rollback` would take; in words when there is none."""
    assert queries.preview(people.carol, "smol").target.number == 1
    Generation.objects.filter(number=1).update(mark="bad")
    with pytest.raises(NotFound, match="no earlier generation"):
        queries.preview(people.carol, "smol")
    with pytest.raises(NotFound, match="no generation 9"):
        queries.preview(people.carol, "smol", 9)
    with pytest.raises(Refused):
        queries.preview(people.charlie, "smol", 1)


def test_what_was_collected_must_be_built_again(people: People, served: Deployment) -> None:
    """The store is looked at; another host's cannot be."""
    first = served.generations.get(number=1)
    Generation.objects.filter(pk=first.pk).update(system=f"{'0' * 64}-system")
    found = queries.preview(people.carol, "smol", 1).outcome
    assert (found.outlook, found.build_first) == ("refused", (f"{'0' * 64}-system",))
    Host.objects.update(name="elsewhere")
    assert queries.preview(people.carol, "smol", 1).outcome.build_first is None


@pytest.mark.parametrize("reported", [{}, {"of": "another version"}])
def test_a_host_that_did_not_report(
    people: People, served: Deployment, reported: dict[str, Any]
) -> None:
    """Nothing is guessed from nothing, nor from what another version wrote."""
    Host.objects.update(facts=reported)
    assert queries.preview(people.carol, "smol", 1).outcome.outlook == "unknown"


def test_trials_are_reckoned_with(people: People, served: Deployment) -> None:
    """One of another deployment gives its memory; the target's own engine takes over as it is."""
    free(3 * GIB)
    other = actions.deploy(
        people.bob, spec(name="other", public_name="other"), reason="", activate=False
    )
    report(other, needs=Generation.objects.first().report("needs"))
    host, until = served.host, timezone.now() + timedelta(minutes=9)
    trial = Trial.objects.create(
        deployment=other.deployment, generation=other, host=host, phase="open", ends_at=until
    )
    engine = Replica.objects.create(
        uid="t", generation=other, host=host, state="ready", trial=trial
    )
    found = queries.preview(people.carol, "smol", 1).outcome
    assert (found.outlook, found.ends) == ("overlap", ("smol/2", "other/1"))
    Trial.objects.filter(pk=trial.pk).update(
        deployment=served, generation=served.generations.get(number=1)
    )
    Replica.objects.filter(pk=engine.pk).update(generation=served.generations.get(number=1))
    tried = queries.preview(people.carol, "smol", 1).outcome
    assert (tried.outlook, tried.waits_s, tried.ends) == ("overlap", 0, ("smol/2",))
    assert tried.message.startswith("its engine runs already")
