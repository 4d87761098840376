"""quantize-gguf: by the real llama-quantize, compared with its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.llama_server.recipes.quantize_gguf import RECIPE
from mmadmin.core.errors import InvalidDerivation, InvalidModel
from mmadmin.core.formats.gguf.header import read_header
from tests.support.engine import MODEL_FILE, EngineStore
from tests.support.tools import attempt

PARAMS: dict[str, Json] = {"file": MODEL_FILE, "type": "Q8_0", "output": "smol-Q8_0.gguf"}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({**PARAMS, "type": "Q9"}, "one of F32"),
        ({**PARAMS, "type": "q8_0"}, "one of F32"),
        ({**PARAMS, "output": "x-00001-of-00002.gguf"}, "without a shard suffix"),
        ({**PARAMS, "output": "x.bin"}, "a .gguf name"),
        ({**PARAMS, "threads": 4}, "unknown fields: threads"),
        ({"file": "m.gguf", "type": "Q8_0"}, "lacks output"),
    ],
)
def test_wrong_params_name_their_field(params: dict[str, Json], words: str) -> None:
    """Thread counts are no param: they change no byte."""
    with pytest.raises(InvalidDerivation, match=words):
        RECIPE.check(params)


@pytest.mark.engine
def test_the_real_model_in_q8_0_whatever_the_thread_count(
    tmp_path: Path, engine_store: EngineStore
) -> None:
    """Other bytes, same model; one thread and four give the same file; progress by tensors."""
    inputs = {"model": engine_store.path("model"), "engine": engine_store.path("tools")}
    one = attempt(tmp_path / "one", jobs=1)
    made = one.build(RECIPE, PARAMS, **inputs) / "smol-Q8_0.gguf"
    header = read_header(made)
    assert {t.type for t in header.tensors} == {"Q8_0", "F32"}
    assert header.integer("general.file_type") == 7
    assert made.stat().st_size <= one.staging.reserved <= 2 * made.stat().st_size
    assert one.progress[-1] == (272, 272, "tensors")
    four = attempt(tmp_path / "four", jobs=4)
    assert (
        four.build(RECIPE, PARAMS, **inputs) / "smol-Q8_0.gguf"
    ).read_bytes() == made.read_bytes()


@pytest.mark.engine
def test_a_tool_that_gives_another_model_is_caught(
    tmp_path: Path, engine_store: EngineStore
) -> None:
    """The result is read back: a damaged one is no object."""
    tool = tmp_path / "engine/bin/llama-quantize"
    tool.parent.mkdir(parents=True)
    real = engine_store.path("tools") / "bin/llama-quantize"
    tool.write_text(
        f'#!/bin/sh\n{real} "$@" || exit $?\nsed -i "s/llama.block_count/llama.clock_bount/" "$3"\n'
    )
    tool.chmod(0o755)
    work = attempt(tmp_path / "work")
    with pytest.raises(InvalidModel, match="layers is None, its source's 30"):
        work.build(RECIPE, PARAMS, model=engine_store.path("model"), engine=tmp_path / "engine")
    assert not list(work.out.iterdir())
