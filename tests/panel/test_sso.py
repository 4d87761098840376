"""Logging in with an identity provider: who comes in, as what, and which tokens do not count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from django.contrib.auth import authenticate
from django.test import Client, RequestFactory

from deployments.accounts import oidc
from deployments.models import AuditEvent, Role, User
from mmadmin.core.errors import Unreachable
from tests.panel import PASSWORD, markup
from tests.panel.provider import CLIENT, SECRET, Provider, provider

WayIn = Callable[..., Any]


@pytest.fixture
def at(settings: Any) -> Iterator[Provider]:
    """The provider, and a panel that knows it."""
    with provider() as it:
        settings.OIDC_ISSUER = it.issuer
        settings.OIDC_CLIENT_ID, settings.OIDC_CLIENT_SECRET = CLIENT, SECRET
        settings.OIDC_NAME = "Example ID"
        settings.AUTHENTICATION_BACKENDS = [
            "django.contrib.auth.backends.ModelBackend",
            "deployments.accounts.oidc.Backend",
        ]
        oidc._known.clear()
        yield it


@pytest.fixture
def come(team: dict[str, User], at: Provider) -> WayIn:
    """Go to the provider and come back; what the panel answers in the end."""

    def go(client: Client, start: str = "/login/oidc/") -> Any:
        there = httpx2.get(client.get(start)["Location"], follow_redirects=False, timeout=60)
        back = urlsplit(there.headers["Location"])
        return client.get(f"{back.path}?{back.query}")

    return go


def test_a_new_person_is_a_viewer(come: WayIn, client: Client) -> None:
    """They land where they wanted to go, have no password, and see what viewers see."""
    answer = come(client, "/login/oidc/?next=/hosts/")
    assert answer["Location"] == "/hosts/"
    nora = User.objects.get(username="nora")
    assert (nora.role, nora.has_usable_password()) == ("viewer", False)
    assert AuditEvent.objects.filter(actor=nora, verb="user.create").exists()
    assert client.get("/hosts/").status_code == 200
    assert client.get("/keys/").status_code == 403
    html = markup(client.get("/account/"))
    assert "Change password" not in html
    come(Client())
    assert User.objects.filter(username__startswith="nora").count() == 1


def test_the_button_stands_only_where_it_works(
    team: dict[str, User], at: Provider, client: Client, settings: Any
) -> None:
    """With the provider's name where there is one; else no button and no such page."""
    assert "Log in with Example ID" in markup(client.get("/login/"))
    assert "/login/oidc/?next=/hosts/" in markup(client.get("/login/?next=/hosts/"))
    settings.OIDC_ISSUER = ""
    assert "Log in with" not in markup(client.get("/login/"))
    assert client.get("/login/oidc/").status_code == 404
    assert client.get("/login/oidc/callback/?code=x&state=y").status_code == 404


def test_groups_give_roles(come: WayIn, at: Provider, settings: Any) -> None:
    """At each login, up and down; nested claims too; without a mapping the panel's word stays."""
    settings.OIDC_ADMINS, settings.OIDC_OPERATORS = ["ml-admins"], ["ml-ops"]
    settings.OIDC_ROLES_CLAIM = "realm.groups"
    for groups, role in ((["ml-ops"], "operator"), (["x", "ml-admins"], "admin"), ([], "viewer")):
        at.person["realm"] = {"groups": groups}
        come(Client())
        nora = User.objects.get(username="nora")
        assert (nora.role, nora.is_superuser) == (role, role == "admin")
    settings.OIDC_ADMINS, settings.OIDC_OPERATORS = [], []
    User.objects.filter(username="nora").update(role=Role.OPERATOR)
    come(Client())
    assert User.objects.get(username="nora").role == "operator"


def test_the_last_admin_stays(come: WayIn, at: Provider, settings: Any) -> None:
    """Groups that forget somebody do not lock everybody out."""
    settings.OIDC_ADMINS = ["ml-admins"]
    at.person["groups"] = "ml-admins"
    come(Client())
    User.objects.filter(username="ada").update(is_active=False)
    at.person["groups"] = []
    come(Client())
    assert User.objects.get(username="nora").role == "admin"


def test_nobody_s_account_is_taken_over(come: WayIn, at: Provider, client: Client) -> None:
    """A name or an address that is somebody's already leads to an account of its own."""
    at.person |= {"preferred_username": "ada", "email": "ada@example.org", "email_verified": True}
    come(client)
    ada = User.objects.get(username="ada")
    assert ada.oidc_subject is None
    other = User.objects.get(username="ada-2")
    assert client.session["_auth_user_id"] == str(other.pk)
    assert other.role == "viewer"


def test_who_was_switched_off_stays_out(come: WayIn, client: Client) -> None:
    """The provider's word does not count more than an admin's."""
    come(Client())
    User.objects.filter(username="nora").update(is_active=False)
    assert come(client)["Location"] == "/login/"
    assert "rejected the login" in markup(client.get("/login/"))


LIES: tuple[dict[str, Any], ...] = (
    {"iss": "https://elsewhere.example.org"},
    {"aud": "another-client"},
    {"aud": [CLIENT, "another-client"]},
    {"aud": None},
    {"exp": int(time.time()) - 60},
    {"exp": None},
    {"nonce": "of-another-login"},
    {"sub": "somebody-else"},
)


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_token_that_is_not_sound_lets_nobody_in(
    come: WayIn, at: Provider, client: Client, lie: dict[str, Any]
) -> None:
    """Wrong issuer, audience, lifetime, nonce, or a token that is not about the person."""
    at.lies = lie
    at.lies_about_person = {"sub": "u1"}
    _refused(come, client)


def test_a_foreign_signature_lets_nobody_in(come: WayIn, at: Provider, client: Client) -> None:
    """Only the provider's published key counts."""
    at.signs_with = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _refused(come, client)


def test_an_unsigned_token_lets_nobody_in(
    come: WayIn, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even with the right claims."""
    real = jwt.encode

    def unsigned(claims: Any, _key: Any, algorithm: str, headers: Any) -> str:
        del algorithm
        return real(claims, None, algorithm="none", headers=headers)

    monkeypatch.setattr(jwt, "encode", unsigned)
    _refused(come, client)


def _refused(come: WayIn, client: Client) -> None:
    answer = come(client)
    assert answer["Location"] == "/login/"
    assert not User.objects.filter(oidc_subject__isnull=False).exists()
    assert client.get("/").status_code == 302


def test_a_callback_that_was_not_begun_here(come: WayIn, at: Provider, client: Client) -> None:
    """A forged or repeated state, a refusal, and a code behind the password form change nothing."""
    assert client.get("/login/oidc/callback/?code=x&state=y")["Location"] == "/login/"
    there = httpx2.get(client.get("/login/oidc/")["Location"], timeout=60)
    back = urlsplit(there.headers["Location"])
    stranger = Client()
    stranger.get("/login/oidc/")
    assert stranger.get(f"{back.path}?{back.query}")["Location"] == "/login/"
    assert client.get("/login/oidc/callback/?error=access_denied")["Location"] == "/login/"
    request = RequestFactory().post(f"/login/?{back.query}")
    assert authenticate(request, username="x", password="y") is None
    assert not User.objects.filter(oidc_subject__isnull=False).exists()


def test_passwords_work_beside_it_even_when_it_is_down(
    team: dict[str, User], at: Provider, client: Client, settings: Any
) -> None:
    """A provider that is away, is another, or is asked in the clear says so on the login page."""
    settings.OIDC_ISSUER = "http://127.0.0.1:9"
    assert client.get("/login/oidc/")["Location"] == "/login/"
    html = markup(client.get("/login/"))
    assert "does not answer" in html
    assert client.post("/login/", {"username": "vera", "password": PASSWORD}).status_code == 302
    settings.OIDC_ISSUER = f"{at.issuer}/"
    with pytest.raises(Unreachable, match="calls itself"):
        oidc.provider()
    settings.OIDC_ISSUER = "http://id.example.org"
    with pytest.raises(Unreachable, match="plain HTTP"):
        oidc.provider()


def test_a_session_needs_no_provider(come: WayIn, client: Client, settings: Any) -> None:
    """Who is in stays in while the provider is away."""
    come(client)
    oidc._known.clear()
    settings.OIDC_ISSUER = "http://127.0.0.1:9"
    assert client.get("/hosts/").status_code == 200
