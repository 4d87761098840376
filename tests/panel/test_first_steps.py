"""The list of first steps on the overview: what it holds, how it ticks itself off, how it goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from deployments import actions, queries
from deployments.models import ClientKey, Deployment, Generation, User
from tests.panel import PASSWORD, markup

TITLE = "First steps"


@pytest.fixture
def ada(team: dict[str, User]) -> User:
    """The admin of an installation where only the first run has been."""
    User.objects.update(first_steps_closed_at=None)
    ClientKey.objects.update(owner="first run")
    Deployment.objects.exclude(name="smollm2-135m").update(live=None)
    return User.objects.get(username="ada")


def to_do(person: User) -> list[str]:
    """The titles of what is not done."""
    return [step.title for step in queries.first_steps(person) if not step.done]


def test_it_ticks_itself_off(ada: User) -> None:
    """The demo, its key and the person themselves do not count; each act ticks one."""
    others = User.objects.exclude(pk=ada.pk)
    assert to_do(ada) == [
        "Change your password",
        "Deploy a model of your own",
        "Create a key",
    ]
    assert [s.title for s in queries.first_steps(ada) if s.done] == ["Add a teammate"]
    assert others.exists()
    actions.set_password(ada, "ada", f"{PASSWORD}-and-more")
    assert "Change your password" not in to_do(ada)
    actions.issue_key(ada, owner="dana")
    assert to_do(ada) == ["Deploy a model of your own"]
    own = Deployment.objects.exclude(name="smollm2-135m").first()
    assert own is not None
    Deployment.objects.filter(pk=own.pk).update(live=Generation.objects.filter(deployment=own)[0])
    assert queries.first_steps(ada) == ()


def test_each_sees_what_they_may_do(ada: User, team: dict[str, User]) -> None:
    """An operator adds nobody; a viewer has no list; single sign-on has no password."""
    otto, vera = (User.objects.get(username=name) for name in ("otto", "vera"))
    assert "Add a teammate" not in [step.title for step in queries.first_steps(otto)]
    assert queries.first_steps(vera) == ()
    otto.set_unusable_password()
    assert to_do(otto) == ["Deploy a model of your own", "Create a key"]


def test_it_is_closed_for_good(ada: User, as_user: Callable[[str], Client]) -> None:
    """By its button, for this person alone."""
    client = as_user("ada")
    page = markup(client.get("/"))
    assert TITLE in page
    assert 'href="/deployments/new/"' in page
    answer = client.post("/first-steps/close/")
    assert answer.status_code == 302
    assert TITLE not in markup(client.get("/"))
    assert TITLE in markup(as_user("otto").get("/"))
    assert TITLE not in markup(as_user("vera").get("/"))
