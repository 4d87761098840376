"""What clients call a deployment belongs to the generation: it changes with it, and goes back."""

from __future__ import annotations

import pytest

from deployments import actions, queries, tasks
from deployments.broker import feed
from deployments.models import Activation, Deployment
from mmadmin.core.errors import Conflict
from tests.deployments.conftest import People
from tests.deployments.specs import spec
from tests.deployments.world import Gate, built, go, live

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.database,
    pytest.mark.usefixtures("toy_machine", "broker", "quick"),
]


def names() -> dict[str, str]:
    """What the gate is told: model name → generation."""
    return {
        name: route.generation_uid or "" for name, route in feed.current_snapshot().routes.items()
    }


def serve(people: People, name: str, public_name: str) -> None:
    """Another deployment, live."""
    generation = built(people, name=name, public_name=public_name)
    activation = actions.activate(people.bob, name, generation.number)
    tasks.run_activation(activation.pk)
    assert generation.deployment.generations.get(number=generation.number).state == "live"


def test_a_new_name_comes_with_its_generation_and_goes_with_it(people: People, gate: Gate) -> None:
    """Deploying renames nothing; the flip does; a roll-back brings the old name back."""
    built(people)
    go(people, 1)
    built(people, public_name="smol-talk")
    assert names() == {"smol-chat": "smol/1"}
    ahead = queries.preview(people.carol, "smol", 2)
    assert (ahead.public_name, ahead.renames) == ("smol-talk", True)
    go(people, 2)
    assert names() == {"smol-talk": "smol/2"}
    assert not queries.preview(people.carol, "smol", 2).renames
    back = actions.rollback(people.bob, "smol", reason="clients were not told")
    tasks.run_activation(back.pk)
    assert names() == {"smol-chat": "smol/1"}


def test_a_name_that_another_deployment_has_is_refused_in_time(people: People, gate: Gate) -> None:
    """In words, by the preview and by the preflight; what is live stays."""
    built(people)
    go(people, 1)
    built(people, public_name="smol-talk")
    go(people, 2)
    serve(people, "other", "smol-chat")
    with pytest.raises(Conflict, match="is taken by the deployment other"):
        actions.deploy(people.bob, spec(), reason="")
    ahead = queries.preview(people.carol, "smol", 1).outcome
    assert (ahead.outlook, ahead.message.split(":")[0]) == (
        "refused",
        "clients call the deployment other 'smol-chat'",
    )
    back = actions.rollback(people.bob, "smol", reason="back")
    tasks.run_activation(back.pk)
    back.refresh_from_db()
    assert (back.state, live()) == ("failed", 2)
    assert (back.error or {})["message"].startswith("clients call the deployment other")
    assert names()["smol-talk"] == "smol/2"


def test_a_name_taken_in_the_middle_of_an_activation(
    people: People, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flip looks again: the run turns back, nothing is renamed."""
    built(people)
    go(people, 1)
    built(people, public_name="smol-talk")
    serve(people, "other", "other")
    monkeypatch.setattr(
        "deployments.jobs.activations.ActivationRun._probe",
        lambda _self: Deployment.objects.filter(name="other").update(public_name="smol-talk"),
    )
    activation = actions.activate(people.bob, "smol", 2, reason="go")
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    assert (activation.state, live()) == ("failed", 1)
    assert (activation.error or {})["code"] == "conflict"
    assert Deployment.objects.get(name="smol").public_name == "smol-chat"
    assert Activation.objects.count() == 3


def test_until_something_was_live_a_name_is_easily_changed(people: People, gate: Gate) -> None:
    """No client knows a deployment that never lived: the newest file says what it is called."""
    built(people)
    built(people, public_name="smol-talk")
    assert names() == {"smol-talk": ""}


def test_a_name_belongs_to_who_is_live(people: People, gate: Gate) -> None:
    """What never served, was stopped or is archived keeps nobody from it, least a roll-back."""
    built(people)
    go(people, 1)
    built(people, public_name="smol-talk")
    go(people, 2)
    built(people, name="other", public_name="smol-chat")
    back = actions.rollback(people.bob, "smol", reason="back")
    tasks.run_activation(back.pk)
    assert names() == {"smol-chat": "smol/1"}, "and the route is that of the live one"
    refused = actions.activate(people.bob, "other", 1)
    tasks.run_activation(refused.pk)
    refused.refresh_from_db()
    assert (refused.error or {})["remedy"].startswith("give smol another public_name")
    stop = actions.stop(people.bob, "smol", reason="make way")
    tasks.run_activation(stop.pk)
    serve(people, "other", "smol-chat")
    assert names() == {"smol-chat": "other/2"}
    actions.archive(people.bob, "smol")
    actions.archive(people.bob, "smol", on=False)
    assert names() == {"smol-chat": "other/2"}
