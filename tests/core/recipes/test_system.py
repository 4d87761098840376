"""system: a manifest that names its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.options import read_options
from mmadmin.core.engines.system import read_system
from mmadmin.core.errors import InvalidDerivation
from mmadmin.core.recipes.system import RECIPE
from tests.support.tools import NoTools

PARAMS: dict[str, Json] = {
    "engine_kind": "llama-server",
    "alias": "tiny",
    "model_file": "m.gguf",
    "template_file": "chat_template.jinja",
    "mmproj_file": None,
    "options": {"context": 4096},
}


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Path]:
    """Object folders of an engine, a model, its report and a template."""
    content = {
        "engine": ("bin/llama-server", ""),
        "model": ("m.gguf", "weights"),
        "report": ("report.json", '{"architecture":"llama","layers":2,"size_bytes":7}'),
        "template": ("chat_template.jinja", "{{ messages }}"),
    }
    made = {}
    for name, (file, text) in content.items():
        path = tmp_path / f"{'0' * 64}-{name}" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
        made[name] = tmp_path / f"{'0' * 64}-{name}"
    return made


def test_the_manifest_reads_back_as_the_system(tmp_path: Path, parts: dict[str, Path]) -> None:
    """Parts by store name, options and facts; the same bytes each time."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        RECIPE.check(PARAMS)
        RECIPE.build(PARAMS, parts, tmp_path / name, NoTools(tmp_path))
    manifest = (tmp_path / "one/manifest.json").read_bytes()
    assert manifest == (tmp_path / "two/manifest.json").read_bytes()
    assert str(tmp_path).encode() not in manifest
    system = read_system(tmp_path / "one")
    assert system.parts["engine"] == parts["engine"]
    assert system.parts["model"] == parts["model"] / "m.gguf"
    assert system.template == parts["template"] / "chat_template.jinja"
    assert "mmproj" not in system.parts
    assert (system.alias, system.engine_kind) == ("tiny", "llama-server")
    assert system.options == read_options({"context": 4096})


def test_a_part_that_is_not_there_is_refused(tmp_path: Path, parts: dict[str, Path]) -> None:
    """Every named file must exist in its object."""
    for params, words in (
        ({**PARAMS, "model_file": "x.gguf"}, "no file x.gguf"),
        ({**PARAMS, "mmproj_file": "p.gguf"}, "mmproj is missing"),
    ):
        with pytest.raises(InvalidDerivation, match=words):
            RECIPE.build(params, parts, tmp_path, NoTools(tmp_path))


@pytest.mark.parametrize("field", ["engine_kind", "alias", "options"])
def test_missing_params_are_named(field: str) -> None:
    """Each is needed."""
    params = {key: value for key, value in PARAMS.items() if key != field}
    with pytest.raises(InvalidDerivation, match=f"lacks {field}"):
        RECIPE.check(params)
