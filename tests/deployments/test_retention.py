"""Generations are roots of the store by the rule, and stop being so by the rule."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from deployments import actions
from deployments.jobs.retention import renew_roots, tidy
from deployments.models import Deployment, Generation, Host, Transition, Trial
from mmadmin.core.errors import DiskFull
from mmadmin.core.generations.lifecycle import GenerationState as S
from mmadmin.core.generations.lifecycle import JobState
from mmadmin.core.store import Store
from tests.core.workshop import add
from tests.deployments.conftest import People
from tests.deployments.specs import spec


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", floor_bytes=0)


@pytest.fixture
def deployment(people: People, host: Host) -> Deployment:
    """A deployment that keeps its last two generations."""
    return Deployment.objects.create(name="m", public_name="m", host=host, keep_generations=2)


def generation(
    deployment: Deployment,
    people: People,
    store: Store,
    number: int,
    state: S = S.RETIRED,
    **more: bool,
) -> Generation:
    """A generation whose system is in the store and rooted."""
    found = add(store, f"system{number}", {"n": str(number).encode()})
    store.add_root("generation", f"m/{number}", found.name, "built")
    return Generation.objects.create(
        deployment=deployment,
        number=number,
        author=people.alice,
        system=found.name,
        state=state,
        **more,
    )


def test_roots_follow_the_rule(deployment: Deployment, people: People, store: Store) -> None:
    """Old ones go, unless pinned, live, or lately live; what nobody needs is then freed."""
    generation(deployment, people, store, 1)
    generation(deployment, people, store, 2, pinned=True)
    lately, long_ago = (generation(deployment, people, store, n) for n in (3, 4))
    for row, days in ((lately, 3), (long_ago, 40)):
        Transition.objects.create(
            generation=row,
            before=S.LIVE,
            after=S.DRAINING,
            at=timezone.now() - timedelta(days=days),
        )
    generation(deployment, people, store, 5, S.LIVE)
    generation(deployment, people, store, 6)
    generation(deployment, people, store, 7)
    store.add_root("pin", "by hand", add(store, "mine", {"f": b"mine"}).name, "asked")
    store.add_root("generation", "gone/1", add(store, "gone", {"f": b"gone"}).name, "built")

    would = renew_roots(store, dry_run=True)
    assert would.let_go == ("gone/1", "m/1", "m/4")
    assert len(store.roots()) == 9
    done = tidy(store)
    assert {root.key: root.reason for root in store.roots()} == {
        "by hand": "asked",
        "m/2": "pinned",
        "m/3": "live within the last 30 days",
        "m/5": "it is live",
        "m/6": "one of the last 2 of m",
        "m/7": "one of the last 2 of m",
    }
    assert len(done.objects) == 3
    assert renew_roots(store, last=0).let_go == ("m/6", "m/7")


def test_the_deployment_says_how_long_a_generation_stays(
    deployment: Deployment, people: People, store: Store
) -> None:
    """`[keep] days` counts from when it was last live; 0 keeps none for that."""
    for number in (1, 2, 3):
        generation(deployment, people, store, number)
    old = Generation.objects.get(number=1)
    long_ago = timezone.now() - timedelta(days=40)
    Transition.objects.create(generation=old, before=S.LIVE, after=S.DRAINING, at=long_ago)
    assert renew_roots(store, dry_run=True).let_go == ("m/1",)
    actions.configure(people.bob, "m", keep_days=60)
    assert renew_roots(store, dry_run=True).kept["m/1"] == "live within the last 60 days"
    actions.configure(people.bob, "m", keep_days=0)
    assert renew_roots(store, dry_run=True).let_go == ("m/1",)
    file = spec(name="m", public_name="m") + "\n[keep]\ndays = 90\n"
    actions.deploy(people.bob, file, reason="kept for longer", activate=False)
    assert renew_roots(store, dry_run=True).kept["m/1"] == "live within the last 90 days"


def test_a_build_under_way_keeps_its_root(
    deployment: Deployment, people: People, store: Store
) -> None:
    """Between the build's root and the record of its system, nothing is let go."""
    found = add(store, "system", {"f": b"x"})
    store.add_root("generation", "m/1", found.name, "built")
    Generation.objects.create(
        deployment=deployment, number=1, author=people.alice, state=S.BUILDING
    )
    assert renew_roots(store).let_go == ()


def test_generations_of_other_hosts_are_not_ours(people: People, store: Store) -> None:
    """A store follows the records of its own host only."""
    other = Deployment.objects.create(
        name="o", public_name="o", host=Host.objects.create(name="other")
    )
    Generation.objects.create(
        deployment=other, number=1, author=people.alice, system=f"{'0' * 64}-x", state=S.LIVE
    )
    assert renew_roots(store).kept == {}


def test_what_is_on_trial_stays(deployment: Deployment, people: People, store: Store) -> None:
    """From the moment that it was asked for until its engine has ended, however old it is."""
    old = generation(deployment, people, store, 1)
    for number in (2, 3):
        generation(deployment, people, store, number)
    trial = Trial.objects.create(deployment=deployment, generation=old, host=deployment.host)
    assert renew_roots(store).kept["m/1"] == "it is on trial"
    Trial.objects.filter(pk=trial.pk).update(state=JobState.RUNNING)
    tidy(store)
    assert store.has_object(old.system)
    Trial.objects.filter(pk=trial.pk).update(state=JobState.SUCCEEDED)
    assert renew_roots(store).let_go == ("m/1",)


def test_a_full_disk_is_freed_with_the_reasons_of_before(
    deployment: Deployment, people: People, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason that cannot be written anew stops nothing; a generation without any root does."""
    for number in (1, 2, 3):
        generation(deployment, people, store, number)

    def full(*_: object) -> None:
        raise DiskFull("disk full")

    monkeypatch.setattr(store, "add_root", full)
    tidy(store)
    assert {name[65:] for name in store.names()} == {"system2", "system3"}
    store.remove_root("generation", "m/3")
    with pytest.raises(DiskFull):
        tidy(store)
    assert {name[65:] for name in store.names()} == {"system2", "system3"}
