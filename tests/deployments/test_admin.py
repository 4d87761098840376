"""Django's admin shows the records and changes none of them."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from deployments import actions
from deployments.admin import LISTS, site
from deployments.models import ClientKey
from tests.deployments.conftest import People
from tests.deployments.specs import spec

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("toy_machine")]


@pytest.fixture
def admins(people: People) -> Client:
    """Alice, with the flags that an admin gets."""
    actions.set_role(people.alice, "alice", "admin")
    client = Client()
    client.force_login(people.alice)
    return client


@pytest.mark.parametrize("model", LISTS, ids=lambda model: model.__name__)
def test_lists_can_be_looked_at(people: People, admins: Client, model: type) -> None:
    """Every list opens, searched too, and offers neither adding nor deleting."""
    actions.deploy(people.bob, spec(), reason="x")
    actions.issue_key(people.alice, owner="x")
    name = f"admin:deployments_{model.__name__.lower()}"
    page = admins.get(reverse(f"{name}_changelist"), {"q": "a"} if LISTS[model][2] else {})
    assert page.status_code == 200
    assert admins.get(reverse(f"{name}_add")).status_code == 403
    row = model._default_manager.first()
    if row is not None:
        address = reverse(f"{name}_change", args=[row.pk])
        shown = admins.get(address)
        assert shown.status_code == 200
        assert b'name="_save"' not in shown.content
        assert admins.post(address, {}).status_code == 403
        assert admins.post(reverse(f"{name}_delete", args=[row.pk])).status_code == 403


def test_no_digest_is_shown(people: People, admins: Client) -> None:
    """Neither a key's HMAC nor a password hash."""
    key, _ = actions.issue_key(people.alice, owner="x")
    page = admins.get(reverse("admin:deployments_clientkey_change", args=[key.pk]))
    assert ClientKey.objects.get().digest not in page.content.decode()
    page = admins.get(reverse("admin:deployments_user_change", args=[people.bob.pk]))
    assert people.bob.password not in page.content.decode()


def test_operators_do_not_get_in(people: People) -> None:
    """The admin is for admins."""
    client = Client()
    client.force_login(people.bob)
    assert client.get(reverse("admin:index")).status_code == 302
    assert site.is_registered(ClientKey)
