"""Values of arguments and options that need no check are taken without loading pydantic.

Typer hands every value to pydantic, even where none was given; that import alone takes as long as
Django's models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.core
from typer._coercion import RuntimeParam, TypeDescriptor, build_runtime_param


@dataclass(frozen=True)
class _AsGiven(RuntimeParam):
    """Takes a text for a text, a path for a path, a default as it is; typer checks the rest."""

    descriptor: TypeDescriptor

    def _coerce_value(self, value: Any, param: Any, ctx: Any) -> Any:
        if self.annotation is Path and isinstance(value, (str, Path)):
            return Path(value)
        if type(value) is self.annotation:
            return value
        return build_runtime_param(self.descriptor)._coerce_value(value, param, ctx)  # noqa: SLF001


def _as_given(of: TypeDescriptor) -> RuntimeParam:
    return _AsGiven(of.parameter_info, of.annotation, of)


def take_as_given() -> None:
    """Have typer do so for every command. It builds a parameter's check by this name."""
    vars(typer.core)["build_runtime_param"] = _as_given
