"""What a lock pins for a checkpoint, and the derivations that it is made by.

fetch (wheels) ─ python-env ─┐
fetch (data set) ────────────┤
fetch (checkpoint) ──────────┴─ quantize-checkpoint ─ verify-checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import NotFound
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.formats.checkpoint.recipes.quantize_checkpoint import program_digest
from mmadmin.core.formats.checkpoint.sets import CONFIG, SUFFIX, file_name, select
from mmadmin.core.formats.checkpoint.tables import CheckpointModel
from mmadmin.core.formats.protocol import RepoFile
from mmadmin.core.recipes import python_env
from mmadmin.core.spec.fields import refuse
from mmadmin.core.spec.lock import Lock
from mmadmin.core.spec.origin import Origin
from mmadmin.core.spec.pins import Packages, PinRequest
from mmadmin.core.spec.steps import fetch, step

MODEL, CALIBRATION, QUANTIZER = "model", "calibration", "quantizer"
"""Lists of a lock."""
DATASETS = "datasets/"
"""The hub has data sets beside its models under this name."""
REQUIREMENTS = (
    "llmcompressor==0.13.0",
    "compressed-tensors==0.18.0",
    "transformers==5.14.1",
    "torch==2.13.0",
)
"""Versions that were measured together; 0.14 rejects a source that was FP8."""
SMOKE_SAMPLES, SMOKE_TOKENS = 4, 128


def pin_requests(model: CheckpointModel) -> Sequence[PinRequest]:
    """The checkpoint's files, and where it is quantised the quantizer and its data."""
    keys = ("source", "repo", "revision", "path", "folder")
    asked: dict[str, Json] = {key: getattr(model, key) for key in keys}
    asked["leave_out"] = list(model.leave_out)
    requests = [
        PinRequest(
            MODEL,
            MODEL,
            asked,
            model,
            f"model.{'repo' if model.source == 'hub' else 'path'}",
            choose=lambda files: _chosen(model, files),
            model_format="checkpoint",
        )
    ]
    if model.quantize:
        packages = Packages(REQUIREMENTS)
        question: dict[str, Json] = {"requirements": list(REQUIREMENTS)}
        requests.append(
            PinRequest(QUANTIZER, QUANTIZER, question, None, "model.quantize", packages=packages)
        )
    if model.calibrates:
        requests.append(_data_request(model))
    return requests


def _data_request(model: CheckpointModel) -> PinRequest:
    on_host = model.calibration.startswith("/")
    asked: dict[str, Json] = {
        "calibration": model.calibration,
        "revision": model.calibration_revision,
        "files": list(model.calibration_files),
    }
    if on_host:
        origin = Origin(source="path", path=model.calibration)
        return PinRequest(CALIBRATION, CALIBRATION, asked, origin, "model.calibration")
    return PinRequest(
        CALIBRATION,
        CALIBRATION,
        asked,
        Origin(
            source="hub",
            repo=f"{DATASETS}{model.calibration}",
            revision=model.calibration_revision,
        ),
        "model.calibration",
        choose=lambda files: _data_files(model, files),
    )


def _chosen(model: CheckpointModel, known: Sequence[RepoFile]) -> list[str]:
    """The files of the checkpoint, without those that are left out."""
    paths = [file.path for file in select(known, model.folder or None).files]
    names = {file_name(path) for path in paths}
    for n, name in enumerate(model.leave_out):
        if name == CONFIG or name.endswith(SUFFIX):
            refuse(f"model.leave_out[{n}]", f"{name} cannot be left out", remedy="remove it")
        if name not in names:
            refuse(
                f"model.leave_out[{n}]",
                f"the checkpoint has no file {name}",
                remedy=f"it has {', '.join(sorted(n for n in names if not n.endswith(SUFFIX)))}",
            )
    return [path for path in paths if file_name(path) not in model.leave_out]


def _data_files(model: CheckpointModel, known: Sequence[RepoFile]) -> list[str]:
    found: list[str] = []
    for n, pattern in enumerate(model.calibration_files):
        paths = [file.path for file in known if fnmatchcase(file.path, pattern)]
        if not paths:
            some = ", ".join(file.path for file in known[:8])
            raise NotFound(
                f"model.calibration_files[{n}]: the data set has no file {pattern}",
                remedy=f"it has {some} …",
                field=f"model.calibration_files[{n}]",
            )
        found += [path for path in paths if path not in found]
    return found


def fetched(model: CheckpointModel, lock: Lock) -> Derivation:
    """The checkpoint as it is published, its files side by side."""
    files = [replace(file, path=file_name(file.path)) for file in lock.of(MODEL)]
    return fetch(_name(model), files)


def model_derivation(model: CheckpointModel, lock: Lock, facts: HostFacts) -> Derivation:
    """The checkpoint that is served: the published one, or that one quantised."""
    source = fetched(model, lock)
    if not model.quantize:
        return source
    inputs = {
        "model": source,
        "environment": python_env.derivation(lock, QUANTIZER, REQUIREMENTS),
    }
    if model.calibrates:
        inputs["calibration"] = fetch("calibration", lock.of(CALIBRATION))
    params: dict[str, Json] = {
        "scheme": model.quantize,
        "dequantize": model.dequantize,
        "ignore": list(model.ignore),
        "cache_scales": model.cache_scales,
        "group_size": model.scheme.group_of(model.group_size),
        "dampening": model.dampening if model.scheme.gptq else "0",
        "calibration": _calibration(model) if model.calibrates else None,
        "device": "cuda" if facts.gpus else "cpu",
        "program": program_digest(),
        "source_bytes": sum(f.size for f in lock.of(MODEL) if f.path.endswith(SUFFIX)),
    }
    return step("quantize-checkpoint", f"{_name(model)}-{model.quantize}", params, inputs)


def report_derivation(name: str, model: Derivation) -> Derivation:
    """What the served checkpoint says about itself."""
    return step("verify-checkpoint", name, {"file": CONFIG}, {"model": model})


def _calibration(model: CheckpointModel) -> dict[str, Json]:
    samples, tokens = model.calibration_samples, model.calibration_tokens
    return {
        "column": model.calibration_column,
        "language": model.calibration_language,
        "length": "any" if model.smoke else model.calibration_length,
        "samples": min(samples, SMOKE_SAMPLES) if model.smoke else samples,
        "tokens": min(tokens, SMOKE_TOKENS) if model.smoke else tokens,
        "seed": model.calibration_seed,
    }


def _name(model: CheckpointModel) -> str:
    """A short name of the published checkpoint."""
    whole = model.repo if model.source == "hub" else str(PurePosixPath(model.path).parent)
    return PurePosixPath(model.folder or whole).name or "checkpoint"
