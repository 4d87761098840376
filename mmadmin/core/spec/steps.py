"""Derivations by their recipes: what engines and the rest of a system's graph are made with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mmadmin.core import catalog
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.recipe import Json
from mmadmin.core.spec.lock import LockedFile, file_as_json


def step(
    kind: str, name: str, params: Mapping[str, Json], inputs: Mapping[str, Derivation]
) -> Derivation:
    """A derivation by the recipe of that kind, its params checked."""
    recipe = catalog.recipe(kind)
    recipe.check(params)
    return Derivation(slug(name), kind, recipe.version, params, inputs)


def slug(text: str) -> str:
    """A text as a derivation's name."""
    name = re.sub(r"[^A-Za-z0-9._+=-]+", "-", text).lstrip(".+=-")[:100]
    return name or "unnamed"


def fetch(name: str, files: Sequence[LockedFile]) -> Derivation:
    """Files of a lock, fetched by their digests."""
    params: dict[str, Json] = {"files": [file_as_json(file) for file in files]}
    return step("fetch", name, params, {})
