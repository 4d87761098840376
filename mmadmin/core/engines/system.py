"""The system object: a manifest that names engine, model, template and serve options.

It copies no weights: each part is named by its object and the path inside, relative to the
store's `objects` folder, so that a system can move between stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mmadmin.core import catalog
from mmadmin.core.build.recipe import Json, Params
from mmadmin.core.canonical import parse
from mmadmin.core.engines.protocol import ModelFacts, System
from mmadmin.core.errors import StoreCorrupt

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
REPORT = "report.json"


def write_manifest(params: Params, inputs: Mapping[str, Path]) -> dict[str, Json]:
    """The manifest of a system whose parts are the given object folders.

    `params` are those of the `system` recipe; `inputs` are `engine`, `model`, `report` and, where
    they exist, `template` and `mmproj`. Raises `InvalidSpec` when the options do not go with the
    model that was built.
    """
    report = cast("dict[str, Json]", parse((inputs["report"] / REPORT).read_bytes()))
    engine = catalog.engine(str(params["engine_kind"]))
    options = engine.read_options(cast("dict[str, Json]", params["options"]))
    engine.check_model(model_facts(report), options)
    return {
        "format": MANIFEST_FORMAT,
        "engine_kind": params["engine_kind"],
        "alias": params["alias"],
        "engine": {"object": inputs["engine"].name},
        "model": _part(inputs["model"], params["model_file"]),
        "template": _optional(inputs, "template", params.get("template_file")),
        "mmproj": _optional(inputs, "mmproj", params.get("mmproj_file")),
        "options": params["options"],
        "facts": report,
    }


def _part(folder: Path, file: Json) -> dict[str, Json]:
    return {"object": folder.name, "file": file}


def _optional(inputs: Mapping[str, Path], name: str, file: Json) -> dict[str, Json] | None:
    return _part(inputs[name], file) if file is not None else None


def read_system(path: Path) -> System:
    """The system of an object folder, with its parts as absolute paths.

    Raises `StoreCorrupt` when the manifest is missing or damaged. It does not look whether the
    parts exist: the store's closure says that.
    """
    manifest = path / MANIFEST
    try:
        data: Any = parse(manifest.read_bytes())
        if data["format"] != MANIFEST_FORMAT:
            raise StoreCorrupt(
                f"{manifest} has format {data['format']!r}, this version reads {MANIFEST_FORMAT}",
                remedy="build the generation again",
            )
        objects = path.parent
        return System(
            engine=objects / data["engine"]["object"],
            model=objects / data["model"]["object"] / data["model"]["file"],
            template=_path(objects, data["template"]),
            mmproj=_path(objects, data["mmproj"]),
            options=catalog.engine(data["engine_kind"]).read_options(data["options"]),
            engine_kind=data["engine_kind"],
            alias=data["alias"],
            facts=model_facts(data["facts"]),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(
            f"the system manifest {manifest} cannot be read: {error}",
            remedy="`mm store verify` says what is damaged; build the generation again",
        ) from error


def _path(objects: Path, part: Mapping[str, str] | None) -> Path | None:
    return objects / part["object"] / part["file"] if part else None


def model_facts(report: Mapping[str, Any]) -> ModelFacts:
    """A `verify-gguf` report as `ModelFacts`; what the file does not say is 0."""

    def number(name: str) -> int:
        return int(report.get(name) or 0)

    return ModelFacts(
        architecture=str(report.get("architecture") or ""),
        size_bytes=number("size_bytes"),
        layers=number("layers"),
        context_length=number("context_length"),
        embedding_length=number("embedding_length"),
        head_count=number("head_count"),
        head_count_kv=number("head_count_kv"),
        metadata=dict(report),
    )
