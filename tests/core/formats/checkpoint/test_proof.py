"""A quantised checkpoint becomes an object only when it is what was asked for: each trap is caught."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.checkpoint.model import read_model
from mmadmin.core.formats.checkpoint.proof import final_config, patterns_of, prove
from mmadmin.core.formats.checkpoint.quantized import quantized, targets_of
from mmadmin.core.formats.checkpoint.tables import CheckpointModel
from tests.core.formats.checkpoint.quantizing import made, model, write
from tests.support.checkpoints import Entry, bf16, config, make_checkpoint, tensors

SCHEMES = ("FP8_DYNAMIC", "FP8", "NVFP4", "NVFP4A16", "W4A16")
LAYER = "model.language_model.layers.0"
VISION = "model.vision_tower.transformer.layers.0.attention.q_proj"
Tensors = dict[str, Entry]
Spoil = Callable[[Tensors, dict[str, Any]], None]


def proved(source: Path, output: Path, wanted: CheckpointModel) -> list[str]:
    """What the proof reports."""
    lines: list[str] = []
    prove(output, source, wanted, quantized(read_model(source), wanted), lines.append)
    return lines


@pytest.mark.parametrize("cache_scales", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sound_output_passes(tmp_path: Path, scheme: str, cache_scales: bool) -> None:
    """Every scheme, with and without scales of the K/V cache."""
    source = make_checkpoint(tmp_path / "m")
    wanted = model(scheme, cache_scales=cache_scales)
    made(source, tmp_path / "out", wanted)
    lines = proved(source, tmp_path / "out", wanted)
    assert "5 tensors that are not quantised are equal" in lines[-1]


def not_compressed(found: Tensors, table: dict[str, Any]) -> None:
    """The weights of one module as they were: the save was not patched."""
    found.pop(f"{LAYER}.mlp.up_proj.weight_scale")
    found[f"{LAYER}.mlp.up_proj.weight"] = tensors()[f"{LAYER}.mlp.up_proj.weight"]


def no_config(found: Tensors, table: dict[str, Any]) -> None:
    """The configuration does not say that it is quantised."""
    table.clear()


def frozen(found: Tensors, table: dict[str, Any]) -> None:
    """Quantisers were attached but nothing was compressed."""
    table["quantization_status"] = "frozen"


def other_format(found: Tensors, table: dict[str, Any]) -> None:
    """Weights are packed in another way."""
    table["format"] = "naive-quantized"


def written_back(found: Tensors, table: dict[str, Any]) -> None:
    """Transformers saved lm_head in the source's FP8."""
    _dtype, shape, data = found["lm_head.weight"]
    found["lm_head.weight"] = ("F8_E4M3", shape, data[::2])


def doubled_scale(found: Tensors, table: dict[str, Any]) -> None:
    """The reverse conversion left a scale of a scale."""
    found[f"{LAYER}.mlp.up_proj.weight_scale_inv_scale"] = bf16(1)


def vision_too(found: Tensors, table: dict[str, Any]) -> None:
    """The vision tower was quantised with the rest."""
    found[f"{VISION}.weight"] = ("F8_E4M3", (32, 32), bytes(32 * 32))
    found[f"{VISION}.weight_scale"] = bf16(32, 1)


def vision_packed(found: Tensors, table: dict[str, Any]) -> None:
    """The same under new names."""
    found.pop(f"{VISION}.weight")
    found[f"{VISION}.weight_packed"] = ("I32", (32, 4), bytes(512))


def module_missing(found: Tensors, table: dict[str, Any]) -> None:
    """A module is gone."""
    del found[f"{LAYER}.self_attn.q_proj.weight"]


def rows_missing(found: Tensors, table: dict[str, Any]) -> None:
    """A module lost rows."""
    found[f"{LAYER}.self_attn.q_proj.weight"] = ("F8_E4M3", (32, 64), bytes(2048))


def norm_changed(found: Tensors, table: dict[str, Any]) -> None:
    """A tensor that nobody named has other bytes."""
    found["model.language_model.norm.weight"] = bf16(64, seed=77)


def cache_uninvited(found: Tensors, table: dict[str, Any]) -> None:
    """A scheme for the cache that nobody asked for."""
    table["kv_cache_scheme"] = {"num_bits": 8}


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (not_compressed, "is in BF16, not in F8_E4M3: it was saved uncompressed"),
        (no_config, "no quantization_config"),
        (frozen, "quantization_status .* is 'frozen'"),
        (other_format, "format .* is 'naive-quantized'"),
        (written_back, "lm_head.weight is in F8_E4M3, not in BF16: it was written back"),
        (doubled_scale, "weight_scale_inv_scale"),
        (vision_too, "is in F8_E4M3, not in BF16"),
        (vision_packed, "1 modules outside the text layers were quantised: vision_tower"),
        (module_missing, "1 tensors of 1 modules are missing"),
        (rows_missing, r"has the shape \(32, 64\)"),
        (norm_changed, "not those of the source: language_model.norm.weight"),
        (cache_uninvited, "nobody asked for"),
    ],
)
def test_a_wrong_output_is_named(tmp_path: Path, spoil: Spoil, what: str) -> None:
    """Each way in which the tools end well with a wrong checkpoint."""
    source, wanted = make_checkpoint(tmp_path / "m"), model()
    found, table = made(source, tmp_path / "out", wanted)
    spoil(found, table)
    write(tmp_path / "out", found, table)
    with pytest.raises(InvalidModel, match=what):
        proved(source, tmp_path / "out", wanted)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({}, "tensors of 2 modules are missing"),
        ({"k": 1.0}, "all 2 k scales are 1.0"),
        ({"v": 0.0}, "is 0.0"),
        ({"k": float("nan")}, "is nan"),
        ({"v": float("inf")}, "is inf"),
    ],
)
def test_unsound_scales_are_named(tmp_path: Path, values: dict[str, float], what: str) -> None:
    """Absent, never calibrated, zero, not finite."""
    source, wanted = make_checkpoint(tmp_path / "m"), model(cache_scales=True)
    found, table = made(source, tmp_path / "out", wanted)
    for name in [n for n in found if n.endswith(("k_scale", "v_scale"))]:
        if not values:
            del found[name]
        elif (value := values.get(name[-7])) is not None:
            found[name] = ("BF16", (1,), struct.pack("<f", value)[2:])
    write(tmp_path / "out", found, table)
    with pytest.raises(InvalidModel, match=what):
        proved(source, tmp_path / "out", wanted)


def test_scales_that_were_dropped_in_silence(tmp_path: Path) -> None:
    """The configuration has no scheme for the cache, though it was asked for."""
    source, wanted = make_checkpoint(tmp_path / "m"), model(cache_scales=True)
    found, table = made(source, tmp_path / "out", wanted)
    write(tmp_path / "out", found, {**table, "kv_cache_scheme": None})
    with pytest.raises(InvalidModel, match="scales were dropped"):
        proved(source, tmp_path / "out", wanted)


def test_names_that_loaders_move_are_the_same(tmp_path: Path) -> None:
    """The source has language_model.model.layers, the output model.language_model.layers."""
    moved = {
        name.replace("model.language_model", "language_model.model")
        .replace("lm_head", "language_model.lm_head")
        .replace("model.vision_tower", "vision_tower"): entry
        for name, entry in tensors().items()
    }
    source, wanted = make_checkpoint(tmp_path / "m", found=moved), model()
    found, table = made(source, tmp_path / "out", wanted)
    back = {
        name.replace("language_model.model", "model.language_model").replace(
            "language_model.lm_head", "lm_head"
        ): entry
        for name, entry in found.items()
    }
    write(tmp_path / "out", back, table)
    assert "5 tensors" in proved(source, tmp_path / "out", wanted)[-1]


def test_modules_that_are_left_alone_are_named_by_patterns(tmp_path: Path) -> None:
    """Exact names match nothing once a loader has renamed the modules."""
    shape = read_model(make_checkpoint(tmp_path / "m"))
    common = ["re:.*lm_head.*", "re:.*multi_modal_projector.*", "re:.*vision_tower.*"]
    assert patterns_of(shape, targets_of(shape, [])) == common
    one = targets_of(shape, ["re:.*layers.0.mlp.down_proj"])
    assert r"re:.*layers\.0\.mlp\.down_proj$" in patterns_of(shape, one)
    every = targets_of(shape, ["re:.*down_proj"])
    assert r"re:.*layers\.\d+\.mlp\.down_proj$" in patterns_of(shape, every)
    written = {"quantization_config": {"ignore": ["lm_head"], "format": "float-quantized"}}
    final = final_config(config(dtype="bfloat16"), written, shape, targets_of(shape, []))
    assert final["quantization_config"] == {"ignore": common, "format": "float-quantized"}
    assert json.loads(json.dumps(final))["dtype"] == "bfloat16"
