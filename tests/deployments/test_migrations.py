"""What an upgrade makes of rows that an earlier version wrote."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.test import Client

from deployments import actions
from deployments.models import (
    Deployment,
    GenerationReport,
    HostTask,
    Replica,
    Session,
    UsageBucket,
    UsageDay,
    User,
    UserToken,
)
from mmadmin.core import access

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]


@pytest.fixture
def migrate() -> Iterator[Any]:
    """Migrate to a named state and get its models; afterwards the newest state is back."""

    def to(name: str) -> Any:
        executor = MigrationExecutor(connection)
        return executor.migrate([("deployments", name)]).apps

    yield to
    executor = MigrationExecutor(connection)
    executor.migrate(executor.loader.graph.leaf_nodes("deployments"))


def test_a_process_by_the_clock_becomes_unknown(migrate: Any) -> None:
    """The start by the time of day is dropped, so that no process is mistaken for the engine."""
    old = migrate("0001_initial")
    user = old.get_model("deployments", "User").objects.create(username="a")
    host = old.get_model("deployments", "Host").objects.create(name="h")
    deployment = old.get_model("deployments", "Deployment").objects.create(
        name="d", public_name="d", host=host
    )
    generation = old.get_model("deployments", "Generation").objects.create(
        deployment=deployment, number=1, spec_toml="", author=user, reason=""
    )
    replica = old.get_model("deployments", "Replica").objects.create(
        uid="d.1.x", generation=generation, host=host, port=1, pid=7, pid_started=1764518400.25
    )
    migrate("0002_replica_process")
    assert Replica.objects.values_list("pid", "started", "boot").get(pk=replica.pk) == (7, None, "")
    assert Replica.objects.only("pid", "started", "boot").get(pk=replica.pk).process is None


def test_refusals_are_taken_out_of_the_requests(migrate: Any) -> None:
    """In the hours and in the days, as far as single requests are still recorded."""
    old = migrate("0019_engines_on_sockets")
    midnight = AT.replace(hour=0)

    def make(model: str, **fields: Any) -> None:
        old.get_model("deployments", model).objects.create(**fields)

    named = {"key_id": "k1", "deployment": "d", "generation": 2, "endpoint": "chat"}
    for number, outcome in enumerate(("ok", "refused", "refused", "cancelled")):
        at = AT + timedelta(minutes=number)
        make("UsageEvent", id=f"r{number}", at=at, status=200, outcome=outcome, **named)
    make("UsageBucket", hour=AT, requests=9, **named)
    make("UsageDay", day=midnight, of="all", requests=9)
    make("UsageDay", day=midnight, of="key", key_id="k1", requests=9)
    make("UsageDay", day=midnight, of="key", key_id="k2", requests=9)
    migrate("0020_usage_refused")
    sums = ("requests", "refused", "cancelled")
    assert UsageBucket.objects.values_list(*sums).get() == (7, 2, 1)
    days = UsageDay.objects.order_by("pk").values_list(*sums)
    assert list(days) == [(7, 2, 1), (7, 2, 1), (9, 0, 0)]


NEWEST_OF_0_1 = "0011_step_waits_for"
"""The last migration before host tasks and reports."""
FILE = 'name = "d"\n[model]\nsource = "path"\npath = "/m-Q8_0.gguf"\n[keep]\ndays = 9\n'
REPORTS = {
    "command": ["llama-server", "--port", "0"],
    "template": "",
    "rendering": {"rows": [{"conversation": "plain", "diff": ""}]},
    "renders": {"plain": {"output": "a\u00e9"}},
    "model_report": {"architecture": "llama", "size_bytes": 2**40},
    "needs": {"devices": [0], "per_device": [2**33]},
    "probe_report": {"ok": True, "rows": []},
}
AT = datetime(2026, 11, 30, 12, tzinfo=UTC)


def fill(old: Any) -> None:
    """Rows of every kind, as the version before wrote them."""

    def make(model: str, **fields: Any) -> Any:
        return old.get_model("deployments", model).objects.create(**fields)

    user = make("User", username="ada", role="admin", password="x")
    host = make("Host", name="h", facts={"arch": "x86_64"})
    deployment = make(
        "Deployment", name="d", public_name="chat", host=host, keep_generations=3, created_by=user
    )
    first = make(
        "Generation", deployment=deployment, number=1, spec_toml=FILE, author=user, built_at=AT,
        state="retired", system=f"{'0' * 64}-s", lock={"model": []}, graph={"nodes": {}}, **REPORTS,
    )  # fmt: skip
    live = make(
        "Generation", deployment=deployment, number=2, spec_toml=FILE, author=user, parent=first,
        state="live", system=f"{'1' * 64}-s", reason="better", mark="good", pinned=True,
    )  # fmt: skip
    deployment.live = live
    deployment.save()
    make("Transition", generation=live, before="probing", after="live", actor=user, reason="go")
    of = {"deployment": deployment, "host": host, "actor": user}
    build = make("Build", generation=first, spec_toml=FILE, state="succeeded", plan={"a": 1}, **of)
    step = make("BuildStep", build=build, position=0, derivation="0" * 64, state="built")
    activation = make("Activation", target=live, previous=first, kind="activate", **of)
    make("LogChunk", build=build, step=step, text="compiled\n")
    make("LogChunk", activation=activation, text="went live\n")
    trial = make("Trial", generation=first, minutes=7, state="succeeded", **of)
    make(
        "Replica", uid="r", generation=live, host=host, port=21000, pid=5, started=9, state="ready"
    )
    make("Replica", uid="t", generation=first, host=host, port=21001, trial=trial, state="stopped")
    key = make("ClientKey", key_id="k1", digest="d" * 64, owner="Dora", rpm=5, created_by=user)
    make("ClientKey", key_id="k2", digest="e" * 64, owner="Dora", rotated_from=key)
    make("UserToken", user=user, token_id="t1", digest="f" * 64)
    make("Alarm", deployment=deployment, generation=live, kind="drift", subject="argv", message="x")
    make("UsageEvent", id="req-1", at=AT, status=200, prompt_tokens=3)
    make("UsageBucket", hour=AT, key_id="k1", deployment="d", requests=1)
    make("UsageDay", day=AT, of="all", requests=1)
    make("GateSpool", gate="g", acked_seq=4)
    make("Publication", version=17, digest="abc")
    make("AuditEvent", actor=user, verb="key.issue", subject="key:k1", details={"rpm": 5})
    job = {"host": host, "actor": user}
    make("Browse", repo="owner/gone", state="failed", error={"code": "not_found"},
         created_at=AT, **job)  # fmt: skip
    make("Browse", repo="owner/name", revision="v1", options={"context": 1}, state="succeeded",
         result={"offers": []}, created_at=AT + timedelta(hours=2), **job)  # fmt: skip
    make("Care", kind="gc-preview", state="succeeded", result={"freed_bytes": 1},
         created_at=AT + timedelta(hours=1), progress_total=8, **job)  # fmt: skip
    make("Care", kind="verify-contents", state="running", fence=2, attempts=1, progress_done=4,
         holder="m:1:2:b", created_at=AT + timedelta(hours=3), **job)  # fmt: skip


def rows_of(apps: Any) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, by model."""
    return {
        model.__name__: list(model.objects.order_by("pk").values())
        for model in apps.get_app_config("deployments").get_models()
    }


MOVED = {"Browse", "Care", "HostTask", "GenerationReport"}
STARTED_ANEW = {"Replica": {"port", "launch", "state"}, "Deployment": {"hold_until"}}
"""An engine on a TCP port is to be started on a socket, and its requests wait for that."""


def without(model: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row less what the move to sockets changes."""
    return {name: value for name, value in row.items() if name not in STARTED_ANEW.get(model, ())}


def test_an_installation_of_the_version_before_comes_up_whole(migrate: Any) -> None:
    """Every row stays as it was; searches and store care become tasks, columns become reports."""
    old = migrate(NEWEST_OF_0_1)
    fill(old)
    before = rows_of(old)
    assert all(rows for model, rows in before.items() if model != "Session")
    newest = MigrationExecutor(connection).loader.graph.leaf_nodes("deployments")[0][1]
    now = rows_of(migrate(newest))
    for model in before.keys() - MOVED:
        kept = [
            {name: value for name, value in without(model, row).items() if name not in REPORTS}
            for row in before[model]
        ]
        assert [
            {name: row[name] for name in was} for row, was in zip(now[model], kept, strict=True)
        ] == kept

    reports = list(GenerationReport.objects.order_by("kind"))
    assert {row.kind: row.content for row in reports} == REPORTS
    assert {(row.generation.number, row.at, row.format) for row in reports} == {(1, AT, 1)}
    tasks = list(HostTask.objects.order_by("pk"))
    assert [(task.kind, task.state) for task in tasks] == [
        ("hub-search", "failed"),
        ("store-preview", "succeeded"),
        ("hub-search", "succeeded"),
        ("store-verify-contents", "running"),
    ]
    assert tasks[2].params == {"repo": "owner/name", "revision": "v1", "options": {"context": 1}}
    assert (tasks[2].result, tasks[0].error) == ({"offers": []}, {"code": "not_found"})
    assert (tasks[3].fence, tasks[3].holder, tasks[3].progress_done) == (2, "m:1:2:b", 4)
    deployment = Deployment.objects.get()
    assert deployment.keep_days == 9
    assert deployment.hold_until is not None
    live = Replica.objects.get(uid="r")
    assert (live.state, live.launch, live.pid) == ("starting", {"port": 21000}, 5)


def test_and_back_again(migrate: Any) -> None:
    """What was carried over goes back to the old tables and columns."""
    old = migrate(NEWEST_OF_0_1)
    fill(old)
    before = rows_of(old)
    migrate(MigrationExecutor(connection).loader.graph.leaf_nodes("deployments")[0][1])
    after = rows_of(migrate(NEWEST_OF_0_1))
    by_time = {"Browse", "Care"}
    for model in before:
        order = (lambda row: row["created_at"]) if model in by_time else (lambda row: row["id"])
        kept = [sorted(rows[model], key=order) for rows in (before, after)] if before[model] else []
        for was, row in zip(*kept, strict=True) if kept else ():
            assert without(model, {**row, "id": 0}) == without(model, {**was, "id": 0})
            if model == "Replica" and was["state"] == "ready":
                assert row["port"] == was["port"]


def test_logins_and_tokens_survive_scopes(migrate: Any) -> None:
    """A browser stays logged in; a token keeps what its person's role could do, and has no end."""
    old = migrate("0015_drop_what_was_carried_over")
    now = datetime.now(UTC)
    texts = {}
    for name, role in (("ann", "admin"), ("otto", "operator"), ("vera", "viewer")):
        user = old.get_model("deployments", "User").objects.create(username=name, role=role)
        new = access.new_key(settings.KEY_PEPPER)
        text = texts[name] = f"pat-mm-{new.text.removeprefix('sk-mm-')}"
        digest = access.key_digest(text, settings.KEY_PEPPER)
        old.get_model("deployments", "UserToken").objects.create(
            user=user, token_id=new.key_id, digest=digest
        )
    ann = User(pk=old.get_model("deployments", "User").objects.get(username="ann").pk)
    data = {
        SESSION_KEY: str(ann.pk),
        BACKEND_SESSION_KEY: "django.contrib.auth.backends.ModelBackend",
        HASH_SESSION_KEY: ann.get_session_auth_hash(),
    }
    old.get_model("deployments", "Session").objects.create(
        session_key="k" * 32,
        session_data=SessionStore().encode(data),
        expire_date=now + timedelta(days=1),
        user_id=ann.pk,
        began_at=now,
    )
    [(_, newest)] = MigrationExecutor(connection).loader.graph.leaf_nodes("deployments")
    migrate(newest)
    assert UserToken.objects.filter(expires_at=None).count() == 3
    asks = {name: actions.token_user(text) for name, text in texts.items()}
    assert {name: user.scopes for name, user in asks.items() if user} == {
        "ann": {"read", "deploy", "keys", "admin"},
        "otto": {"read", "deploy"},
        "vera": {"read"},
    }
    client = Client()
    client.cookies[settings.SESSION_COOKIE_NAME] = Session.objects.get().session_key
    assert client.get("/api/v1/me").json()["username"] == "ann"
