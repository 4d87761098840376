"""The report of a checkpoint: tensors by module and type, quantisation, scales, other files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmadmin.core import catalog
from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.checkpoint.difference import E4M3
from mmadmin.core.formats.checkpoint.format import FORMAT
from mmadmin.core.formats.checkpoint.recipes.verify_checkpoint import RECIPE
from mmadmin.core.formats.checkpoint.report import answer
from tests.support.checkpoints import (
    TEMPLATE,
    Entry,
    bf16,
    make_checkpoint,
    safetensors,
    tensors,
)
from tests.support.tools import attempt

FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "modules_to_not_convert": ["model.vision_tower", "lm_head"],
}
W4A16_KV8 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 128},
            "input_activations": None,
        }
    },
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "ignore": ["re:.*lm_head"],
}
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"},
        }
    },
}


def report_of(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """The report that the recipe writes, by its limited child."""
    out = attempt(tmp_path).build(RECIPE, {"file": "config.json"}, model=folder)
    found: dict[str, Any] = json.loads((out / "report.json").read_bytes())
    return found


def scale(value: float) -> Entry:
    """One number in BF16."""
    return "BF16", [1], struct.pack("<f", value)[2:]


def test_modules_types_and_files(tmp_path: Path) -> None:
    """Modules of all layers are one row; what changes an engine's behaviour is named."""
    folder = make_checkpoint(tmp_path / "m", shards=2)
    (folder / "tekken.json").write_text("{}")
    found = report_of(folder, tmp_path / "work")
    assert found["architecture"] == "Mistral3ForConditionalGeneration"
    row = found["modules"]["model.language_model.layers.*.mlp.down_proj"]
    assert row == {
        "count": 2,
        "bytes": 2 * 64 * 96 * 2,
        "types": {"BF16": 24576},
        "tensors": ["weight"],
    }
    assert found["tensor_types"] == {"BF16": found["tensor_bytes"]}
    assert found["quantization"] is None
    assert found["cache_scales"]["k"]["count"] == 0
    assert list(found["effects"]) == ["tekken.json"]
    assert found["tokenizers"] == ["tokenizer.json", "tekken.json"]
    assert found["files"] == 2
    facts = FORMAT.facts_of(found)
    assert (facts.layers, facts.context_length, facts.head_count_kv) == (2, 4096, 2)
    fields = FORMAT.report_fields(found)
    assert fields["module.lm_head"] == "1: BF16"
    assert FORMAT.label_of("tensor_bytes.BF16").unit == "bytes"  # type: ignore[union-attr]
    assert FORMAT.read_template(folder / "config.json", attempt(tmp_path / "t").tools) == TEMPLATE


@pytest.mark.parametrize(
    ("table", "label", "group"),
    [
        (FP8, "fp8 w8a8-fp8", 0),
        (W4A16_KV8, "compressed-tensors w4a16, fp8 K/V cache", 128),
        (NVFP4, "compressed-tensors nvfp4", 16),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq w4a16", 64),
        ({"quant_method": "mystery"}, "mystery", 0),
        (
            {"quant_method": "gptq", "config_groups": 7, "ignore": 1, "kv_cache_scheme": 2},
            "gptq",
            0,
        ),
    ],
)
def test_quantisation_is_told_from_the_configuration(
    tmp_path: Path, table: dict[str, Any], label: str, group: int
) -> None:
    """Method, scheme, group size and cache, before any weight is fetched."""
    folder = make_checkpoint(tmp_path / "m", quantization_config=table)
    found = FORMAT.read_header(folder).quantization
    assert (found.label, found.group_size) == (label, group)


@pytest.mark.parametrize(
    ("k", "v", "problem"),
    [
        ([0.02, 0.03], [0.5, 1.0], ""),
        ([1.0, 1.0], [0.5, 0.5], "all 2 k scales are 1.0"),
        ([0.02, float("nan")], [0.5, 0.5], "is nan"),
        ([0.02, 0.0], [0.5, 0.5], "is 0.0"),
        ([0.02], [0.5, 0.5], "1 k scales and 2 v scales"),
    ],
)
def test_scales_of_the_cache(tmp_path: Path, k: list[float], v: list[float], problem: str) -> None:
    """Counted, with least and most; what an engine would compute nonsense with is said."""
    found = tensors()
    for which, values in (("k", k), ("v", v)):
        for n, value in enumerate(values):
            found[f"model.language_model.layers.{n}.self_attn.{which}_scale"] = scale(value)
    folder = make_checkpoint(tmp_path / "m", found=found)
    scales = report_of(folder, tmp_path / "work")["cache_scales"]
    assert (scales["k"]["count"], scales["v"]["count"]) == (len(k), len(v))
    assert problem in scales["problem"] if problem else scales["problem"] == ""


def test_a_wrong_set_is_no_object(tmp_path: Path) -> None:
    """The recipe hands on what the child refused."""
    folder = make_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidModel, match="announces a header"):
        report_of(folder, tmp_path / "work")
    assert set(answer({"path": str(tmp_path / "nowhere")})) == {"error"}
    assert set(answer({})) == {"error"}


def test_the_difference_names_tensors_and_amount(tmp_path: Path) -> None:
    """A rebuild that differs says which tensors, and by how much at most."""
    one, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    values = np.arange(6, dtype="<f4")
    made = {"x": bf16(4), "y": ("F32", [6], values.tobytes()), "z": ("U8", [1], b"\1")}
    one.write_bytes(safetensors(made))
    other.write_bytes(safetensors({**made, "y": ("F32", [6], (values + 0.25).tobytes())}))
    assert FORMAT.difference(one, other) == ("1 of 3 tensors differ, by at most 0.25", ("y",))
    other.write_bytes(safetensors(made, {"format": "pt"}))
    assert FORMAT.difference(one, other) == ("only metadata differs", ())
    other.write_bytes(safetensors({k: e for k, e in made.items() if k != "z"}))
    assert FORMAT.difference(one, other) == ("1 of 3 tensors differ", ("z",))


def test_every_e4m3_value() -> None:
    """The ends of the type: the largest, the smallest normal, the smallest number, NaN."""
    assert E4M3[0b0_1111_110] == 448
    assert E4M3[0b0_0001_000] == 2.0**-6
    assert E4M3[1] == 2.0**-9
    assert E4M3[0b1_0111_000] == -1
    assert np.isnan(E4M3[[127, 255]]).all()


def test_the_catalog_has_the_format() -> None:
    """Files are matched to it by their names."""
    assert catalog.format_of("model-00001-of-00002.safetensors") is FORMAT
    assert catalog.format_of("pytorch_model.bin") is FORMAT
    assert catalog.format_of("config.json") is None
