"""Every address and API operation, asked by everybody: `tests/access_table.txt` says who may."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.db import transaction
from django.http import HttpRequest
from django.test import Client
from django.urls import URLPattern, get_resolver

from deployments import actions
from deployments.accounts import rates
from deployments.api import api
from deployments.models import Scope, User
from tests.deployments.conftest import People
from tests.deployments.test_api import ENDPOINTS, World, world  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("toy_machine")]

TABLE = Path(__file__).resolve().parents[1] / "access_table.txt"
API = "api/v1/"


@dataclass(frozen=True)
class Row:
    """A line of the table: methods, a route (`*` = any part), and the answer to each column."""

    methods: tuple[str, ...]
    route: str
    answers: dict[str, str]


def rows() -> Iterator[Row]:
    """The table's lines; a line that begins with `METHOD` names the columns of those below."""
    columns: list[str] = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "METHOD":
            columns = words[2:]
            continue
        assert len(words) == len(columns) + 2, line
        answers = dict(zip(columns, words[2:], strict=True))
        yield Row(tuple(words[0].split("/")), words[1], answers)


ROWS = list(rows())


def routes(patterns: Any = None, prefix: str = "") -> Iterator[str]:
    """The URLconf's routes, without those of the API."""
    for pattern in get_resolver().url_patterns if patterns is None else patterns:
        route = f"{prefix}{pattern.pattern}"
        if route == API:
            continue
        if isinstance(pattern, URLPattern):
            yield f"/{route}"
        else:
            yield from routes(pattern.url_patterns, route)


def operations() -> Iterator[tuple[str, str]]:
    """The API's operations, and its pages about itself."""
    for path, methods in api.get_openapi_schema()["paths"].items():
        for method in methods:
            yield method.upper(), path
    for path in ("docs", "openapi.json"):
        yield "GET", f"/{API}{path}"


def row_of(method: str, route: str) -> Row:
    """The line for an address. Fails where there is none: decide who may before adding a route."""
    found = [
        row
        for row in ROWS
        if method in row.methods
        and re.fullmatch(re.escape(row.route).replace(r"\*/", "[^/<]+/"), route)
    ]
    assert len(found) == 1, f"{method} {route}: {len(found)} lines in {TABLE.name}"
    return found[0]


@pytest.fixture
def ways_in(people: People, world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, Client]:  # noqa: F811
    """A client for each column."""

    async def keep_connection(_request: HttpRequest) -> None:
        """The test's transaction is on it."""

    monkeypatch.setattr("deployments.views.stream.let_go", keep_connection)
    monkeypatch.setattr("deployments.views.playground.let_go", keep_connection)
    monkeypatch.setattr(rates, "api_requests", rates.Buckets(10**9))

    def browser(user: User) -> Client:
        client = Client(raise_request_exception=False)
        client.force_login(user)
        return client

    def script(scope: Scope) -> Client:
        _, text = actions.issue_token(people.alice, scopes=[scope])
        return Client(headers={"authorization": f"Bearer {text}"}, raise_request_exception=False)

    found = {
        "nobody": Client(raise_request_exception=False),
        "viewer": browser(people.carol),
        "operator": browser(people.bob),
        "admin": browser(people.alice),
        "deactivated": browser(people.charlie),
    }
    return found | {f"{scope.value}-token": script(scope) for scope in Scope}


def answer_to(client: Client, method: str, path: str, body: Any) -> str:
    """The class of the answer, as the table calls it."""
    found, cookies = "", copy.deepcopy(client.cookies)
    with transaction.atomic():
        if path.startswith(f"/{API}") and body is not None:
            response = client.generic(method, path, json.dumps(body), "application/json")
        else:
            response = client.generic(method, path, body or "", "application/x-www-form-urlencoded")
        found = kind_of(response)
        transaction.set_rollback(True)  # nothing that a request did stays
    client.cookies = cookies
    if found.startswith("/"):
        return answer_to(client, "GET", found, None)
    return found


def kind_of(response: Any) -> str:
    """What an answer means for the person."""
    assert response.status_code < 500 or response.status_code == 503, response.content
    if response.status_code == 302:
        if response["Location"].startswith("/admin/login/"):
            return str(response["Location"])
        if response["Location"].startswith("/login/?next="):
            return "login"
        said = [str(message) for message in get_messages(response.wsgi_request)]
        return "no" if any("it requires the" in text for text in said) else "yes"
    if response.status_code == 422 and b'"field": "current_password"' in response.content:
        return "no"  # a token is not the person
    return KINDS.get(response.status_code, "yes")


KINDS = {403: "no", 401: "401", 405: "405", 204: "nothing"}


SAMPLES = {
    "name": "smol",
    "number": "1",
    "build_id": "{failed_build}",
    "activation_id": "{queued_activation}",
    "trial_id": "{trial}",
    "task_id": "{task}",
    "request_id": "{asked}",
    "key_id": "{key_id}",
    "token_id": "{token_id}",
    "username": "carol",
    "public_id": "0123456789abcdef",
    "kind": "store-collect",
    "object_id": "1",
    "content_type_id": "1",
    "app_label": "deployments",
    "url": "x",
    "rest": "nothing",
}
BODIES = {
    "/deployments/<str:name>/generations/<int:number>/pin/": "on=1",
    "/deployments/<str:name>/generations/<int:number>/mark/": "mark=good",
}


def address_of(route: str, ids: World) -> str:
    """An address of the route that leads to something."""
    if route.startswith("/hosts/"):
        route = route.replace("<str:name>", "local")
    plain = re.sub(r"\^|\$|\(\?P<(\w+)>[^)]*\)", lambda m: f"<{m[1]}>" if m[1] else "", route)
    filled = re.sub(r"<(?:\w+:)?(\w+)>", lambda m: SAMPLES[m[1]], plain)
    return filled.format(**vars(ids))


def sample_of(method: str, path: str) -> tuple[str, Any]:
    """An address and a body of an operation: those with which the API is tested."""
    pattern = re.compile(re.sub(r"\\{[^}]*\\}", "[^/?]+", re.escape(path)) + r"(\?.*)?$")
    for verb, sample, body, *_ in ENDPOINTS:
        if verb == method and pattern.match(f"/{API.rstrip('/')}{sample}"):
            return f"/{API.rstrip('/')}{sample}", body
    return re.sub(r"\{(\w+)\}", lambda m: SAMPLES.get(m[1], "0123456789abcdef"), path), None


def test_pages(ways_in: dict[str, Client], world: World) -> None:  # noqa: F811
    """Every page and every address of a form answers each person as the table says."""
    differs = {}
    for route in dict.fromkeys(routes()):
        for method in ("GET", "POST"):
            expected = row_of(method, route).answers
            path = address_of(route, world)
            body = BODIES.get(route, "") if method == "POST" else ""
            found = {
                who: answer_to(ways_in.get(who) or ways_in["admin-token"], method, path, body)
                for who in expected
            }
            differs |= {
                (method, path, who): found[who] for who in found if found[who] != expected[who]
            }
    assert not differs


def test_operations(ways_in: dict[str, Client], world: World) -> None:  # noqa: F811
    """Every operation of the API answers each person and each scope of an admin's token."""
    differs = {}
    for method, path in operations():
        expected = row_of(method, path.removeprefix("/api/v1")).answers
        address, body = sample_of(method, path)
        address = address.format(**vars(world))
        found = {who: answer_to(ways_in[who], method, address, body) for who in expected}
        differs |= {
            (method, address, who): found[who] for who in found if found[who] != expected[who]
        }
    assert not differs


def test_every_line_is_of_a_route() -> None:
    """A line whose route is gone goes, too."""
    pages = [(method, route) for route in routes() for method in ("GET", "POST")]
    known = pages + [(method, path.removeprefix("/api/v1")) for method, path in operations()]
    used = {(row.route, verb) for verb, route in known for row in [row_of(verb, route)]}
    assert used == {(row.route, method) for row in ROWS for method in row.methods}
