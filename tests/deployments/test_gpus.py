"""GPUs of a described host: each engine gets its own, and sees no others."""

from __future__ import annotations

import pytest

from deployments import actions, queries, tasks
from deployments.models import Activation, Build, BuildStep, Generation, Replica
from mmadmin.core.fit.placement import Footprint, footprints_as_json
from tests.deployments import machines
from tests.deployments.conftest import People
from tests.deployments.processes import until
from tests.deployments.specs import spec
from tests.deployments.world import in_thread

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.database,
    pytest.mark.usefixtures("toy_machine", "broker", "quick", "gate", "four_cards"),
]

GIB = 1 << 30


@pytest.fixture
def four_cards() -> None:
    """Four V100s; a model takes 20 GiB of one of them, or 16 of two."""
    machines.tell("host", "v100x4")
    known = [
        Footprint((0,), (20 * GIB,), GIB, GIB, GIB),
        Footprint((0, 1), (16 * GIB, 16 * GIB), GIB, GIB, GIB),
    ]
    machines.tell("needs", footprints_as_json(known))


def deploy(people: People, name: str, devices: str = "") -> Generation:
    """Built, not live."""
    text = spec(name=name, public_name=f"{name}-chat")
    text = text.replace("[model]", f"{devices}\n[model]", 1)
    generation = actions.deploy(people.bob, text, reason="", activate=False)
    tasks.run_build(generation.builds.get().pk)
    generation.refresh_from_db()
    return generation


def go(people: People, generation: Generation) -> Activation:
    """Make it live."""
    name = generation.deployment.name
    activation = actions.activate(people.bob, name, generation.number, reason="go")
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    return activation


def devices_of(generation: Generation) -> list[int] | None:
    """The GPUs of its engine."""
    return Replica.objects.get(generation=generation, stopped_at=None).gpu_indices


def test_two_deployments_have_cards_of_their_own(people: People) -> None:
    """The preview names the card that the activation takes; the process sees it alone."""
    first, second = deploy(people, "first"), deploy(people, "second")
    assert go(people, first).error is None
    expected = queries.preview(people.carol, "second", 1).outcome
    assert go(people, second).error is None
    assert (devices_of(first), devices_of(second)) == ([0], [1])
    assert expected.outlook in {"overlap", "unknown"}
    replica = Replica.objects.get(generation=second)
    assert replica.launch["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert replica.devices == [{"index": 1, "uuid": "GPU-1"}]


def test_named_cards_are_given(people: People) -> None:
    """`devices` of the file is what the engine gets, in its order."""
    generation = deploy(people, "named", "devices = [3, 2]")
    assert go(people, generation).error is None
    assert devices_of(generation) == [3, 2]


def test_full_cards_are_a_swap_or_a_refusal(people: People) -> None:
    """A change moves within its own card once all are taken; a fifth deployment has no place."""
    all_four = [deploy(people, f"d{n}") for n in range(4)]
    for generation in all_four:
        assert go(people, generation).error is None
    assert [devices_of(generation) for generation in all_four] == [[0], [1], [2], [3]]
    fifth = go(people, deploy(people, "d4"))
    assert (fifth.error or {})["code"] == "does_not_fit"
    again = actions.deploy(
        people.bob, spec(name="d2", public_name="d2-chat", context=4096), reason="", activate=False
    )
    tasks.run_build(again.builds.get().pk)
    change = go(people, Generation.objects.get(pk=again.pk))
    assert (change.mode, change.error) == ("swap", None)
    assert devices_of(again) == [2]


def test_a_step_waits_for_a_gpu_and_says_for_what(people: People) -> None:
    """Its row names what is missing; it goes on when that is free, and a cancel ends the wait."""
    machines.tell("gpu-steps", ["toy-model"])
    machines.tell("gpu-holder", "chat/1")
    text = spec(name="first", public_name="first-chat")
    build = actions.deploy(people.bob, text, reason="", activate=False).builds.get()
    thread = in_thread(tasks.run_build, build.pk)
    until(lambda: waits_for(build) == "20.0 GiB of GPU 0; chat/1 holds 24.0 GiB")
    assert build.steps.get(recipe="toy-model").state == "waiting"
    machines.tell("gpu-holder", None)
    thread.join()
    build.refresh_from_db()
    assert (build.state, waits_for(build)) == ("succeeded", "")
    machines.tell("gpu-holder", "chat/1")
    again = actions.deploy(
        people.bob, spec(name="second", public_name="x", context=4096), reason="", activate=False
    )
    machines.tell("gpu-steps", ["toy-system"])
    other = again.builds.get()
    thread = in_thread(tasks.run_build, other.pk)
    until(lambda: BuildStep.objects.filter(build=other).exclude(waits_for="").exists())
    actions.cancel_build(people.bob, other.pk)
    thread.join()
    other.refresh_from_db()
    assert other.state == "cancelled"


def waits_for(build: Build) -> str:
    """What the build's model step waits for."""
    found = BuildStep.objects.filter(build=build, recipe="toy-model").first()
    return found.waits_for if found else ""
