"""The API: every endpoint with the one who may and the one who may not, and one error shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client
from django.utils import timezone

from deployments import actions, queries, tasks
from deployments.api import api
from deployments.models import (
    Activation,
    AuditEvent,
    Build,
    BuildStep,
    ClientKey,
    Deployment,
    Generation,
    Replica,
    Role,
    Transition,
    Trial,
    UsageBucket,
    UsageEvent,
    User,
)
from mmadmin.core.generations.lifecycle import GenerationState, JobState
from tests.deployments import machines
from tests.deployments.conftest import PASSWORD, People
from tests.deployments.specs import spec
from tests.support.reports import report

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("toy_machine")]


@dataclass
class World:
    """Something of everything."""

    people: People
    key_id: str
    build: int
    failed_build: int
    activation: int
    queued_activation: int
    trial: int
    search: int
    task: int
    request: str
    token_id: str
    asked: int


@pytest.fixture
def world(people: People) -> World:
    """A deployment with a live and a retired generation, a failed third, a key and a token."""
    for number, state in ((1, "retired"), (2, "live"), (3, "failed")):
        generation = actions.deploy(people.bob, spec(context=1024 * number), reason=f"r{number}")
        system = f"{number:064}-system" if number < 3 else ""
        Generation.objects.filter(pk=generation.pk).update(
            state=state, system=system, graph={"derivations": {}}
        )
        build = generation.builds.get()
        ended = JobState.SUCCEEDED if number < 3 else JobState.FAILED
        error = {"code": "failed", "message": "no", "remedy": "", "details": {}}
        Build.objects.filter(pk=build.pk).update(state=ended, error=error if number == 3 else None)
        BuildStep.objects.create(
            build=build, position=0, derivation=f"{number:064}", name="m", recipe="fetch"
        )
        Transition.objects.create(
            generation=generation, before="probing", after="live", actor=people.bob
        )
    deployment = Deployment.objects.get()
    live = deployment.generations.get(number=2)
    Deployment.objects.update(live=live)
    report(live, command=["engine", "--port", "0"])
    Replica.objects.create(uid="smol-2-a", generation=live, host=deployment.host, state="ready")
    ended = Activation.objects.create(
        deployment=deployment,
        target=live,
        kind="activate",
        state=JobState.SUCCEEDED,
        host=deployment.host,
        actor=people.bob,
        phases=[{"phase": "start", "started": timezone.now().isoformat(), "ended": None}],
    )
    other = actions.deploy(people.bob, spec(name="other", public_name="other"), reason="")
    Generation.objects.filter(pk=other.pk).update(state="built", system="a-system")
    queued_activation = actions.activate(people.bob, "other", 1)
    key, _ = actions.issue_key(people.alice, owner="Dora")
    token, _ = actions.issue_token(people.alice, note="script")
    queued = actions.deploy(people.bob, spec(context=9999), reason="r4").builds.get()
    actions.set_rule(people.alice, "index", "torch", allow=False)
    return World(
        people,
        key.key_id,
        queued.pk,
        Build.objects.get(generation__number=3).pk,
        ended.pk,
        queued_activation.pk,
        Trial.objects.create(
            deployment=other.deployment, generation=other, host=deployment.host
        ).pk,
        actions.search_hub(people.bob, "owner/name").pk,
        actions.start_task(people.bob, "store-collect").pk,
        UsageEvent.objects.create(id="req-x", at=timezone.now(), generation=2, status=200).pk,
        token.token_id,
        actions.request_exception(people.bob, "folder", "/srv", reason="x").pk,
    )


def ask(method: str, path: str, user: User | None, body: Any = None) -> Any:
    """A request of a person who is logged in, or of nobody."""
    client = Client(raise_request_exception=False)
    if user:
        client.force_login(user)
    if body is None:
        return client.generic(method, f"/api/v1{path}")
    return client.generic(
        method, f"/api/v1{path}", data=json.dumps(body), content_type="application/json"
    )


SEARCH = {"kind": "hub-search", "params": {"repo": "owner/name"}}
ADM, OPR, VIE = Role.ADMIN, Role.OPERATOR, Role.VIEWER
ENDPOINTS: list[tuple[str, str, Any, int, Role]] = [
    ("GET", "/deployments", None, 200, VIE),
    ("GET", "/deployments?archived=true", None, 200, VIE),
    ("POST", "/deployments", {"spec_toml": spec(context=77), "reason": "x"}, 201, OPR),
    ("GET", "/deployments/smol", None, 200, VIE),
    ("PATCH", "/deployments/smol", {"keep_generations": 7}, 200, OPR),
    ("GET", "/deployments/smol/history", None, 200, VIE),
    ("GET", "/deployments/smol/measured", None, 200, VIE),
    ("GET", "/deployments/smol/generations/2/log", None, 200, OPR),
    ("GET", "/deployments/smol/generations/2", None, 200, VIE),
    ("GET", "/deployments/smol/generations/2/reports/command", None, 200, VIE),
    ("GET", "/deployments/smol/diff?a=1&b=2", None, 200, VIE),
    ("GET", "/deployments/smol/export", None, 200, VIE),
    ("GET", "/requests/{request}", None, 200, VIE),
    ("GET", "/deployments/smol/preview?to=1", None, 200, VIE),
    ("POST", "/deployments/smol/activate", {"number": 1, "reason": "x"}, 202, OPR),
    ("POST", "/deployments/smol/rollback", {"reason": "worse"}, 202, OPR),
    ("POST", "/deployments/smol/stop", {"reason": "x"}, 202, OPR),
    ("POST", "/deployments/smol/archive", {"on": False}, 200, OPR),
    ("POST", "/deployments/smol/generations/1/pin", {"on": True}, 200, OPR),
    ("POST", "/deployments/smol/generations/1/mark", {"mark": "good"}, 200, OPR),
    ("POST", "/deployments/smol/generations/1/rebuild", None, 202, OPR),
    ("POST", "/deployments/smol/generations/1/trial", {"minutes": 5}, 202, OPR),
    ("GET", "/trials", None, 200, VIE),
    ("GET", "/trials/{trial}", None, 200, VIE),
    ("POST", "/trials/{trial}/end", None, 202, OPR),
    ("POST", "/plans", {"spec_toml": spec()}, 202, OPR),
    ("GET", "/builds", None, 200, VIE),
    ("GET", "/builds?deployment=smol", None, 200, VIE),
    ("GET", "/builds/{build}", None, 200, VIE),
    ("GET", "/builds/{build}/log", None, 200, VIE),
    ("POST", "/builds/{build}/cancel", None, 202, OPR),
    ("POST", "/builds/{failed_build}/retry", None, 202, OPR),
    ("GET", "/activations", None, 200, VIE),
    ("GET", "/activations/{activation}", None, 200, VIE),
    ("GET", "/activations/{activation}/log", None, 200, VIE),
    ("POST", "/activations/{queued_activation}/cancel", None, 202, OPR),
    ("GET", "/keys", None, 200, OPR),
    ("POST", "/keys", {"owner": "Eve", "deployments": ["smol"], "rpm": 5}, 201, ADM),
    ("GET", "/keys/{key_id}", None, 200, OPR),
    ("GET", "/keys/{key_id}/events", None, 200, OPR),
    ("PATCH", "/keys/{key_id}", {"note": "for tests"}, 200, ADM),
    ("POST", "/keys/{key_id}/revoke", None, 200, ADM),
    ("POST", "/keys/{key_id}/suspend", {"on": True}, 200, ADM),
    ("POST", "/keys/{key_id}/rotate", {"overlap_s": 60}, 201, ADM),
    ("GET", "/me", None, 200, VIE),
    ("GET", "/users", None, 200, ADM),
    ("POST", "/users", {"username": "dave", "password": PASSWORD, "role": "viewer"}, 201, ADM),
    ("PATCH", "/users/carol", {"role": "operator"}, 200, ADM),
    ("GET", "/tokens", None, 200, VIE),
    ("POST", "/tokens", {"note": "mine"}, 201, VIE),
    ("GET", "/sessions", None, 200, VIE),
    ("POST", "/sessions/end-others", None, 200, VIE),
    ("GET", "/catalog", None, 200, VIE),
    ("GET", "/store", None, 200, VIE),
    ("GET", "/requests?key_id={key_id}&deployment=smol", None, 200, OPR),
    ("GET", "/hosts", None, 200, VIE),
    ("GET", "/hosts/local/tasks", None, 200, VIE),
    ("POST", "/hosts/local/tasks", {"kind": "doctor"}, 202, OPR),
    ("POST", "/hosts/local/tasks", SEARCH, 202, OPR),
    ("GET", "/tasks/{search}", None, 200, OPR),
    ("GET", "/tasks/{task}", None, 200, VIE),
    ("GET", "/tasks/{task}/log", None, 200, VIE),
    ("POST", "/tasks/{task}/cancel", None, 202, OPR),
    ("GET", "/alarms", None, 200, VIE),
    ("GET", "/audit", None, 200, OPR),
    ("GET", "/policy", None, 200, OPR),
    ("GET", "/policy/decision?kind=hub&subject=a/b", None, 200, OPR),
    ("PUT", "/policy", {"kind": "hub", "pattern": "a/b", "allow": False}, 200, ADM),
    ("POST", "/policy/remove", {"kind": "index", "pattern": "torch"}, 200, ADM),
    ("GET", "/policy/requests", None, 200, OPR),
    (
        "POST",
        "/policy/requests",
        {"kind": "hub", "pattern": "a/b", "reason": "x"},
        201,
        OPR,
    ),
    ("POST", "/policy/requests/{asked}/answer", {"grant": True}, 200, ADM),
    ("GET", "/usage?since=2026-01-01T00:00:00Z&until=2027-01-01T00:00:00", None, 200, VIE),
    ("GET", "/usage.csv?by=owner", None, 200, OPR),
    ("GET", "/metrics", None, 200, VIE),
]
BELOW = {Role.ADMIN: "bob", Role.OPERATOR: "carol"}
AT = {Role.ADMIN: "alice", Role.OPERATOR: "bob", Role.VIEWER: "carol"}


def check_error(response: Any, status: int, code: str) -> None:
    """The one shape."""
    assert response.status_code == status, response.content
    error = response.json()["error"]
    assert set(error) == {"code", "message", "remedy", "details"}
    assert error["code"] == code
    assert error["message"]


@pytest.mark.parametrize(("method", "path", "body", "status", "role"), ENDPOINTS)
def test_who_may_and_who_may_not(  # noqa: PLR0917 (a line of the table)
    world: World, method: str, path: str, body: Any, status: int, role: Role
) -> None:
    """The lowest role that may gets its answer; one below, and strangers, are refused with a message."""
    path = path.format(**vars(world))
    check_error(ask(method, path, None, body), 401, "unauthenticated")
    check_error(ask(method, path, world.people.charlie, body), 401, "unauthenticated")
    if role in BELOW:
        before = AuditEvent.objects.exclude(verb="session.login").count()
        refused = ask(method, path, getattr(world.people, BELOW[role]), body)
        check_error(refused, 403, "refused")
        written = AuditEvent.objects.exclude(verb="session.login").count()
        assert written == before
    allowed = ask(method, path, getattr(world.people, AT[role]), body)
    assert allowed.status_code == status, allowed.content


def test_every_endpoint_is_tested() -> None:
    """An operation of the schema without a line above fails this test."""
    tested = {
        (method, "/".join("{}" if part.isdigit() or part[:1] == "{" else part for part in parts))
        for method, path, *_ in ENDPOINTS
        for parts in [path.split("?")[0].split("/")]
    }
    named = {"smol": "{}", "carol": "{}", "local": "{}", "command": "{}"}
    tested = {
        (method, "/".join(named.get(part, part) for part in path.split("/")))
        for method, path in tested
    }
    elsewhere = {
        ("POST", "/tokens/{}/revoke"),
        ("POST", "/sessions/{}/end"),
        ("GET", "/deployment-file.schema.json"),
    }
    declared = {
        (
            method.upper(),
            "/".join("{}" if p[:1] == "{" else p for p in path.removeprefix("/api/v1").split("/")),
        )
        for path, operations in api.get_openapi_schema()["paths"].items()
        for method in operations
    }
    assert declared - elsewhere == tested


MISSING = [
    ("GET", "/deployments/none"),
    ("GET", "/deployments/smol/generations/99"),
    ("GET", "/deployments/smol/preview?to=99"),
    ("GET", "/builds/999999"),
    ("GET", "/builds/999999/log"),
    ("POST", "/builds/999999/cancel"),
    ("GET", "/activations/999999"),
    ("GET", "/trials/999999"),
    ("POST", "/trials/999999/end"),
    ("GET", "/keys/none"),
    ("GET", "/keys/none/events"),
    ("POST", "/keys/none/revoke"),
    ("POST", "/tokens/none/revoke"),
    ("POST", "/sessions/none/end"),
    ("GET", "/nothing/like/this"),
]


@pytest.mark.parametrize(("method", "path"), MISSING)
def test_what_is_not_there(world: World, method: str, path: str) -> None:
    """404 in the one shape."""
    check_error(ask(method, path, world.people.alice), 404, "not_found")


def test_a_strangers_token_is_not_there(world: World) -> None:
    """Whose token it is stays unknown to others; its owner may end it."""
    path = f"/tokens/{world.token_id}/revoke"
    check_error(ask("POST", path, world.people.bob), 404, "not_found")
    assert ask("POST", path, world.people.alice).status_code == 200


def test_bad_input(world: World) -> None:
    """422 with the field, for bodies, queries and deployment files alike."""
    bob, alice = world.people.bob, world.people.alice
    check_error(ask("POST", "/deployments", bob, {"spec_toml": "x = "}), 422, "invalid_spec")
    check_error(ask("POST", "/deployments", bob, {"reason": "x"}), 422, "invalid_input")
    check_error(ask("POST", "/keys", alice, {"owner": "x", "rmp": 3}), 422, "invalid_input")
    answer = ask("POST", "/keys", alice, {"owner": "x", "rmp": 3})
    assert answer.json()["error"]["message"] == "rmp: there is no such field"
    check_error(ask("POST", "/keys", alice, {"owner": " "}), 422, "invalid_input")
    check_error(ask("GET", "/builds?page=0", bob), 422, "invalid_input")
    long = {"minutes": 100_000}
    check_error(
        ask("POST", "/deployments/smol/generations/1/trial", bob, long), 422, "invalid_input"
    )
    missing = ask("POST", "/deployments/smol/rollback", bob, {})
    check_error(missing, 422, "invalid_input")
    assert missing.json()["error"]["details"]["problems"][0]["field"].endswith("reason")
    empty = ask("POST", "/deployments/smol/rollback", bob, {"reason": " "})
    check_error(empty, 422, "invalid_input")
    unknown = ask("POST", "/keys", alice, {"owner": "x", "deployments": ["none"]})
    check_error(unknown, 422, "invalid_input")


def test_a_database_that_is_held(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 in words, on pages too: it is no bug, and passes."""

    def held(*_: Any, **__: Any) -> None:
        raise OperationalError("database is locked")

    monkeypatch.setattr(actions, "pin", held)
    monkeypatch.setattr(queries, "deployments_overview", held)
    path = "/deployments/smol/generations/1/pin"
    check_error(ask("POST", path, world.people.bob, {"on": True}), 503, "unreachable")
    browser = Client()
    browser.force_login(world.people.bob)
    page = browser.get("/")
    assert page.status_code == 503
    assert "database is not responding" in page.content.decode()


def test_a_body_that_is_too_large(world: World) -> None:
    """413 in words, and not our bug."""
    body = {"spec_toml": "#" * 3_000_000, "reason": ""}
    check_error(ask("POST", "/deployments", world.people.bob, body), 413, "invalid_input")


def test_requests_and_budgets_are_told_by_key(world: World) -> None:
    """What a key asked, one by one and as tokens of the day and the month."""
    now = timezone.now()
    UsageEvent.objects.create(
        id="req-y", at=now, generation=2, status=200, key_id=world.key_id, deployment="smol"
    )
    UsageBucket.objects.create(
        hour=now.replace(minute=0, second=0, microsecond=0),
        key_id=world.key_id,
        deployment="smol",
        endpoint="chat",
        prompt_tokens=30,
        completion_tokens=12,
    )
    bob = world.people.bob
    found = ask("GET", f"/requests?key_id={world.key_id}", bob).json()
    assert [row["id"] for row in found["rows"]] == ["req-y"]
    assert [row["id"] for row in ask("GET", "/requests", bob).json()["rows"]] == ["req-y", "req-x"]
    one = ask("GET", f"/keys/{world.key_id}", bob).json()
    assert (one["used_today"], one["used_this_month"]) == (42, 42)
    assert one in ask("GET", "/keys", bob).json()["rows"]


def test_a_playground_key_is_one_s_own_and_ends(world: World) -> None:
    """A viewer gets one for an hour; the next one ends it."""
    first, _ = actions.playground_key(world.people.carol)
    second, text = actions.playground_key(world.people.carol)
    rows = {row["id"]: row for row in ask("GET", "/keys", world.people.bob).json()["rows"]}
    assert (rows[first.key_id]["state"], rows[second.key_id]["state"]) == ("revoked", "active")
    assert text.startswith("sk-mm-")
    assert second.expires_at
    assert rows[second.key_id]["rpm"] > 0


def test_the_catalog_can_be_deployed(world: World) -> None:
    """Its files are deployment files."""
    found = {row["name"]: row for row in ask("GET", "/catalog", world.people.bob).json()}
    body = {"spec_toml": found["smollm2-135m"]["spec_toml"], "reason": "from the catalog"}
    assert ask("POST", "/deployments", world.people.bob, body).status_code == 201


def test_the_store_is_told(world: World) -> None:
    """Objects, sizes, and what keeps them."""
    machine = machines.ToyMachine()
    build = actions.deploy(world.people.bob, spec(name="kept", public_name="kept"), reason="")
    tasks.run_build(build.builds.get().pk)
    told = ask("GET", "/store", world.people.carol).json()
    system = Generation.objects.get(deployment__name="kept").system
    assert machine.store().object(system) is not None
    by_name = {row["name"]: row for row in told["objects"]}
    assert by_name[system]["keepers"]
    assert told["total_bytes"] >= max(row["size_bytes"] for row in told["objects"])


def test_conflicts(world: World) -> None:
    """409 when the state does not allow it."""
    bob = world.people.bob
    check_error(ask("POST", "/deployments/smol/activate", bob, {"number": 2}), 409, "conflict")
    check_error(ask("POST", "/deployments/smol/activate", bob, {"number": 3}), 409, "conflict")
    check_error(ask("POST", "/deployments/smol/archive", bob, {"on": True}), 409, "conflict")
    check_error(ask("POST", "/deployments/smol/generations/2/trial", bob, {}), 409, "conflict")
    taken = spec(name="other")
    check_error(ask("POST", "/deployments", bob, {"spec_toml": taken}), 409, "conflict")


@pytest.mark.parametrize("of", ["after", "step"])
def test_a_number_beyond_every_database_is_refused_in_words(world: World, of: str) -> None:
    """It is the caller's error, not ours."""
    response = ask("GET", f"/builds/{world.build}/log?{of}={2**63}", world.people.alice)
    check_error(response, 422, "invalid_input")


def test_a_bug_has_the_same_shape(world: World, monkeypatch, caplog) -> None:
    """500, no traceback in the answer, one in the log."""
    monkeypatch.setattr("deployments.queries.hosts", lambda _actor: 1 / 0)
    response = ask("GET", "/hosts", world.people.carol)
    check_error(response, 500, "errored")
    assert "ZeroDivision" not in response.content.decode()
    assert "ZeroDivisionError" in caplog.text


def test_tokens(world: World) -> None:
    """A personal token works until it is revoked, expires, or its person is switched off."""
    token, text = actions.issue_token(world.people.bob, note="ci")
    client = Client(headers={"authorization": f"Bearer {text}"})
    assert client.get("/api/v1/me").json()["username"] == "bob"
    token.refresh_from_db()
    assert token.last_used_at is not None
    other = "1" if text.endswith("0") else "0"
    mistyped = Client(headers={"authorization": f"Bearer {text[:-1]}{other}"})
    assert mistyped.get("/api/v1/me").status_code == 401
    other = Client(headers={"authorization": f"Bearer {text.replace('pat-mm', 'sk-mm')}"})
    assert other.get("/api/v1/me").status_code == 401
    User.objects.filter(username="bob").update(is_active=False)
    assert client.get("/api/v1/me").status_code == 401
    User.objects.filter(username="bob").update(is_active=True)
    token.expires_at = timezone.now() - timedelta(seconds=1)
    token.save()
    assert client.get("/api/v1/me").status_code == 401
    token.expires_at = None
    token.save()
    assert client.get("/api/v1/me").status_code == 200
    actions.revoke_token(world.people.bob, token.token_id)
    assert client.get("/api/v1/me").status_code == 401


def test_one_s_own_logins(world: World) -> None:
    """Listed without their keys; ended one by one by their owner only, or all but the present one."""
    here, there, third, strange = (Client() for _ in range(4))
    for client in (here, there, third):
        client.force_login(world.people.bob)
    strange.force_login(world.people.carol)
    listed = here.get("/api/v1/sessions").json()["rows"]
    assert [row["present"] for row in listed].count(True) == 1
    assert len(listed) == 3
    keys = [client.session.session_key for client in (here, there, third, strange)]
    assert not any(key in json.dumps(listed) for key in keys)
    ids = {row["id"] for row in listed if not row["present"]}
    others = ask("GET", "/sessions", world.people.carol).json()["rows"]
    assert not ids & {row["id"] for row in others}
    first = ids.pop()
    check_error(ask("POST", f"/sessions/{first}/end", world.people.carol), 404, "not_found")
    assert here.post(f"/api/v1/sessions/{first}/end").json() == {"ended": 1}
    check_error(here.post(f"/api/v1/sessions/{first}/end"), 404, "not_found")
    left = [c for c in (there, third) if c.get("/api/v1/me").status_code == 200]
    assert len(left) == 1
    assert here.post("/api/v1/sessions/end-others").json() == {"ended": 1}
    assert left[0].get("/api/v1/me").status_code == 401
    assert here.get("/api/v1/me").status_code == 200
    _, text = actions.issue_token(world.people.alice, scopes=["admin"])
    alice = Client()
    alice.force_login(world.people.alice)
    program = Client(headers={"authorization": f"Bearer {text}"})
    assert program.post("/api/v1/sessions/end-others").json() == {"ended": 1}
    assert alice.get("/api/v1/me").status_code == 401
    assert strange.get("/api/v1/me").status_code == 200


@pytest.mark.parametrize("credential", ["", "Bearer pat-mm-wrong", "Basic d3Jvbmc6d3Jvbmc="])
def test_a_wrong_credential_is_no_matter_of_csrf(world: World, credential: str) -> None:
    """A program without a session is told that nobody is known, of reads and writes alike."""
    client = Client(enforce_csrf_checks=True)
    headers = {"authorization": credential} if credential else {}
    for answer in (
        client.get("/api/v1/keys", headers=headers),
        client.post(f"/api/v1/keys/{world.key_id}/revoke", headers=headers),
    ):
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "unauthenticated"


def test_the_session_needs_csrf(world: World) -> None:
    """The panel's session writes only with its CSRF token."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(world.people.alice)
    assert client.get("/api/v1/me").status_code == 200
    refused = client.post(f"/api/v1/keys/{world.key_id}/revoke")
    check_error(refused, 403, "refused")
    assert ClientKey.objects.get(key_id=world.key_id).revoked_at is None
    client.get("/login/")
    csrf = client.cookies["csrftoken"].value if "csrftoken" in client.cookies else ""
    if csrf:
        allowed = client.post(f"/api/v1/keys/{world.key_id}/revoke", headers={"x-csrftoken": csrf})
        assert allowed.status_code == 200


def test_the_whole_story_by_api(world: World) -> None:
    """Deploy, look, issue a key whose text is seen once, revoke; the audit log tells it."""
    bob, alice = world.people.bob, world.people.alice
    made = ask("POST", "/deployments", bob, {"spec_toml": spec(context=512), "reason": "new"})
    assert made.json()["number"] == 5
    row = ask("GET", "/deployments/smol", bob).json()
    assert (row["live_generation"], row["newest_generation"], row["state"]) == (2, 5, "live")
    key = ask("POST", "/keys", alice, {"owner": "Fay", "rpm": 9}).json()
    assert key["key"].startswith(f"sk-mm-{key['id']}-")
    seen = ask("GET", f"/keys/{key['id']}", alice)
    assert key["key"] not in seen.content.decode()
    assert seen.json()["rpm"] == 9
    assert ask("POST", f"/keys/{key['id']}/revoke", alice).json()["state"] == "revoked"
    verbs = [row["verb"] for row in ask("GET", f"/keys/{key['id']}/events", alice).json()]
    assert verbs == ["key.revoke", "key.issue"]
    audit = ask("GET", "/audit?verb=key.&user=alice&search=Fay", alice).json()
    assert audit["total"] == 2
    assert audit["rows"][0]["address"] == "127.0.0.1"
    history = ask("GET", "/deployments/smol/history", bob).json()
    assert [g["number"] for g in history["rows"]] == [5, 4, 3, 2, 1]
    assert history["rows"][3]["is_live"]
    assert Generation.objects.get(number=5).state == GenerationState.PLANNED


def test_input_that_only_looks_valid_is_refused(people: People) -> None:
    """Nesting without end, moments beyond the calendar, and truth values as numbers: 4xx, no 500."""
    deep = "{a=" * 20_000 + "1" + "}" * 20_000
    text = f"{spec()}\n[serve]\nchat_template_kwargs = {deep}\n"
    for path, body in (
        ("/plans", {"spec_toml": text}),
        ("/deployments", {"spec_toml": text, "reason": "x"}),
    ):
        assert ask("POST", path, people.bob, body).status_code == 422
    kwargs = f"{spec()}\n[serve.chat_template_kwargs]\nx = {'[' * 900}{']' * 900}\n"
    assert ask("POST", "/plans", people.bob, {"spec_toml": kwargs}).status_code in (
        200,
        201,
        202,
        422,
    )
    for moment in ("9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00%2B14:00"):
        for name in ("since", "until"):
            answer = ask("GET", f"/usage?{name}={moment}", people.bob)
            assert answer.status_code in (200, 422), (name, moment)
    for name in ("rpm", "tpm", "concurrency", "tokens_per_day", "tokens_per_month"):
        answer = ask("POST", "/keys", people.bob, {"owner": "x", name: True})
        assert answer.status_code == 422, name
    assert not ClientKey.objects.exists()


def test_the_schema_of_deployment_files_is_open_to_all(client: Client) -> None:
    """Editors cannot log in."""
    answer = client.get("/api/v1/deployment-file.schema.json")
    assert answer.status_code == 200
    assert "name" in answer.json()["required"]
