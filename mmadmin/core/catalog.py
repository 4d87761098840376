"""What this installation can do: its engines, model formats and recipes.

Each is an object that a distribution names under an entry point group: `mmadmin.engines`,
`mmadmin.formats` or `mmadmin.recipes`, under its own kind. The built-in ones are named in this
project's `pyproject.toml` in the same way, so an installed package adds to them as they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from mmadmin.core.build.recipe import Recipe
from mmadmin.core.engines.protocol import Engine
from mmadmin.core.errors import InvalidDerivation, InvalidModel, InvalidSpec
from mmadmin.core.formats.protocol import FileSet, ModelFormat

DEFAULT_ENGINE = "llama-server"
"""The engine of a deployment file that names none."""
ENGINES, FORMATS, RECIPES = "mmadmin.engines", "mmadmin.formats", "mmadmin.recipes"


@cache
def recipes() -> Mapping[str, Recipe]:
    """Every recipe by its kind."""
    return _load(RECIPES)


@cache
def engines() -> Mapping[str, Engine]:
    """Every engine by its kind."""
    return _load(ENGINES)


@cache
def formats() -> Mapping[str, ModelFormat]:
    """Every model format by its kind."""
    return _load(FORMATS)


def recipe(kind: str) -> Recipe:
    """The recipe of a kind; `InvalidDerivation` lists the known ones."""
    found = recipes().get(kind)
    if found is None:
        known = ", ".join(sorted(recipes()))
        raise InvalidDerivation(f"unknown recipe {kind!r}", remedy=f"known recipes: {known}")
    return found


def engine(kind: str) -> Engine:
    """The engine of a kind; `InvalidSpec` lists the known ones."""
    found = engines().get(kind)
    if found is None:
        known = ", ".join(sorted(engines()))
        raise InvalidSpec(
            f"unknown engine {kind!r}", remedy=f"known engines: {known}", field="engine.kind"
        )
    return found


def model_format(kind: str) -> ModelFormat:
    """The model format of a kind; `InvalidSpec` lists the known ones."""
    found = formats().get(kind)
    if found is None:
        known = ", ".join(sorted(formats()))
        raise InvalidSpec(
            f"unknown model format {kind!r}", remedy=f"known formats: {known}", field="model"
        )
    return found


def _load(group: str) -> Mapping[str, Any]:
    """The objects of an entry point group by kind.

    Raises `RuntimeError` when two distributions name the same kind, or one a kind that its object
    does not have: a silent choice between two recipes would change what a derivation builds.
    """
    found: dict[str, Any] = {}
    origin: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name in found and origin[point.name].value != point.value:
            raise RuntimeError(
                f"{group}: {point.value} and {origin[point.name].value} both provide {point.name}"
            )
        one = point.load()
        if one.kind != point.name:
            raise RuntimeError(f"{group}: {point.value} is of kind {one.kind}, not {point.name}")
        found[point.name], origin[point.name] = one, point
    return MappingProxyType(found)


def format_of(path: str) -> ModelFormat | None:
    """The format that reads a file of that name; None = nobody does."""
    return next((one for one in formats().values() if one.owns(path)), None)


def format_of_set(chosen: FileSet) -> ModelFormat:
    """The format that a set is in; `InvalidModel` lists the known ones."""
    found = format_of(chosen.files[0].path)
    if found is None:
        raise InvalidModel(
            f"{chosen.files[0].path} is in no known model format",
            remedy=f"known formats: {', '.join(sorted(formats()))}",
        )
    return found
