"""The `[model]` table of checkpoints, what it pins and the steps that it makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mmadmin.core.build.recipe import HubSource, IndexSource
from mmadmin.core.errors import InvalidSpec, NotFound
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.formats.checkpoint.parts import (
    fetched,
    model_derivation,
    pin_requests,
    report_derivation,
)
from mmadmin.core.formats.checkpoint.tables import MODEL_FIELDS, CheckpointModel, read_model
from mmadmin.core.formats.protocol import RepoFile
from mmadmin.core.spec.fields import read_table
from mmadmin.core.spec.lock import Lock, LockedFile
from tests.core.formats.checkpoint.test_sets import REPO

COMMIT = "a" * 40
DATA = {"calibration": "team/text", "calibration_files": ["de/*.parquet"]}
SHA = "0" * 64


def table(**values: Any) -> CheckpointModel:
    """A table as a deployment file has it."""
    given = {"source": "hub", "repo": "team/m", **values}
    return read_model(read_table(MODEL_FIELDS, given, "model", selector="source"))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"cache_scales": True}, "model.cache_scales"),
        ({"calibration_samples": 4}, "model.calibration_samples"),
        ({"quantize": "W4A16"}, "model.calibration"),
        ({"quantize": "FP8_DYNAMIC", "cache_scales": True}, "model.calibration"),
        ({"quantize": "FP8_DYNAMIC", **DATA}, "model.calibration"),
        ({"quantize": "FP8_DYNAMIC", "smoke": True}, "model.smoke"),
        ({"quantize": "FP8_DYNAMIC", "group_size": 64}, "model.group_size"),
        ({"quantize": "NVFP4", "dampening": 1, **DATA}, "model.dampening"),
        ({"quantize": "NVFP4", "calibration": "team/text"}, "model.calibration_files"),
        (
            {"quantize": "NVFP4", "calibration": "/srv/t.txt", "calibration_files": ["x"]},
            "model.calibration_files",
        ),
        ({"quantize": "Q4_K_M"}, "model.quantize"),
        ({"leave_out": ["a/b.json"]}, "model.leave_out[0]"),
        ({"folder": "../x"}, "model.folder"),
    ],
)
def test_refuses_what_makes_no_sense(values: dict[str, Any], field: str) -> None:
    """A field that would be ignored in silence is refused by name."""
    with pytest.raises(InvalidSpec) as caught:
        table(**values)
    assert caught.value.details["field"] == field


def locked(path: str, size: int = 10) -> LockedFile:
    """A file of the model's repository."""
    return LockedFile(path, SHA, size, HubSource("team/m", COMMIT, path))


def lock_for(model: CheckpointModel) -> Lock:
    """What a host would have resolved."""
    pins: dict[str, tuple[LockedFile, ...]] = {}
    for request in pin_requests(model):
        if request.packages is not None:
            wheel = "llmcompressor-0.13.0-py3-none-any.whl"
            source = IndexSource("llmcompressor", "0.13.0", wheel)
            pins[request.name] = (LockedFile(wheel, SHA, 5, source),)
        elif request.name == "calibration":
            pins[request.name] = (locked("de/a.parquet"),)
        else:
            assert request.choose is not None
            pins[request.name] = tuple(locked(path) for path in request.choose(REPO))
    return Lock(pins, {}, {"quantizer": "cpython-3.11-linux-x86_64"})


CPU = HostFacts("x86_64", "linux", "glibc-2.36", "cpu", (), 8, 64 << 30, 60 << 30, "", "")


def test_a_published_checkpoint_is_fetched_whole() -> None:
    """Weights, configuration, tokenizer; without what is left out and what is never taken."""
    model = table(leave_out=["tekken.json"])
    (request,) = pin_requests(model)
    assert request.choose is not None
    names = set(request.choose(REPO))
    assert {"config.json", "model-00001-of-00002.safetensors", "tokenizer.json"} <= names
    assert not {"tekken.json", "params.json", "modeling_evil.py", "README.md"} & names
    made = model_derivation(model, lock_for(model), CPU)
    assert made.recipe == "fetch"
    assert report_derivation("m", made).inputs["model"] is made


def test_what_cannot_be_left_out() -> None:
    """Weights and configuration, and files that are not there."""
    for name in ("config.json", "model-00001-of-00002.safetensors", "tekken2.json"):
        with pytest.raises(InvalidSpec, match=r"left out|no file tekken2"):
            pin_requests(table(leave_out=[name]))[0].choose(REPO)  # type: ignore[misc]


def test_quantising_has_every_input_in_its_derivation() -> None:
    """Model, environment and data are steps of their own; each parameter is another object."""
    base = {"quantize": "W4A16", "dequantize": True, "cache_scales": True, **DATA}
    model = table(**base)
    made = model_derivation(model, lock_for(model), CPU)
    assert made.recipe == "quantize-checkpoint"
    assert {name: one.recipe for name, one in made.inputs.items()} == {
        "model": "fetch",
        "environment": "python-env",
        "calibration": "fetch",
    }
    assert made.params["source_bytes"] == 20
    changes: list[dict[str, Any]] = [
        *({"calibration_seed": 1}, {"calibration_samples": 9}, {"calibration_tokens": 9}),
        *({"smoke": True}, {"group_size": 64}, {"ignore": ["lm_head"]}, {"cache_scales": False}),
        *({"dampening": 1}, {"calibration_language": "de"}, {"calibration_length": "full"}),
    ]
    digests = {
        model_derivation(one, lock_for(one), CPU).digest
        for one in (model, *(table(**{**base, **change}) for change in changes))
    }
    assert len(digests) == len(changes) + 1
    gpu = replace(CPU, gpus=(object(),))  # type: ignore[arg-type]
    assert model_derivation(model, lock_for(model), gpu).params["device"] == "cuda"
    assert fetched(model, lock_for(model)) == made.inputs["model"]


def test_smoke_is_the_same_way_with_a_few_tokens() -> None:
    """Its numbers are small, its steps are all there."""
    model = table(quantize="W4A16", smoke=True, calibration_length="full", **DATA)
    data = model_derivation(model, lock_for(model), CPU).params["calibration"]
    assert data == {
        "column": "text",
        "language": "",
        "length": "any",
        "samples": 4,
        "tokens": 128,
        "seed": 42,
    }


def test_files_of_the_data_set_are_chosen_by_pattern() -> None:
    """In the order of the patterns; one that matches nothing is named."""
    model = table(quantize="NVFP4", **DATA)
    request = pin_requests(model)[2]
    assert request.origin is not None
    assert (request.part, request.origin.repo) == ("calibration", "datasets/team/text")
    known = [RepoFile("de/b.parquet", 1), RepoFile("en/a.parquet", 1)]
    assert request.choose is not None
    assert request.choose(known) == ["de/b.parquet"]
    with pytest.raises(NotFound, match=r"de/\*\.parquet"):
        request.choose(known[1:])
