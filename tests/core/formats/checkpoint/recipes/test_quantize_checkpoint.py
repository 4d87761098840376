"""Quantising as a step: what goes in, what is shown on the way, what becomes an object."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidDerivation, InvalidModel, InvalidSpec, StepFailed
from mmadmin.core.formats.checkpoint.model import read_model
from mmadmin.core.formats.checkpoint.recipes import quantize_checkpoint as module
from mmadmin.core.formats.checkpoint.recipes.quantize_checkpoint import RECIPE, program_digest
from tests.support.checkpoints import make_checkpoint
from tests.support.tools import Attempt, attempt

STUB = Path(__file__).resolve().parents[4] / "support" / "stub_quantizer.py"
DATA: dict[str, Json] = {
    "column": "text",
    "language": "",
    "length": "any",
    "samples": 4,
    "tokens": 16,
    "seed": 42,
}


def params(scheme: str = "W4A16", **changes: Json) -> dict[str, Json]:
    """The parameters of a step."""
    return {
        "scheme": scheme,
        "dequantize": False,
        "ignore": [],
        "cache_scales": False,
        "group_size": 32,
        "dampening": "0.01",
        "calibration": DATA,
        "device": "cpu",
        "program": program_digest(),
        "source_bytes": 1000,
        **changes,
    }


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A source, data, and this interpreter's own packages as the environment."""
    monkeypatch.setattr(module, "PROGRAM", STUB)
    source = make_checkpoint(tmp_path / "m", shards=2)
    (source / "tekken.json").write_text("{}")
    environment = tmp_path / "environment"
    environment.mkdir()
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    (environment / "site").symlink_to(packages)
    data = tmp_path / "data"
    data.mkdir()
    (data / "text.jsonl").write_text('{"text": "a"}\n')
    return {"model": source, "environment": environment, "calibration": data}


def build(folders: dict[str, Path], work: Path, **changes: Json) -> tuple[Path, Attempt]:
    """One attempt."""
    one = attempt(work)
    return one.build(RECIPE, params(**changes), **folders), one


def test_the_output_is_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    """Weights, the source's other files byte for byte, a configuration, and how it was made."""
    out, one = build(folders, tmp_path / "work", cache_scales=True)
    names = {file.name for file in out.iterdir()}
    assert names == {
        *("README.md", "config.json", "model.safetensors", "tekken.json", "tokenizer.json"),
        "tokenizer_config.json",
    }
    for name in ("tekken.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folders["model"] / name).read_bytes()
    shape = read_model(out)
    assert shape.quantization is not None
    assert shape.quantization.cache_type == "fp8"
    config = json.loads((out / "config.json").read_text())
    source = json.loads((folders["model"] / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == [
        *("re:.*lm_head.*", "re:.*multi_modal_projector.*", "re:.*vision_tower.*")
    ]
    assert config == source
    card = (out / "README.md").read_text()
    assert '| scheme | "W4A16" |' in card
    assert "| calibration.seed | 42 |" in card
    assert one.progress[-1] == (1, 2, "layers")
    assert "14 of 17 linear modules" in one.log


def test_a_pattern_is_counted_in_the_log(folders: dict[str, Path], tmp_path: Path) -> None:
    """What it keeps is said; one that keeps nothing ends the step before it begins."""
    with pytest.raises(InvalidModel):  # the stub quantises all
        build(folders, tmp_path / "a", ignore=["re:.*layers.0.mlp.down_proj"])
    with pytest.raises(InvalidSpec, match="matches no module"):
        build(folders, tmp_path / "b", ignore=["nothing"])


@pytest.mark.parametrize(
    ("how", "kind", "what"),
    [
        ("0.9", StepFailed, "9 are wanted"),
        ("0.7", InvalidModel, "no quantization_config"),
        ("0.6", InvalidModel, "1 missing keys, lm_head.weight"),
    ],
)
def test_what_goes_wrong_is_no_object(
    folders: dict[str, Path], tmp_path: Path, how: str, kind: type[Exception], what: str
) -> None:
    """A refusal, a wrong output, and one that does not load: named, and nothing is left in `out`."""
    one = attempt(tmp_path / "work")
    with pytest.raises(kind, match=what):
        one.build(RECIPE, params(dampening=how), **folders)
    assert not list(one.out.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"scheme": "Q4_K_M"},
        {"device": "tpu"},
        {"calibration": None},
        {"scheme": "FP8_DYNAMIC"},
        {"calibration": {**DATA, "samples": -1}},
        {"calibration": {"column": "text"}},
        {"ignore": "lm_head"},
        {"source_bytes": "many"},
    ],
)
def test_refuses_bad_parameters(changes: dict[str, Any]) -> None:
    """Each by its name."""
    with pytest.raises(InvalidDerivation):
        RECIPE.check(params(**changes))


def test_what_the_step_takes_of_its_host() -> None:
    """Main memory for the model in BF16: twice an FP8 source; a GPU only where it uses one."""
    recipe = module.QuantizeCheckpoint()
    size = 124 << 30
    fp8 = recipe.requires(params(dequantize=True, source_bytes=size))
    assert 250 << 30 < fp8.memory_bytes < 270 << 30
    assert (fp8.gpus, fp8.time_s) == (0, 72 * 3600)
    assert recipe.requires(params(device="cuda")).gpus == 1
