"""The second factor of logins by password, how long a login lasts, and single sign-on alone."""

from __future__ import annotations

import json
import re
import time
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone
from django_otp.oath import totp

from deployments import actions
from deployments.actions import attempts
from deployments.models import AuditEvent, Session, User
from mmadmin.core.errors import Conflict, Refused
from tests.deployments.conftest import PASSWORD, People

pytestmark = pytest.mark.django_db(transaction=True)

NEW = "nobody guesses this one"


def enter(name: str, password: str = PASSWORD, address: str = "10.0.0.1") -> Client:
    """A browser that has sent the login form."""
    client = Client(REMOTE_ADDR=address)
    client.post("/login/?next=/builds/", {"username": name, "password": password})
    return client


def code_of(name: str, steps: int = 0) -> str:
    """What the person's app shows, so many steps from now."""
    key = User.objects.get(username=name).second_factor_key
    return f"{totp(bytes.fromhex(key), t0=-30 * steps):06}"


def is_in(client: Client) -> bool:
    """Whether the browser is logged in and may use the panel."""
    return client.get("/hosts/").status_code == 200


def enrol(name: str) -> list[str]:
    """Set it up in a browser, as a person does; the recovery codes."""
    client = enter(name)
    page = client.get("/account/second-factor/").content.decode()
    assert "data:image/svg+xml" in page
    shown = client.post("/account/second-factor/", {"code": code_of(name)}, follow=True)
    listed = re.search(r"<pre[^>]*>(.*?)</pre>", shown.content.decode(), re.DOTALL)
    assert listed is not None
    codes = listed[1].split()
    assert len(codes) == 10
    again = client.get("/account/second-factor/codes/", follow=True).content.decode()
    assert not [code for code in codes if code in again], "shown once"
    return codes


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the codes stands, so that none is too old by the time it is sent."""
    now = time.time()
    monkeypatch.setattr("django_otp.oath.time", lambda: now)


def test_a_password_alone_lets_nobody_in(people: People) -> None:
    """The code is asked for, leads on to where the person was going, and works once."""
    enrol("bob")
    client = enter("bob")
    assert not is_in(client)
    assert client.get("/api/v1/me").status_code == 401
    used = code_of("bob")
    assert client.post("/login/code/", {"code": used}).status_code == 422
    assert not is_in(client)
    answer = client.post("/login/code/", {"code": code_of("bob", steps=1)})
    assert answer["Location"] == "/builds/"
    assert is_in(client)
    assert client.get("/login/code/")["Location"] == "/login/"


def test_a_recovery_code_works_once(people: People) -> None:
    """In place of the app's code; however it is written."""
    codes = enrol("bob")
    client = enter("bob")
    client.post("/login/code/", {"code": codes[0].replace("-", "").upper()})
    assert is_in(client)
    client = enter("bob")
    client.post("/login/code/", {"code": codes[0]})
    assert not is_in(client)
    client.post("/login/code/", {"code": codes[1]})
    assert is_in(client)
    assert AuditEvent.objects.filter(verb="second-factor.recovery").count() == 2
    assert not [row for row in User.objects.values() if codes[2] in json.dumps(row, default=str)]


def test_codes_cannot_be_guessed(people: People) -> None:
    """Wrong codes count like wrong passwords, and entering the password again forgives none."""
    enrol("bob")
    statuses = []
    for _ in range(attempts.TRIES):
        client = enter("bob")
        statuses.append(client.post("/login/code/", {"code": "000000"}).status_code)
    assert 429 in statuses or client.get("/login/code/").status_code == 302
    assert statuses.count(422) <= attempts.TRIES
    client = enter("bob")
    assert client.get("/login/code/").status_code == 302, "the password is locked out, too"


def test_a_step_in_between_does_not_last(people: People) -> None:
    """Five minutes; and not for an account that was deactivated meanwhile."""
    enrol("bob")
    client = enter("bob")
    session = client.session
    session["mm_pending"] = {
        **session["mm_pending"],
        "since": (timezone.now() - timedelta(minutes=6)).isoformat(),
    }
    session.save()
    assert client.post("/login/code/", {"code": code_of("bob", 1)})["Location"] == "/login/"
    client = enter("bob")
    User.objects.filter(username="bob").update(is_active=False)
    assert client.post("/login/code/", {"code": code_of("bob", 1)})["Location"] == "/login/"


def test_a_role_that_needs_one(people: People) -> None:
    """Its people are logged out, led to setting it up at the next login, and let in with it."""
    before = enter("bob")
    viewer = enter("carol")
    assert is_in(before)
    actions.require_second_factor(people.alice, ["operator"])
    assert not is_in(before)
    assert is_in(viewer)
    client = enter("bob")
    assert client.get("/hosts/")["Location"] == "/account/second-factor/"
    refused = client.get("/api/v1/me")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "refused")
    assert client.get("/events/").status_code == 302
    client.post("/account/second-factor/", {"code": code_of_page(client, "bob")})
    assert is_in(client)
    with pytest.raises(Conflict):
        actions.reset_second_factor(people.bob, "bob")
    actions.reset_second_factor(people.bob, "bob", on_the_machine=True)
    assert enter("bob").get("/hosts/")["Location"] == "/account/second-factor/"


def code_of_page(client: Client, name: str) -> str:
    """The code for the key that the page shows."""
    assert client.get("/account/second-factor/").status_code == 200
    return code_of(name)


def test_a_new_role_may_need_one(people: People) -> None:
    """Who becomes an operator where operators need one logs in again."""
    actions.require_second_factor(people.alice, ["operator"])
    client = enter("carol")
    actions.set_role(people.alice, "carol", "operator")
    assert not is_in(client)


def test_only_admins_reset_and_require(people: People) -> None:
    """A reset ends sessions and recovery codes, and is recorded with who did it."""
    enrol("bob")
    client = enter("bob")
    client.post("/login/code/", {"code": code_of("bob", 1)})
    for act in (
        lambda: actions.reset_second_factor(people.carol, "bob"),
        lambda: actions.require_second_factor(people.bob, ["admin"]),
    ):
        with pytest.raises(Refused):
            act()
    actions.reset_second_factor(people.alice, "bob")
    assert not is_in(client)
    assert is_in(enter("bob"))
    bob = User.objects.get(username="bob")
    assert (bob.second_factor_key, bob.recovery_codes.count()) == ("", 0)
    event = AuditEvent.objects.get(verb="second-factor.reset")
    assert event.actor == people.alice
    assert event.subject == "user:bob"


def test_tokens_are_not_affected(people: People) -> None:
    """A script has no phone."""
    _, text = actions.issue_token(people.bob)
    enrol("bob")
    actions.require_second_factor(people.alice, ["operator"])
    script = Client(headers={"authorization": f"Bearer {text}"})
    assert script.get("/api/v1/me").json()["second_factor"] is True


def test_changing_it_needs_the_person(people: People) -> None:
    """An old session alone neither sets it up, nor turns it off, nor makes recovery codes."""
    client = enter("bob")
    session = client.session
    session["mm_began"] = (timezone.now() - timedelta(hours=1)).isoformat()
    session.save()
    code = code_of_page(client, "bob")
    assert client.post("/account/second-factor/", {"code": code}).status_code == 422
    form = {"code": code, "current_password": PASSWORD}
    assert client.post("/account/second-factor/", form).status_code == 302
    for path in ("/account/second-factor/off/", "/account/second-factor/codes/new/"):
        assert client.post(path).status_code == 422
    sure = {"current_password": PASSWORD}
    assert client.post("/account/second-factor/codes/new/", sure).status_code == 302
    assert client.post("/account/second-factor/off/", sure).status_code == 302
    assert is_in(enter("bob"))


def test_the_key_is_shown_to_nobody_else(people: People) -> None:
    """Neither among the raw records nor by the API; and not again once it is on."""
    enrol("bob")
    key = User.objects.get(username="bob").second_factor_key
    admin = enter("alice")
    pages = [f"/admin/deployments/user/{people.bob.pk}/change/", "/api/v1/users", "/people/"]
    for page in pages:
        answer = admin.get(page)
        assert answer.status_code == 200
        assert key not in answer.content.decode()
    client = enter("bob")
    client.post("/login/code/", {"code": code_of("bob", 1)})
    assert client.get("/account/second-factor/")["Location"] == "/account/"


# --- how long a login lasts


def test_a_login_ends_when_it_is_idle(people: People, settings) -> None:
    """Each request postpones the end, up to the longest life of a login."""
    settings.SESSION_IDLE_S = 3600
    client = enter("bob")
    row = Session.objects.get()
    assert abs(row.expire_date - timezone.now() - timedelta(hours=1)) < timedelta(minutes=2)
    Session.objects.update(expire_date=timezone.now() + timedelta(minutes=5))
    assert is_in(client)
    row.refresh_from_db()
    assert row.expire_date > timezone.now() + timedelta(minutes=58)
    longest = timedelta(seconds=settings.SESSION_COOKIE_AGE)
    Session.objects.update(
        began_at=timezone.now() - longest + timedelta(minutes=9),
        expire_date=timezone.now() + timedelta(minutes=5),
    )
    assert is_in(client)
    row.refresh_from_db()
    assert row.expire_date < timezone.now() + timedelta(minutes=10)
    Session.objects.update(expire_date=timezone.now())
    assert not is_in(client)


def test_single_sign_on_alone(people: People, settings) -> None:
    """Where it is set, no password lets anybody in, and the page does not ask for one."""
    settings.SSO_ONLY, settings.OIDC_ISSUER = True, "https://id.example.org"
    client = enter("bob")
    assert not is_in(client)
    page = client.get("/login/").content.decode()
    assert 'type="password"' not in page
    assert "/login/oidc/" in page
