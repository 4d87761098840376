"""The first deployment file of a model: what the panel and `mm new` begin with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import tomlkit

from mmadmin.core import catalog
from mmadmin.core.catalog import DEFAULT_ENGINE

NAME_CHARACTERS = 63
"""Longest name of a deployment."""


def first_name(source: str) -> str:
    """A deployment's name out of a repository's, a file's or a package's."""
    name = PurePosixPath(source.lower()).name
    for kind in catalog.formats():
        name = name.removesuffix(f"-{kind}").removesuffix(f".{kind}")
    name = re.sub(r"[^a-z0-9.]+", "-", name)[:NAME_CHARACTERS]
    return name.strip("-.") or "model"


def first_file(
    name: str,
    model: Mapping[str, Any],
    engine: Mapping[str, Any],
    serve: Mapping[str, Any] | None = None,
    *,
    schema: str = "",
) -> str:
    """A deployment file as TOML.

    `engine` is the table of another deployment: what belongs to that one's host is left to be
    found on this one. `serve` changes the options that the engine begins with; `schema` is the
    address that editors check the file by.
    """
    tables = catalog.engine(str(engine.get("kind", DEFAULT_ENGINE))).tables
    document = tomlkit.document()
    if schema:
        document.add(tomlkit.comment(f":schema {schema}"))
    document["name"] = name
    document["model"] = dict(model)
    known = {field.name for field in tables.engine}
    document["engine"] = {
        **{key: value for key, value in engine.items() if key != "cuda_architectures"},
        **({"backend": "auto"} if "backend" in known else {}),
    }
    document["serve"] = {**tables.first_serve, **(serve or {})}
    text = tomlkit.dumps(document)
    return text.replace("# :schema", "#:schema", 1)
