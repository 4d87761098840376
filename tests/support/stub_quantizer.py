"""Stands in for the quantizer's script: the same request and answer, an output made of nothing.

The `dampening` of the request, otherwise without a use here, says what goes wrong.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def quantize(request: dict) -> dict:
    """Write what the proof expects."""
    from tests.core.formats.checkpoint.quantizing import made, model

    if request["dampening"] == "0.9":
        return {"refused": "the calibration data has 1 texts of at least 2 tokens, 9 are wanted"}
    print("target: model.language_model (Ministral3Model), 14 of 17 linear modules", flush=True)  # noqa: T201
    print("layer 1 of 2: loss 0.5, at most 1.0 GiB held, 0 h 1 min 0 s left", flush=True)  # noqa: T201
    if request["dampening"] == "0.8":
        time.sleep(600)
    output = Path(request["output"])
    wanted = model(
        request["scheme"],
        cache_scales=request["cache_scales"],
        group_size=request["group_size"] or 32,
    )
    made(Path(request["source"]), output, wanted)
    (output / "recipe.yaml").write_text("written by the tool")
    if request["dampening"] == "0.75":
        whole = (output / "model.safetensors").read_bytes()
        (output / "model.safetensors").write_bytes(whole[:5000])
        print("saving", flush=True)  # noqa: T201
        time.sleep(600)
        (output / "model.safetensors").write_bytes(whole)
    if request["dampening"] == "0.7":
        (output / "config.json").write_text("{}")
    return {"quantize_s": 1}


def reload(request: dict) -> dict:
    """Load nothing."""
    readme = (Path(request["source"]) / "README.md").read_text()
    return {"missing_keys": ["lm_head.weight"] if '"0.6"' in readme else [], "unexpected_keys": []}


asked = json.loads(Path(sys.argv[1]).read_text())
answer = {"quantize": quantize, "reload": reload}[asked["task"]](asked)
Path(sys.argv[2]).write_text(json.dumps(answer))
