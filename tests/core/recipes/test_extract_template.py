"""extract-template: a model's own template, or the spec's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mmadmin.core.errors import InvalidDerivation, InvalidModel
from mmadmin.core.recipes.extract_template import RECIPE
from tests.support.models import make_model
from tests.support.tools import NoTools, attempt

TEMPLATE = "{%- for m in messages %}\r\n{{ m.content }}\n{%- endfor %}é"


def test_the_models_template_comes_byte_for_byte(tmp_path: Path) -> None:
    """Line ends and all, through the limited child."""
    (tmp_path / "model").mkdir()
    make_model(tmp_path / "model/m.gguf", template=TEMPLATE)
    out = attempt(tmp_path / "work").build(RECIPE, {"file": "m.gguf"}, model=tmp_path / "model")
    assert (out / "chat_template.jinja").read_bytes() == TEMPLATE.encode()


def test_a_written_template_comes_byte_for_byte(tmp_path: Path) -> None:
    """No model is needed for one that the spec holds."""
    RECIPE.check({"text": TEMPLATE})
    RECIPE.build({"text": TEMPLATE}, {}, tmp_path, NoTools(tmp_path))
    assert (tmp_path / "chat_template.jinja").read_bytes() == TEMPLATE.encode()


def test_another_template_than_the_patches_were_written_for_is_refused(tmp_path: Path) -> None:
    """The remedy names the digest that it has now."""
    (tmp_path / "model").mkdir()
    make_model(tmp_path / "model/m.gguf", template=TEMPLATE)
    digest = hashlib.sha256(TEMPLATE.encode()).hexdigest()
    params = {"file": "m.gguf", "sha256": digest}
    attempt(tmp_path / "work").build(RECIPE, params, model=tmp_path / "model")
    with pytest.raises(InvalidModel, match="another one than the patches") as refused:
        attempt(tmp_path / "again").build(
            RECIPE, {**params, "sha256": "0" * 64}, model=tmp_path / "model"
        )
    assert digest in refused.value.remedy


def test_a_model_without_a_template_is_said(tmp_path: Path) -> None:
    """The remedy is to give one."""
    (tmp_path / "model").mkdir()
    make_model(tmp_path / "model/m.gguf")
    with pytest.raises(InvalidModel, match=r"no chat template.*template\.source"):
        attempt(tmp_path / "work").build(RECIPE, {"file": "m.gguf"}, model=tmp_path / "model")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"file": "a", "text": "b"},
        {"text": "b", "sha256": "0" * 64},
        {"file": "a", "sha256": "x"},
        {"text": ""},
        {"file": "../a"},
    ],
)
def test_wrong_params_are_refused(params: dict[str, str]) -> None:
    """Either a file or a text."""
    with pytest.raises(InvalidDerivation):
        RECIPE.check(params)  # type: ignore[arg-type]
