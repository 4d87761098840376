"""What this installation can do: the recipes and engines, found by looking.

A module of `mmadmin.core.recipes` that has a `RECIPE`, and one of `mmadmin.core.engines` that has
an `ENGINE`, is all that it takes to add one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

import mmadmin.core.engines
import mmadmin.core.recipes
from mmadmin.core.engine import Engine
from mmadmin.core.errors import InvalidDerivation, InvalidSpec
from mmadmin.core.recipe import Recipe


@cache
def recipes() -> Mapping[str, Recipe]:
    """Every recipe by its kind."""
    found: dict[str, Recipe] = {}
    for module in _modules(mmadmin.core.recipes):
        one: Recipe | None = getattr(module, "RECIPE", None)
        if one is not None:
            _add(found, one.kind, one, module)
    return MappingProxyType(found)


@cache
def engines() -> Mapping[str, Engine]:
    """Every engine by its kind."""
    found: dict[str, Engine] = {}
    for module in _modules(mmadmin.core.engines):
        one: Engine | None = getattr(module, "ENGINE", None)
        if one is not None:
            _add(found, one.kind, one, module)
    return MappingProxyType(found)


def recipe(kind: str) -> Recipe:
    """The recipe of a kind; `InvalidDerivation` lists the known ones."""
    found = recipes().get(kind)
    if found is None:
        known = ", ".join(sorted(recipes()))
        raise InvalidDerivation(f"no recipe is called {kind!r}", remedy=f"known recipes: {known}")
    return found


def engine(kind: str) -> Engine:
    """The engine of a kind; `InvalidSpec` lists the known ones."""
    found = engines().get(kind)
    if found is None:
        known = ", ".join(sorted(engines()))
        raise InvalidSpec(
            f"no engine is called {kind!r}", remedy=f"known engines: {known}", field="engine.kind"
        )
    return found


def _modules(package: ModuleType) -> list[ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def _add(found: dict[str, Any], kind: str, one: object, module: ModuleType) -> None:
    stem = module.__name__.rpartition(".")[2]
    if kind.replace("-", "_") != stem:
        raise RuntimeError(f"{module.__name__} holds {kind!r}: name the file {kind} with _ for -")
    found[kind] = one
