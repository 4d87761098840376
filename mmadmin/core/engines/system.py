"""The system object: a manifest that names its parts and serve options.

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
from mmadmin.core.engines.protocol import Engine, ModelFacts, System
from mmadmin.core.errors import StoreCorrupt

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
REPORT, REPORT_FILE = "report", "report.json"
FILE = "_file"
"""Ends the name of a param that says which file of a part's object is meant."""
OWN_KEYS = frozenset({"format", "engine_kind", "alias", "options", "facts"})
"""Of a manifest; every other key is a part."""


def write_manifest(params: Params, inputs: Mapping[str, Path]) -> dict[str, Json]:
    """The manifest of a system whose parts are the given object folders.

    `params` are those of the `system` recipe; `inputs` are its parts and their `report`. Raises
    `InvalidSpec` when the options do not go with the model that was built.
    """
    report = cast("dict[str, Json]", parse((inputs[REPORT] / REPORT_FILE).read_bytes()))
    engine = catalog.engine(str(params["engine_kind"]))
    options = engine.read_options(cast("dict[str, Json]", params["options"]))
    engine.check_model(_facts(engine, report), options)
    parts: dict[str, Json] = dict.fromkeys(part_files(params))
    for name, folder in inputs.items():
        file = params.get(f"{name}{FILE}")
        parts[name] = {"object": folder.name, **({"file": file} if file is not None else {})}
    del parts[REPORT]
    return {
        "format": MANIFEST_FORMAT,
        "engine_kind": params["engine_kind"],
        "alias": params["alias"],
        **parts,
        "options": params["options"],
        "facts": report,
    }


def part_files(params: Params) -> dict[str, Json]:
    """Part → its file, of the params of a `system` step."""
    return {key.removesuffix(FILE): file for key, file in params.items() if key.endswith(FILE)}


def _facts(engine: Engine, report: Mapping[str, Any]) -> ModelFacts:
    return catalog.model_format(engine.model_format).facts_of(report)


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
        engine = catalog.engine(data["engine_kind"])
        return System(
            engine_kind=data["engine_kind"],
            alias=data["alias"],
            parts={
                name: path.parent / part["object"] / part.get("file", "")
                for name, part in data.items()
                if name not in OWN_KEYS and part is not None
            },
            options=engine.read_options(data["options"]),
            facts=_facts(engine, data["facts"]),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(
            f"the system manifest {manifest} cannot be read: {error}",
            remedy="`mm store verify` says what is damaged; build the generation again",
        ) from error
