"""Quantising for real: llm-compressor on a small stand-in of Mistral Medium, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidModel, MmError, StepFailed
from mmadmin.core.formats.checkpoint.model import read_model
from mmadmin.core.formats.checkpoint.recipes import quantize_checkpoint as module
from mmadmin.core.formats.checkpoint.recipes.quantize_checkpoint import RECIPE, program_digest
from mmadmin.core.formats.checkpoint.scales import read_scales
from tests.support.quantizer import Quantizer, open_quantizer
from tests.support.tools import Attempt, attempt

pytestmark = pytest.mark.engine
DATA: dict[str, Json] = {
    "column": "text",
    "language": "",
    "length": "full",
    "samples": 8,
    "tokens": 128,
    "seed": 42,
}
NO_DATA = {"FP8_DYNAMIC", "NVFP4A16"}


@pytest.fixture(scope="module")
def quantizer() -> Quantizer:
    """The environment and the stand-in."""
    return open_quantizer()


def params(scheme: str, **changes: Json) -> dict[str, Json]:
    """A step's parameters."""
    data = scheme not in NO_DATA or changes.get("cache_scales")
    return {
        "scheme": scheme,
        "dequantize": False,
        "ignore": [],
        "cache_scales": False,
        "group_size": 128 if scheme == "W4A16" else 0,
        "dampening": "0.01",
        "calibration": DATA if data else None,
        "device": "cpu",
        "program": program_digest(),
        "source_bytes": 10_000_000,
        **changes,
    }


def build(
    quantizer: Quantizer, work: Path, source: str, scheme: str, **changes: Json
) -> tuple[Path, Attempt]:
    """One attempt."""
    one = attempt(work)
    inputs = {
        "model": getattr(quantizer, source),
        "environment": quantizer.environment,
        "calibration": quantizer.data,
    }
    return one.build(RECIPE, params(scheme, **changes), **inputs), one


def digests(folder: Path) -> dict[str, bytes]:
    """What a folder holds."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_w4a16_with_cache_scales_from_fp8(quantizer: Quantizer, tmp_path: Path) -> None:
    """The third system's way: dequantised, GPTQ, K/V scales; the same bytes twice."""
    wanted: dict[str, Any] = {"dequantize": True, "cache_scales": True, "ignore": ["re:.*lm_head"]}
    out, one = build(quantizer, tmp_path / "a", "fp8", "W4A16", **wanted)
    shape = read_model(out)
    assert shape.quantization is not None
    assert shape.quantization.label == "compressed-tensors w4a16, fp8 K/V cache"
    scales = read_scales([out / "model.safetensors"])
    assert scales.count == 8
    assert not scales.problem
    assert "28 of 46 linear modules" in one.log
    assert one.progress[-1] == (4, 4, "layers")
    assert "layer 4 of 4: loss " in one.log
    assert "loss not known" not in one.log
    assert (out / "tekken.json").read_bytes() == (quantizer.fp8 / "tekken.json").read_bytes()
    again, _ = build(quantizer, tmp_path / "b", "fp8", "W4A16", **wanted)
    assert digests(out) == digests(again)


def test_fp8_dynamic_is_the_same_twice(quantizer: Quantizer, tmp_path: Path) -> None:
    """The second system's way needs no data, and gives the same bytes."""
    out, _ = build(quantizer, tmp_path / "a", "fp8", "FP8_DYNAMIC", dequantize=True)
    again, _ = build(quantizer, tmp_path / "b", "fp8", "FP8_DYNAMIC", dequantize=True)
    assert digests(out) == digests(again)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == [
        *("re:.*lm_head.*", "re:.*multi_modal_projector.*", "re:.*vision_tower.*")
    ]


@pytest.mark.parametrize("scheme", ["FP8", "NVFP4", "NVFP4A16"])
def test_the_other_schemes(quantizer: Quantizer, tmp_path: Path, scheme: str) -> None:
    """Each passes its proof on the real tool's output."""
    out, _ = build(quantizer, tmp_path / "a", "bf16", scheme)
    assert read_model(out).quantization is not None


def changed(*replaced: tuple[str, str]) -> Callable[[Path], Path]:
    """The script with lines replaced: what somebody would have written without knowing."""

    def make(folder: Path) -> Path:
        text = module.PROGRAM.read_text()
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "quantize.py").write_text(text)
        return folder / "quantize.py"

    return make


TRAPS = {
    "fp8 written back by save": (
        changed(
            ("    keep_dequantized(model)\n", ""), ("        save_original_format=False,\n", "")
        ),
        InvalidModel,
        "the source's type|are missing|too many",
    ),
    "saved without compression": (
        changed(
            ("    modify_save_pretrained(model)\n", ""),
            (
                '    if not getattr(model.save_pretrained, "_overridden", False):\n',
                "    if False:\n",
            ),
            ("        save_compressed=True,\n", ""),
        ),
        InvalidModel,
        "no quantization_config|uncompressed",
    ),
    "the save is not patched": (
        changed(("    modify_save_pretrained(model)\n", "")),
        StepFailed,
        "not patched",
    ),
    "the whole model instead of its text": (
        changed(("oneshot(model=text,", "oneshot(model=model,")),
        InvalidModel,
        "outside the text layers|not in BF16",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_caught(
    quantizer: Quantizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    """The tool ends well with a wrong checkpoint; it never becomes an object."""
    make, kind, what = TRAPS[trap]
    monkeypatch.setattr(module, "PROGRAM", make(tmp_path / "script"))
    one = attempt(tmp_path / "a")
    inputs = {"model": quantizer.fp8, "environment": quantizer.environment}
    with pytest.raises(kind, match=what) as caught:
        one.build(RECIPE, params("FP8_DYNAMIC", dequantize=True), **inputs)
    assert isinstance(caught.value, MmError)
    assert not list(one.out.iterdir())


def test_too_few_texts_are_refused(quantizer: Quantizer, tmp_path: Path) -> None:
    """The counts are named."""
    data = {**DATA, "samples": 100_000}
    with pytest.raises(StepFailed, match="100000 are wanted"):
        build(quantizer, tmp_path / "a", "bf16", "FP8", calibration=data)
