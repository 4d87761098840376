"""Accounts: guessing, tokens and their scopes, what ends with an account, what is recorded."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import authenticate
from django.contrib.auth.hashers import MD5PasswordHasher
from django.db import connections
from django.test import Client
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from deployments import actions
from deployments.accounts import passwords, rates
from deployments.actions import attempts
from deployments.models import (
    AuditEvent,
    ClientKey,
    LoginAttempts,
    Session,
    UsageEvent,
    User,
    UserToken,
)
from mmadmin.core.errors import InvalidInput, Refused, TooMany
from tests.deployments.conftest import PASSWORD, People
from tests.deployments.processes import PATIENCE_S
from tests.deployments.specs import spec

pytestmark = [
    pytest.mark.database,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("toy_machine"),
]

NEW = "nobody guesses this one"


def log_in(name: str, password: str = PASSWORD, *, address: str = "10.0.0.1") -> tuple[Client, int]:
    """A browser after the login page; the status of its answer."""
    client = Client(REMOTE_ADDR=address)
    answer = client.post("/login/", {"username": name, "password": password})
    return client, answer.status_code


def program(text: str) -> Client:
    """A script with a token."""
    return Client(headers={"authorization": f"Bearer {text}"}, raise_request_exception=False)


def send(client: Client, method: str, path: str, body: Any = None) -> Any:
    """A request to the API."""
    return client.generic(
        method, f"/api/v1{path}", json.dumps(body or {}), content_type="application/json"
    )


# --- guessing


def test_the_api_takes_no_passwords(people: People) -> None:
    """A right name and password over HTTP Basic are nobody."""
    import base64

    text = base64.b64encode(f"alice:{PASSWORD}".encode()).decode()
    answer = Client(headers={"authorization": f"Basic {text}"}).get("/api/v1/me")
    assert answer.status_code == 401
    answer = Client().get("/api/v1/me", headers={"authorization": f"Basic {text}"})
    assert "basic" not in json.dumps(answer.json()).lower()


@pytest.mark.parametrize(
    "typed", ["alice", " alice", "alice ", "\uff41lice", "\uff41\uff4c\uff49ce"]
)
def test_a_name_is_counted_as_it_is_looked_up(people: People, typed: str) -> None:
    """Blanks around it and full-width letters are the same name, and the same count."""
    for _ in range(attempts.TRIES):
        assert log_in(typed, "wrong")[1] == 200
    assert log_in("alice")[1] == 429
    assert log_in("bob")[1] == 302


def test_every_door_is_counted_in_one_place(people: People) -> None:
    """Wrong passwords at the login, at the account page and at the API count together."""
    client = Client(REMOTE_ADDR="10.0.0.1")
    client.force_login(people.bob)
    for _ in range(3):
        log_in("bob", "wrong")
        client.post("/account/", {"current_password": "wrong", "password": NEW})
        body = {"password": NEW, "current_password": "wrong"}
        answer = send(client, "PATCH", "/users/bob", body)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "too_many"
    assert 0 < int(answer["Retry-After"]) <= attempts.FORGOTTEN_AFTER.total_seconds()
    assert log_in("bob")[1] == 429


def test_the_raw_records_have_no_door(people: People) -> None:
    """Their login is the panel's page."""
    answer = Client().post("/admin/login/", {"username": "alice", "password": PASSWORD})
    assert answer.status_code == 302
    assert answer["Location"].startswith("/login/?next=")


def test_a_name_is_counted_over_all_addresses(people: People, monkeypatch) -> None:
    """Many addresses do not make many tries; its person still comes in from where they were."""
    monkeypatch.setattr(attempts, "TRIES_OF_NAME", 6)
    assert log_in("bob", address="10.9.9.9")[1] == 302
    for number in range(6):
        assert log_in("bob", "wrong", address=f"10.0.1.{number}")[1] == 200
    assert log_in("bob", address="10.0.2.1")[1] == 429
    assert log_in("bob", address="10.9.9.9")[1] == 302


def test_one_address_has_so_many_tries_for_all_names(people: People, monkeypatch) -> None:
    """Of IPv6 the network counts, since whoever has one address there has them all."""
    monkeypatch.setattr(attempts, "TRIES_OF_ADDRESS", 5)
    for number in range(5):
        log_in(f"name{number}", "wrong", address=f"2001:db8::{number}")
    assert log_in("bob", address="2001:db8::ffff")[1] == 429
    assert log_in("bob", address="2001:db8:1::1")[1] == 302


def test_counts_are_forgotten_and_forgiven(people: People) -> None:
    """After a quarter of an hour, and for this address once the right password came."""
    for _ in range(attempts.TRIES - 1):
        log_in("bob", "wrong")
    assert log_in("bob")[1] == 302
    for _ in range(attempts.TRIES):
        assert log_in("bob", "wrong")[1] == 200
    assert log_in("bob")[1] == 429
    LoginAttempts.objects.update(until=timezone.now() - timedelta(seconds=1))
    assert log_in("bob")[1] == 302


class Slow(MD5PasswordHasher):
    """A hasher that waits until the test lets it go on."""

    algorithm = "slow"
    inside = threading.Semaphore(0)
    go_on = threading.Event()

    def encode(self, password: str, salt: str) -> str:
        """Say that it works, and wait."""
        self.inside.release()
        assert self.go_on.wait(PATIENCE_S)
        return super().encode(password, salt)


def test_guessing_does_not_take_all_threads(people: People, settings, monkeypatch) -> None:
    """While few passwords are looked at and few wait, the rest is refused and pages answer."""
    settings.PASSWORD_HASHERS = ["tests.deployments.test_accounts.Slow"]
    monkeypatch.setattr(Slow, "inside", threading.Semaphore(0))
    monkeypatch.setattr(Slow, "go_on", threading.Event())
    guesses = passwords.AT_ONCE + passwords.WAITING + 10
    refused = threading.Semaphore(0)

    def guess(number: int) -> bool:
        try:
            authenticate(None, username=f"nobody{number}", password="x")
        except TooMany:
            refused.release()
            return False
        finally:
            connections.close_all()
        return True

    with ThreadPoolExecutor(guesses) as pool:
        asked = [pool.submit(guess, number) for number in range(guesses)]
        try:
            for _ in range(passwords.AT_ONCE):
                assert Slow.inside.acquire(timeout=PATIENCE_S)
            for _ in range(10):
                assert refused.acquire(timeout=PATIENCE_S)
            assert not Slow.inside.acquire(blocking=False), "no more than so many at once"
            assert Client().get("/login/").status_code == 200
        finally:
            Slow.go_on.set()
    assert sum(done.result() for done in asked) == passwords.AT_ONCE + passwords.WAITING


# --- tokens


def test_a_stolen_token_does_not_become_the_account(people: People) -> None:
    """It changes no password and makes no token without the password of its person."""
    _, text = actions.issue_token(people.alice, scopes=["admin"])
    thief = program(text)
    for path, method, body in (
        ("/users/alice", "PATCH", {"password": NEW}),
        ("/tokens", "POST", {"note": "more"}),
    ):
        answer = send(thief, method, path, body)
        assert answer.status_code == 422, answer.content
        assert answer.json()["error"]["details"]["field"] == "current_password"
    people.alice.refresh_from_db()
    assert people.alice.check_password(PASSWORD)
    assert UserToken.objects.count() == 1
    body = {"note": "mine", "current_password": PASSWORD}
    assert send(thief, "POST", "/tokens", body).status_code == 201


def test_an_old_session_needs_the_password(people: People) -> None:
    """A login of a few minutes may make tokens; an older one shows the password again."""
    client, _ = log_in("carol")
    form = {"note": "", "scopes": ["read"], "days": "30"}
    assert client.post("/account/tokens/new/", form).status_code == 302
    session = client.session
    session["mm_began"] = (timezone.now() - passwords.FRESH).isoformat()
    session.save()
    assert client.post("/account/tokens/new/", form).status_code == 422
    assert send(client, "POST", "/tokens", {}).status_code == 422
    form["current_password"] = PASSWORD
    assert client.post("/account/tokens/new/", form).status_code == 302


@pytest.mark.parametrize(
    ("scopes", "works", "refused"),
    [
        (["read"], ["read"], ["deploy", "keys", "admin", "account"]),
        (["deploy"], ["read", "deploy"], ["keys", "admin", "account"]),
        (["keys"], ["read", "keys"], ["deploy", "admin", "account"]),
        (["admin"], ["read", "deploy", "keys", "admin", "account"], []),
    ],
)
def test_a_token_does_what_its_scopes_say(
    people: People, scopes: list[str], works: list[str], refused: list[str]
) -> None:
    """Each scope includes reading; admin includes all."""
    asks: dict[str, tuple[str, str, Any]] = {
        "read": ("GET", "/keys", None),
        "deploy": ("POST", "/plans", {"spec_toml": spec()}),
        "keys": ("POST", "/keys", {"owner": "x"}),
        "admin": ("PATCH", "/users/carol", {"role": "operator"}),
        "account": ("POST", "/sessions/end-others", None),
    }
    _, text = actions.issue_token(people.alice, scopes=scopes)
    for name in works:
        assert send(program(text), *asks[name]).status_code < 300, name
    for name in refused:
        answer = send(program(text), *asks[name])
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "refused"), name
        assert answer.json()["error"]["details"]["scope"]


def test_a_token_never_does_more_than_the_role_of_the_moment(people: People) -> None:
    """Scopes beyond the role are refused, and a lower role lowers what its tokens do."""
    with pytest.raises(InvalidInput) as refused:
        actions.issue_token(people.bob, scopes=["read", "keys"])
    assert refused.value.details["field"] == "scopes"
    _, text = actions.issue_token(people.bob, scopes=["deploy"])
    assert send(program(text), "POST", "/plans", {"spec_toml": spec()}).status_code == 202
    actions.set_role(people.alice, "bob", "viewer")
    assert send(program(text), "POST", "/plans", {"spec_toml": spec()}).status_code == 403
    assert program(text).get("/api/v1/me").status_code == 200


def test_a_token_makes_no_token_that_may_more(people: People) -> None:
    """Not even with the password of its person."""
    token, text = actions.issue_token(people.alice, scopes=["keys"])
    bearer = actions.token_user(text)
    assert bearer is not None
    with pytest.raises(Refused):
        actions.issue_token(bearer, scopes=["admin"])
    assert token.scopes == ["read", "keys"]


def test_a_token_has_an_end_unless_its_maker_wants_none(people: People) -> None:
    """Ninety days when nothing is said."""
    client, _ = log_in("bob")
    told = send(client, "POST", "/tokens", {"scopes": ["deploy"]}).json()
    assert told["scopes"] == ["read", "deploy"]
    ends = UserToken.objects.get(token_id=told["id"]).expires_at
    assert ends is not None
    assert abs(ends - timezone.now() - actions.TOKEN_LASTS) < timedelta(minutes=5)
    assert send(client, "POST", "/tokens", {"expires_at": None}).json()["expires_at"] is None


def by_admin(people: People) -> None:
    """An admin resets the password."""
    actions.set_password(people.alice, "bob", NEW)


def by_oneself(people: People) -> None:
    """The person changes it."""
    client, _ = log_in("bob")
    form = {"current_password": PASSWORD, "password": NEW}
    assert client.post("/account/", form).status_code == 302


def by_deactivation(people: People) -> None:
    """The account is switched off and on again."""
    actions.set_user_active(people.alice, "bob", on=False)
    actions.set_user_active(people.alice, "bob", on=True)


@pytest.mark.parametrize("end", [by_admin, by_oneself, by_deactivation])
def test_tokens_end_for_good(people: People, end: Callable[[People], None]) -> None:
    """With a new password and with deactivation, also when the account comes back."""
    _, text = actions.issue_token(people.bob, scopes=["deploy"])
    assert program(text).get("/api/v1/me").status_code == 200
    end(people)
    assert program(text).get("/api/v1/me").status_code == 401


def test_the_playground_key_ends_with_the_account(people: People, broker) -> None:
    """At once: gates are told ahead of the snapshot, and nothing brings it back."""
    key, _ = actions.playground_key(people.carol)
    other, _ = actions.playground_key(people.bob)
    with broker.pubsub() as heard:
        heard.subscribe("mm:revoke")
        heard.get_message(timeout=PATIENCE_S)
        actions.set_user_active(people.alice, "carol", on=False)
        told = heard.get_message(timeout=PATIENCE_S)
    assert told is not None
    assert told["data"].decode() == key.key_id
    actions.set_user_active(people.alice, "carol", on=True)
    assert ClientKey.objects.get(pk=key.pk).state == "revoked"
    assert ClientKey.objects.get(pk=other.pk).state == "active"
    assert other.rpm
    assert other.tpm


# --- requests


def test_a_token_has_a_rate(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than it may make are 429 until the moment that is named; sessions have none."""
    now = [100.0]
    monkeypatch.setattr(rates, "api_requests", rates.Buckets(3, clock=lambda: now[0]))
    _, text = actions.issue_token(people.bob)
    _, other = actions.issue_token(people.bob)
    client = program(text)
    assert [client.get("/api/v1/me").status_code for _ in range(4)] == [200, 200, 200, 429]
    answer = client.get("/api/v1/openapi.json")
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "too_many"
    assert program(other).get("/api/v1/me").status_code == 200
    now[0] += int(answer["Retry-After"]) - 1.5
    assert client.get("/api/v1/me").status_code == 429
    now[0] += 1.5
    assert client.get("/api/v1/me").status_code == 200
    assert client.get("/api/v1/me").status_code == 429


@given(
    per_minute=st.integers(1, 1000),
    waits=st.lists(st.floats(0, 90, allow_nan=False), min_size=1, max_size=30),
)
def test_the_named_moment_is_one_in_which_a_request_fits(
    per_minute: int, waits: list[float]
) -> None:
    """Whatever came before."""
    now = [0.0]
    buckets = rates.Buckets(per_minute, clock=lambda: now[0])
    for wait in waits:
        now[0] += wait
        for _ in range(per_minute + 1):
            try:
                buckets.take("a")
            except TooMany as refused:
                now[0] += refused.details["retry_after_s"]
                buckets.take("a")
                break


def test_the_schema_is_for_users(people: People) -> None:
    """A stranger gets neither the schema nor its page; a session and a token do."""
    assert Client().get("/api/v1/openapi.json").status_code == 401
    assert Client().get("/api/v1/docs")["Location"].startswith("/login/?next=")
    client, _ = log_in("carol")
    assert client.get("/api/v1/openapi.json").json()["info"]["title"] == "mmadmin"
    assert client.get("/api/v1/docs").status_code == 200
    _, text = actions.issue_token(people.carol)
    assert program(text).get("/api/v1/openapi.json").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "mm_panel:8000", "<b>x</b>"])
def test_an_unknown_host_is_refused_in_words(settings: Any, host: str) -> None:
    """400, for programs in the API's shape, with what to do and without markup of theirs."""
    settings.ALLOWED_HOSTS = ["mm.example.org", "localhost"]
    page = Client().get("/login/", headers={"host": host})
    assert page.status_code == 400
    assert b"MM_ALLOWED_HOSTS" in page.content
    assert b"<b>x" not in page.content
    answer = Client().get("/api/v1/me", headers={"host": host})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["details"]["host"] == host
    assert "MM_ALLOWED_HOSTS" in error["remedy"]
    assert Client().get("/api/v1/me", headers={"host": "localhost"}).status_code == 401


def test_viewers_do_not_see_keys_in_usage(people: People) -> None:
    """Neither grouped by key nor of one key, on the page, as CSV or by the API; nor of a request."""
    now = timezone.now()
    UsageEvent.objects.create(id="req-k", at=now, key_id="abc", generation=2, status=200)
    viewer, _ = log_in("carol")
    operator, _ = log_in("bob")
    span = "since=2026-01-01T00:00:00Z&until=2027-01-01T00:00:00Z"
    for path in (
        "/usage/?by=key",
        "/usage/?by=key&csv",
        "/usage/?key=abc",
        f"/api/v1/usage?{span}&by=key",
        f"/api/v1/usage?{span}&key_id=abc",
    ):
        assert operator.get(path).status_code == 200, path
        assert viewer.get(path).status_code == 403, path
    assert b'value="key"' not in viewer.get("/usage/").content
    assert operator.get("/api/v1/requests/req-k").json()["key_id"] == "abc"
    assert viewer.get("/api/v1/requests/req-k").json()["key_id"] == ""


# --- the record


def test_comings_and_goings_are_recorded(people: People) -> None:
    """Login, failure, lock-out and logout, each with whom and from where; no name that is none."""
    client, _ = log_in("bob")
    client.post("/logout/")
    for _ in range(attempts.TRIES):
        log_in("bob", "wrong")
    log_in("my-password-in-the-wrong-field", "x")
    rows = AuditEvent.objects.filter(verb__startswith="session.").order_by("pk")
    verbs = [row.verb for row in rows]
    assert verbs == [
        "session.login",
        "session.logout",
        *["session.failed"] * attempts.TRIES,
        "session.lockout",
        "session.failed",
    ]
    assert {row.address for row in rows} == {"10.0.0.1"}
    assert {row.subject for row in rows} == {"user:bob", "user"}
    assert not [row for row in rows if "wrong-field" in row.summary + row.subject]


@pytest.mark.parametrize("password", ["samuelson", "samuelson1234", "83920174123456", "short"])
def test_weak_passwords_are_refused(people: People, password: str) -> None:
    """Too short, all digits, or like the name."""
    with pytest.raises(InvalidInput) as refused:
        actions.create_user(people.alice, username="samuelson", password=password)
    assert refused.value.details["field"] == "password"


def test_the_raw_records_are_for_admins_by_role(people: People) -> None:
    """An admin made under People opens them, others read why not; groups cannot be added."""
    actions.create_user(people.alice, username="dana", password=NEW, role="admin")
    admin, _ = log_in("dana", NEW)
    assert admin.get("/admin/").status_code == 200
    assert admin.get("/admin/deployments/user/").status_code == 200
    assert admin.get("/admin/auth/group/add/").status_code == 404
    assert admin.get("/admin/password_change/")["Location"] == "/account/"
    operator, _ = log_in("bob")
    assert operator.get("/admin/", follow=True).status_code == 403
    assert Client().get("/admin/", follow=True).redirect_chain[-1][0].startswith("/login/")
    admin.post("/admin/logout/")
    assert not Session.objects.filter(user_id=User.objects.get(username="dana").pk).exists()
