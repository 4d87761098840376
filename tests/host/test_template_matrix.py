"""Templates over the matrix: the limited child, the engine, and where they part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmadmin.core.chat_templates import patches as templates
from mmadmin.core.chat_templates.patches import PatchFails, conversations
from mmadmin.core.engines.llama_server.options import read_options
from mmadmin.core.engines.protocol import System
from mmadmin.core.errors import InvalidModel
from mmadmin.host.template_matrix import matrix, render_in_child, render_on_engine, template_of
from tests.host.test_engine_process import SECRET
from tests.host.test_probe import engine
from tests.support.models import make_model

__all__ = ["engine"]
GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRICT = "{{ raise_exception('no') if reasoning_effort is defined }}" + GOOD


def system(model: Path, template: Path | None = None) -> System:
    """A system of that model."""
    return System(
        parts={
            "engine": Path("/engine"),
            "model": model,
            **({"template": template} if template else {}),
        },
        options=read_options({}),
        engine_kind="llama-server",
        alias="m",
    )


def test_the_template_is_the_files_or_the_models(tmp_path):
    """The deployment's own file wins; a model without one is told."""
    (with_template,) = make_model(tmp_path / "a.gguf", template=GOOD)
    (without,) = make_model(tmp_path / "b.gguf")
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert template_of(system(with_template)) == GOOD
    assert template_of(system(with_template, own)) == "own"
    with pytest.raises(InvalidModel, match="no chat template"):
        template_of(system(without))


def test_every_conversation_is_rendered_in_a_child():
    """Refusals are rows, and so is a template that does not compile."""
    renders = render_in_child({"good": GOOD, "strict": STRICT, "broken": "{% for %}"})
    assert set(renders["good"]) == set(conversations())
    rows = {row.conversation: row for row in matrix(renders["strict"])}
    assert rows["plain"].ok
    assert "refused by the template: no" in rows["effort-low"].message
    assert not any(row.ok for row in matrix(renders["broken"]))


def test_a_template_without_tools_is_marked():
    """It renders every conversation and tells no model about the tools."""
    with_tools = "{% if tools %}{{ tools | tojson }}{% endif %}" + GOOD
    renders = render_in_child({"without": GOOD, "with": with_tools})
    for name, ignored in (("without", True), ("with", False)):
        rows = {row.conversation: row for row in matrix(renders[name])}
        assert rows["tools"].ok
        assert rows["tools"].ignored is ignored
        assert not rows["plain"].ignored


def test_a_template_that_reaches_out_or_for_everything_is_a_row_in_words():
    """Templates come from strangers: no attribute tricks, no gigabytes, no endless calls."""
    hostile = {
        "reaches": "{{ ''.__class__.__mro__ }}" + GOOD,
        "eats": "{{ 'x' * 1500000000 }}" + GOOD,
        "calls": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}" + GOOD,
    }
    renders = render_in_child(hostile)
    words = {name: matrix(renders[name])[0].message for name in hostile}
    assert "unsafe" in words["reaches"]
    assert words["eats"] == "it needs more memory than a conversation may take"
    assert words["calls"] == "it calls itself without an end"


def test_a_template_that_hangs_is_ended(monkeypatch):
    """Loops in loops: the child ends at its limit, and the words are about the template."""
    monkeypatch.setattr(templates, "LIMITS", replace(templates.LIMITS, time_s=1))
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(PatchFails, match=r"cannot be rendered safely: .* ran longer than 1 s"):
        render_in_child({"loops": loops + GOOD})


def test_the_engine_has_the_last_word(engine):
    """What it renders counts; where the sandbox parts from it, the line is named."""
    made = engine(strict=True)
    seen = render_on_engine(made, SECRET)
    rows = {row.conversation: row for row in matrix(render_in_child({"x": GOOD})["x"], seen)}
    assert rows["plain"].ok
    assert rows["plain"].difference.startswith("line 1: sandbox 'user: What is 17 * 23?'")
    assert not rows["effort-low"].ok
    assert rows["effort-low"].difference.startswith("only the engine refuses it")
    equal = matrix(
        {"plain": {"output": "<s>What is 17 * 23?"}}, {"plain": {"output": "What is 17 * 23?"}}
    )
    assert equal[0].difference == ""


def test_the_child_renders_with_the_models_own_tokens():
    """Begin and end of another model are no difference, nor is a begin token that is left out."""
    template = "{{ bos_token }}" + GOOD + "{{ eos_token }}"
    child = render_in_child({"x": template}, {"bos_token": "<|im|>", "eos_token": "<|end|>"})["x"]
    text = str(child["plain"]["output"])
    assert (text[:6], text[-7:]) == ("<|im|>", "<|end|>")
    (same,) = matrix({"plain": child["plain"]}, {"plain": {"output": text[6:]}}, bos="<|im|>")
    assert same.difference == ""


def test_of_a_long_line_what_is_around_the_difference_is_shown():
    """A prompt of tools is one line of thousands of characters."""
    was, now = "a" * 100 + "X" + "b" * 100, "a" * 100 + "Y" + "b" * 100
    (row,) = matrix({"plain": {"output": was}}, {"plain": {"output": now}})
    assert row.difference == (
        f"line 1: sandbox …'{'a' * 40}X{'b' * 39}'…, engine …'{'a' * 40}Y{'b' * 39}'…"
    )
    (shorter,) = matrix({"plain": {"output": "one\ntwo"}}, {"plain": {"output": "one"}})
    assert shorter.difference == "line 2: sandbox 'two', engine has none"
