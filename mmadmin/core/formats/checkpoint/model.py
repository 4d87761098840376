"""A checkpoint on this disk or elsewhere: its files read together, and checked against each other.

A set is believed only when it is whole: every shard that the index names is there and no other,
every tensor lies where the index says and in one file only. What is wrong is said with the name of
the shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmadmin.core.errors import InvalidModel
from mmadmin.core.formats.checkpoint.config import MAX_BYTES, parse_json, read_config
from mmadmin.core.formats.checkpoint.header import SafetensorsHeader, read_stream
from mmadmin.core.formats.checkpoint.sets import (
    CONFIG,
    INDEX,
    CheckpointSet,
    file_name,
    group,
    select,
)
from mmadmin.core.formats.checkpoint.shape import CheckpointShape
from mmadmin.core.formats.protocol import Open, RepoFile

SAME_REVISION = "fetch all files again, of one revision"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Where a template may stand, as transformers looks for it."""


def find_model(path: Path) -> CheckpointSet:
    """The checkpoint of a folder, or the one that a file belongs to. Raises as `select`."""
    folder = path if path.is_dir() else path.parent
    listed = [
        RepoFile(file.name, file.stat().st_size)
        for file in sorted(folder.iterdir())
        if file.is_file()
    ]
    if path == folder:
        return select(listed, None)
    belonging = [one for one in group(listed) if path.name in map(file_name, _paths(one))]
    if len(belonging) == 1:
        return select(listed, belonging[0].name)
    return select(listed, None)


def _paths(one: CheckpointSet) -> list[str]:
    return [file.path for file in one.files]


def read_model(path: Path) -> CheckpointShape:
    """The shape of a checkpoint on this disk, checked. Raises `InvalidModel`, `OSError`."""
    folder = path if path.is_dir() else path.parent
    chosen = find_model(path)
    return read_set(chosen, lambda file: (folder / file.path).open("rb"))


def read_set(chosen: CheckpointSet, open_file: Open) -> CheckpointShape:
    """The shape of a set by its config, index and headers. Raises as `read_model`."""
    refuse_pickles(chosen)
    headers: dict[str, SafetensorsHeader] = {}
    config = read_config(_json(chosen, CONFIG, open_file) or {})
    index = _json(chosen, f"{chosen.stem}{INDEX}", open_file)
    for file in chosen.weights:
        with open_file(file) as stream:
            headers[file_name(file.path)] = read_stream(stream, file.size_bytes, file.path)
    check_set(headers, index)
    return CheckpointShape(
        config,
        tuple(tensor for header in headers.values() for tensor in header.tensors),
        frozenset(file_name(file.path) for file in chosen.files),
    )


def refuse_pickles(chosen: CheckpointSet) -> None:
    """Raise `InvalidModel` for weights that only running code can load."""
    if chosen.kind == "pickle":
        raise InvalidModel(
            f"{chosen.files[0].path} is a pickle: loading it runs the code in it",
            remedy="choose a repository or revision with .safetensors files",
            file=chosen.files[0].path,
        )


def check_set(headers: Mapping[str, SafetensorsHeader], index: Mapping[str, Any] | None) -> None:
    """Refuse shards that do not belong together, and an index that says otherwise."""
    where: dict[str, str] = {}
    for name, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in where:
                raise InvalidModel(
                    f"the tensor {tensor.name} is in {where[tensor.name]} and in {name}",
                    remedy=SAME_REVISION,
                    file=name,
                )
            where[tensor.name] = name
    if index is None:
        if len(headers) > 1:
            raise InvalidModel(
                f"the index of its {len(headers)} shards is missing", remedy=SAME_REVISION
            )
        return
    told = _weight_map(index)
    missing = sorted(set(told.values()) - set(headers))
    if missing:
        raise InvalidModel(
            f"the index names files that are not there: {', '.join(missing[:5])}",
            remedy=SAME_REVISION,
            missing=missing[:100],
        )
    foreign = sorted(set(headers) - set(told.values()))
    if foreign:
        raise InvalidModel(
            f"{', '.join(foreign[:5])} is not part of this set: its index does not name it",
            remedy=SAME_REVISION,
            foreign=foreign[:100],
        )
    for name in sorted(told.keys() | where.keys()):
        if told.get(name) != where.get(name):
            raise InvalidModel(
                f"the index has the tensor {name} in {told.get(name, 'no file')}, the shards have "
                f"it in {where.get(name, 'no file')}: they are of different revisions",
                remedy=SAME_REVISION,
                tensor=name,
            )


def _weight_map(index: Mapping[str, Any]) -> dict[str, str]:
    told = index.get("weight_map")
    if not isinstance(told, dict) or not all(isinstance(file, str) for file in told.values()):
        raise InvalidModel("the index has no table `weight_map`", remedy="fetch it again")
    strange = next((file for file in told.values() if "/" in file or "\\" in file), None)
    if strange is not None:
        raise InvalidModel(
            f"the index names a file outside its folder: {strange[:100]!r}",
            remedy="do not use this repository",
        )
    return told


def _json(chosen: CheckpointSet, name: str, open_file: Open) -> dict[str, Any] | None:
    file = chosen.beside.get(name)
    if file is None:
        return None
    with open_file(file) as stream:
        return parse_json(stream.read(MAX_BYTES + 1), file.path)


def read_template(chosen: CheckpointSet, open_file: Open) -> str | None:
    """The chat template of a set; None = it has none. Raises `InvalidModel`."""
    for name in TEMPLATE_FILES:
        file = chosen.beside.get(name)
        if file is None:
            continue
        with open_file(file) as stream:
            data = stream.read(MAX_BYTES + 1)
        if not name.endswith(".json"):
            return data.decode(errors="replace")
        found = parse_json(data, file.path).get("chat_template")
        if isinstance(found, list):
            named = [one for one in found if isinstance(one, dict)]
            found = next((one.get("template") for one in named if one.get("name") == "default"), 0)
        if isinstance(found, str) and found:
            return found
    return None
