"""Templates over the matrix: the limited child, the engine, and where they part."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmadmin.core.engine import System
from mmadmin.core.errors import InvalidModel
from mmadmin.core.templates import conversations
from mmadmin.host.template_matrix import matrix, render_in_child, render_on_engine, template_of
from tests.host.test_engine_process import SECRET, port
from tests.host.test_probe import engine
from tests.support.models import make_model

__all__ = ["engine", "port"]
GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRICT = "{{ raise_exception('no') if reasoning_effort is defined }}" + GOOD


def system(model: Path, template: Path | None = None) -> System:
    """A system of that model."""
    return System(
        engine=Path("/engine"),
        model=model,
        template=template,
        options={},
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
    assert "refused by the template: no" in rows["effort-low"].words
    assert not any(row.ok for row in matrix(renders["broken"]))


def test_a_template_that_hangs_or_reaches_out_is_stopped():
    """Templates come from strangers: no attribute tricks, no endless loops."""
    reaches = "{{ ''.__class__.__mro__ }}" + GOOD
    renders = render_in_child({"reaches": reaches})
    assert "unsafe" in matrix(renders["reaches"])[0].words


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
