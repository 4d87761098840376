"""Who may take what from where: at a deploy, again when the build starts, and by whom it changes."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from deployments import actions, queries, tasks
from deployments.models import (
    AuditEvent,
    Build,
    Generation,
    PolicyRequest,
    PolicyRule,
    ReportKind,
    User,
)
from mmadmin.core.build.recipe import PathSource
from mmadmin.core.errors import Conflict, InvalidInput, NotFound, Refused, SourceRefused
from mmadmin.core.generations.lifecycle import GenerationState, JobState
from mmadmin.core.spec.lock import Lock, LockedFile, lock_as_json
from tests.deployments import machines
from tests.deployments.conftest import People
from tests.deployments.specs import spec
from tests.deployments.test_api import ask
from tests.deployments.test_migrations import migrate

__all__ = ["migrate"]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

SECRET = '\n[template]\nsource = "file"\nfile = "/etc/shadow"\n'


def rule(people: People, kind: str, pattern: str, *, allow: bool) -> PolicyRule:
    return PolicyRule.objects.create(kind=kind, pattern=pattern, allow=allow, by=people.alice)


@pytest.mark.parametrize("act", [actions.plan, actions.deploy])
def test_an_operator_cannot_name_a_file_of_the_host(people: People, host: Any, act: Any) -> None:
    """Nor can an admin through the panel: the rule comes first. Nothing is recorded."""
    more = {"reason": ""} if act is actions.deploy else {}
    for person in (people.bob, people.alice):
        with pytest.raises(SourceRefused) as refusal:
            act(person, spec() + SECRET, **more)
        assert refusal.value.details["rule"] == "folder /"
        assert refusal.value.details["field"] == "template.file"
        assert "alice" in refusal.value.remedy
    assert not Build.objects.exists()
    assert not Generation.objects.exists()
    rule(people, "folder", "/etc", allow=True)
    act(people.bob, spec() + SECRET, **more)


def test_mm_on_the_host_may_name_any_file(people: People, host: Any, settings: Any) -> None:
    """But only of the host on which it runs."""
    generation = actions.deploy(people.bob, spec() + SECRET, reason="", on_host=True)
    assert generation.builds.get().on_host
    settings.HOST_NAME = "elsewhere"
    with pytest.raises(SourceRefused):
        actions.deploy(people.bob, spec() + SECRET, reason="again", on_host=True)


def test_the_worker_checks_a_record_that_was_made_another_way(
    people: People, host: Any, toy_machine: None, broker: Any
) -> None:
    """Before anything is resolved, so nothing is read."""
    generation = actions.deploy(people.bob, spec(), reason="", activate=False)
    build = generation.builds.get()
    Build.objects.filter(pk=build.pk).update(spec_toml=spec() + SECRET)
    tasks.run_build(build.pk)
    build.refresh_from_db()
    assert build.state == JobState.FAILED
    assert build.error["code"] == "source_refused"
    assert "resolve" not in machines.done()


def test_a_lock_is_checked_as_well(
    people: People, host: Any, toy_machine: None, broker: Any
) -> None:
    """A lock in the record may name another place than the file does."""
    generation = actions.deploy(people.bob, spec(), reason="", activate=False)
    file = LockedFile("m.gguf", "0" * 64, 1, PathSource("/etc/shadow"))
    generation.lock = lock_as_json(Lock({"model": (file,)}))
    generation.save(update_fields=["lock"])
    build = generation.builds.get()
    tasks.run_build(build.pk)
    build.refresh_from_db()
    assert build.error["code"] == "source_refused"


def test_a_digest_is_refused_when_the_build_starts(
    people: People, host: Any, toy_machine: None, broker: Any
) -> None:
    """Only the lock tells what a hub's file is."""
    rule(people, "digest", "0" * 64, allow=False)
    generation = actions.deploy(people.bob, spec(), reason="", activate=False)
    build = generation.builds.get()
    tasks.run_build(build.pk)
    build.refresh_from_db()
    assert build.error["details"]["rule"] == f"digest {'0' * 64}"


@pytest.mark.usefixtures("host", "toy_machine", "gate", "quick")
def test_what_was_built_before_a_rule_goes_live_and_back(people: People) -> None:
    """Activating fetches nothing; only a new deploy of the same is refused."""
    from tests.deployments.world import built, go, live

    built(people)
    rule(people, "hub", "acme/*", allow=False)
    go(people, 1)
    assert live() == 1
    with pytest.raises(SourceRefused):
        actions.deploy(people.bob, spec(context=4096), reason="")
    assert Generation.objects.get().state == GenerationState.LIVE


def test_a_denied_repository_cannot_be_searched(people: People, host: Any) -> None:
    """The host's token may see more than everybody may."""
    rule(people, "hub", "acme/*", allow=False)
    with pytest.raises(SourceRefused):
        actions.search_hub(people.bob, "acme/smol")


def test_viewers_are_not_shown_a_template_that_is_a_file(people: People, host: Any) -> None:
    """It is on no page, in no report, no difference and no export of theirs; operators see it."""
    for number, text in enumerate(("root:x:1", "root:x:2"), 1):
        generation = actions.deploy(people.bob, spec() + SECRET, reason="", on_host=True)
        for kind, data in (
            (ReportKind.TEMPLATE, text),
            (ReportKind.RENDERS, {"plain": {"output": text}}),
            (
                ReportKind.RENDERING,
                {"rows": [{"conversation": "plain", "diff": text, "changed": True}]},
            ),
        ):
            generation.reports.create(kind=kind, data=data, made_by=f"test {number}")

    def seen(person: User) -> str:
        rows = queries.history(person, "smol").rows
        row = queries.generation(person, "smol", 2)
        return str(
            [
                [report.content for report in queries.reports(person, row.generation).values()],
                [one.changes for one in rows],
                row.changes,
                queries.diff(person, "smol", 1, 2),
                queries.export_history(person, "smol"),
            ]
        )

    assert seen(people.bob).count("root:x:2") >= 5
    assert "root:x" not in seen(people.carol)
    url = "/deployments/smol/generations/2/"
    client = Client()
    client.force_login(people.carol)
    assert "root:x" not in client.get(url).content.decode()
    client.force_login(people.bob)
    assert "root:x:2" in client.get(url).content.decode()


PATH = 'name = "d"\n[model]\nsource = "path"\npath = "/srv/models/m-Q8_0.gguf"\n'


def test_an_upgrade_asks_the_admins_about_folders_of_live_generations(migrate: Any) -> None:
    """No rule is made unasked, and nobody has to find out what is missing."""
    old = migrate("0017_host_holder")
    user = old.get_model("deployments", "User").objects.create(username="a")
    host = old.get_model("deployments", "Host").objects.create(name="h")
    for name, text in (("d", PATH), ("e", PATH), ("f", "name = ["), ("g", "model = 1")):
        deployment = old.get_model("deployments", "Deployment").objects.create(
            name=name, public_name=name, host=host
        )
        deployment.live = old.get_model("deployments", "Generation").objects.create(
            deployment=deployment, number=1, spec_toml=text, author=user
        )
        deployment.save()
    new = migrate("0018_source_policy")
    request = new.get_model("deployments", "PolicyRequest").objects.get()
    assert (request.kind, request.pattern, request.state) == ("folder", "/srv/models", "waiting")
    assert request.by_id == user.pk
    assert not new.get_model("deployments", "PolicyRule").objects.exists()


# --- who changes it


def events(verb: str) -> list[AuditEvent]:
    return list(AuditEvent.objects.filter(verb=verb).order_by("pk"))


def test_rules_are_the_admins_and_every_change_keeps_old_and_new(people: People) -> None:
    """Replacing and taking back is in the audit log with both values."""
    with pytest.raises(Refused):
        actions.set_rule(people.bob, "folder", "/srv", allow=True)
    actions.set_rule(people.alice, "folder", "/srv/x/..", allow=True, reason="models")
    actions.set_rule(people.alice, "folder", "/srv", allow=False)
    actions.remove_rule(people.alice, "folder", "/srv/")
    (allowed,), (denied,), (removed,) = map(
        events, ("policy.allow", "policy.deny", "policy.remove")
    )
    assert (allowed.details["old"], allowed.details["new"]) == (
        None,
        {"allow": True, "reason": "models"},
    )
    assert denied.details["old"] == allowed.details["new"]
    assert (removed.details["old"], removed.details["new"]) == (denied.details["new"], None)
    with pytest.raises(NotFound):
        actions.remove_rule(people.alice, "folder", "/srv")
    with pytest.raises(InvalidInput):
        actions.set_rule(people.alice, "folder", "srv", allow=True)


def test_a_granted_request_is_a_rule_and_a_refused_one_has_a_reason(
    people: People, host: Any
) -> None:
    """The one who asked sees the answer; others' requests are the admins' to see."""
    asked = actions.request_exception(people.bob, "folder", "/etc", reason="a template")
    with pytest.raises(Conflict):
        actions.request_exception(people.alice, "folder", "/etc/", reason="me too")
    with pytest.raises(Refused):
        actions.answer_request(people.bob, asked.pk, grant=True, reason="")
    assert [row.pk for row in queries.requests(people.alice).rows] == [asked.pk]
    other = actions.request_exception(people.alice, "hub", "a/b", reason="x")
    assert [row.pk for row in queries.requests(people.bob).rows] == [asked.pk]
    actions.answer_request(people.alice, asked.pk, grant=True, reason="")
    actions.deploy(people.bob, spec() + SECRET, reason="")
    with pytest.raises(InvalidInput):
        actions.answer_request(people.alice, other.pk, grant=False, reason=" ")
    actions.answer_request(people.alice, other.pk, grant=False, reason="use another")
    with pytest.raises(Conflict):
        actions.answer_request(people.alice, other.pk, grant=True, reason="")
    waiting_first = queries.requests(people.alice).rows
    assert [(row.state, row.answer) for row in waiting_first] == [
        ("refused", "use another"),
        ("granted", ""),
    ]
    assert [len(events(f"policy.{verb}")) for verb in ("request", "grant", "refuse")] == [2, 1, 1]
    assert events("policy.allow")[0].details["new"]["allow"]
    with pytest.raises(Refused):
        queries.requests(people.carol)


def test_the_pages_show_rules_and_requests(people: People, host: Any) -> None:
    """An operator asks from the page, an admin grants there, viewers do not see it."""
    client = Client()
    client.force_login(people.carol)
    assert client.get("/policy/").status_code == 403
    client.force_login(people.bob)
    page = client.get("/policy/").content.decode()
    assert "public" in page
    assert "Add rule" not in page
    assert client.get("/policy/rules/new/").status_code == 403
    shown = client.get("/policy/requests/new/?kind=folder&pattern=/srv/models").content.decode()
    assert 'value="/srv/models"' in shown
    body = {"kind": "folder", "pattern": "/srv/models", "reason": "<b>ours</b>"}
    assert client.post("/policy/requests/new/", body | {"pattern": "x"}).status_code == 422
    assert client.post("/policy/requests/new/", body).status_code == 302
    pk = PolicyRequest.objects.get().pk
    assert client.post(f"/policy/requests/{pk}/grant/").status_code == 403
    client.force_login(people.alice)
    page = client.get("/policy/").content.decode()
    assert "&lt;b&gt;ours" in page
    assert client.post(f"/policy/requests/{pk}/refuse/", {"reason": ""}).status_code == 422
    assert client.post(f"/policy/requests/{pk}/grant/", {"reason": ""}).status_code == 302
    assert PolicyRule.objects.get().pattern == "/srv/models"
    rule = {"kind": "hub", "pattern": "evil/*", "effect": "deny", "reason": ""}
    assert client.post("/policy/rules/new/", rule).status_code == 302
    assert client.post("/policy/rules/remove/", rule).status_code == 302
    assert PolicyRule.objects.count() == 1


def test_a_refused_deploy_leads_to_a_request(people: People, host: Any) -> None:
    """The editor says which rule refused, with a link that asks for an exception."""
    client = Client()
    client.force_login(people.bob)
    answer = client.post(
        "/deployments/new/", {"spec_toml": spec() + SECRET, "reason": "", "activate": "on"}
    )
    assert answer.status_code == 422
    assert "/policy/requests/new/?kind=folder&amp;pattern=%2Fetc" in answer.content.decode()


def test_the_policy_by_api(people: People, host: Any) -> None:
    """Rules, a decision, a request and its answer."""
    made = ask("PUT", "/policy", people.alice, {"kind": "hub", "pattern": "Evil/*", "allow": False})
    assert {"kind": "hub", "pattern": "evil/*", "allow": False, "reason": "", "default": False} in (
        made.json()
    )
    found = ask("GET", "/policy/decision?kind=hub&subject=evil/x", people.bob).json()
    assert (found["allow"], found["pattern"]) == (False, "evil/*")
    body = {"kind": "hub", "pattern": "evil/x", "reason": "please"}
    asked = ask("POST", "/policy/requests", people.bob, body).json()
    assert (asked["by"], asked["state"]) == ("bob", "waiting")
    path = f"/policy/requests/{asked['id']}/answer"
    assert ask("POST", path, people.bob, {"grant": True}).status_code == 403
    assert ask("POST", path, people.alice, {"grant": True}).json()["state"] == "granted"
    assert ask("GET", "/policy/decision?kind=hub&subject=evil/x", people.bob).json()["allow"]
    assert ask("GET", "/policy/requests", people.bob).json()["total"] == 1
    refused = ask("POST", "/plans", people.bob, {"spec_toml": spec() + SECRET})
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "source_refused"
    gone = ask("POST", "/policy/remove", people.alice, {"kind": "hub", "pattern": "evil/*"})
    assert all(row["pattern"] != "evil/*" for row in gone.json())


@pytest.mark.usefixtures("toy_machine")
def test_secrets_are_the_admins_and_their_values_are_in_no_record(people: People) -> None:
    """The audit log has name and origin."""
    with pytest.raises(Refused):
        actions.set_source_secret(people.bob, "models", "https://x.org", "canary")
    actions.set_source_secret(people.alice, "models", "https://x.org", "canary")
    with pytest.raises(Refused):
        actions.remove_source_secret(people.bob, "models")
    actions.remove_source_secret(people.alice, "models")
    recorded = [(row.verb, row.subject, row.details) for row in AuditEvent.objects.order_by("pk")]
    assert recorded == [
        ("policy.secret", "secret:models", {"origin": "https://x.org:443"}),
        ("policy.forget", "secret:models", {}),
    ]
    assert "canary" not in str([vars(row) for row in AuditEvent.objects.all()])
