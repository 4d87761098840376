"""What quantising will come out as, and what is refused, from headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.errors import InvalidSpec
from mmadmin.core.formats.checkpoint.model import read_model
from mmadmin.core.formats.checkpoint.quantized import quantized, targets_of, working_bytes
from tests.core.formats.checkpoint.quantizing import model
from tests.support.checkpoints import make_checkpoint, projections, tensors

FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


def fp8_source(folder: Path) -> Path:
    """A source as Mistral publishes it: text layers in FP8 with scales."""
    found = tensors()
    for name, size in projections().items():
        found[f"{name}.weight"] = ("F8_E4M3", size, bytes(size[0] * size[1]))
        found[f"{name}.weight_scale_inv"] = ("BF16", (), b"\1\2")
        found[f"{name}.activation_scale"] = ("BF16", (), b"\1\2")
    return make_checkpoint(folder, found=found, quantization_config=FP8)


def test_counts_what_is_quantised(tmp_path: Path) -> None:
    """Text layers only: lm_head, embeddings, projector and vision tower stay as they are."""
    targets = targets_of(read_model(make_checkpoint(tmp_path / "m")), ["re:.*lm_head"])
    assert targets.chosen == tuple(projections())
    assert targets.message == "14 of 17 linear modules are quantised"
    assert targets.matched == {"re:.*lm_head": 1}


def test_w4a16_makes_a_quarter(tmp_path: Path) -> None:
    """Four bits and a scale for each group, and what an engine's memory model needs to know."""
    before = read_model(make_checkpoint(tmp_path / "m"))
    after = quantized(before, model("W4A16", cache_scales=True))
    sizes = {one.name: (one.dtype, one.shape) for one in after.weights}
    at = "model.language_model.layers.1.mlp.down_proj"
    assert sizes[f"{at}.weight_packed"] == ("I32", (64, 12))
    assert sizes[f"{at}.weight_scale"] == ("BF16", (64, 3))
    assert f"{at}.weight" not in sizes
    assert sizes["model.language_model.layers.1.self_attn.v_scale"] == ("BF16", (1,))
    assert after.quantization is not None
    assert after.quantization.label == "compressed-tensors w4a16, fp8 K/V cache"
    assert after.quantization.group_size == 32
    assert after.parameters == before.parameters


def test_a_source_in_fp8_is_converted_first(tmp_path: Path) -> None:
    """Its scales go, what is left alone is BF16, memory is for the whole model in BF16."""
    before = read_model(fp8_source(tmp_path / "m"))
    after = quantized(before, model(dequantize=True, ignore=["re:.*layers.0.mlp.up_proj"]))
    names = {one.name: one.dtype for one in after.weights}
    assert not [name for name in names if name.endswith(("scale_inv", "activation_scale"))]
    assert names["model.language_model.layers.0.mlp.up_proj.weight"] == "BF16"
    assert names["model.language_model.layers.1.mlp.up_proj.weight"] == "F8_E4M3"
    assert working_bytes(before) > 2 * before.parameters


@pytest.mark.parametrize(
    ("table", "wanted", "field", "what"),
    [
        (FP8, {}, "model.quantize", "quantised already .fp8 w8a8-fp8."),
        (
            {"quant_method": "awq", "bits": 4},
            {"dequantize": True},
            "model.dequantize",
            "not in FP8",
        ),
        ({"quant_method": "gptq", "bits": 4}, {}, "model.quantize", "gptq w4a16"),
        (None, {"dequantize": True}, "model.dequantize", "not in FP8 but in BF16"),
        (None, {"ignore": ["lm_haed"]}, "model.ignore", '"lm_haed" matches no module'),
        (None, {"ignore": ["re:vision_tower.*", "re:lm.*x"]}, "model.ignore", "lm.*x"),
        (None, {"ignore": ["re:(("]}, "model.ignore", "not a regular expression"),
        (None, {"ignore": ["re:.*"]}, "model.quantize", "no linear module"),
        (
            None,
            {"quantize": "W4A16", "group_size": 64},
            "model.group_size",
            "96 columns, not a multiple of 64",
        ),
    ],
)
def test_refuses_before_anything_is_fetched(
    tmp_path: Path, table: dict[str, Any] | None, wanted: dict[str, Any], field: str, what: str
) -> None:
    """The field, what is wrong, and what to do."""
    changes = {"quantization_config": table} if table else {}
    shape = read_model(make_checkpoint(tmp_path / "m", **changes))
    with pytest.raises(InvalidSpec, match=what) as caught:
        quantized(shape, model(**wanted))
    assert caught.value.details["field"] == field
    assert caught.value.remedy


@pytest.mark.parametrize("pattern", ["lm_head", "re:.*lm_head", "re:vision_tower.*", "re:model.*"])
def test_patterns_match_under_either_name(tmp_path: Path, pattern: str) -> None:
    """The name in the file and the one in memory: both are what people write."""
    shape = read_model(make_checkpoint(tmp_path / "m"))
    assert targets_of(shape, [pattern]).matched[pattern]
