"""Asking a limited child what a checkpoint says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmadmin.core.build.recipe import Json, Toolbox
from mmadmin.core.formats import child


def ask(path: Path, tools: Toolbox, *, template: bool = False) -> Mapping[str, Json]:
    """The child's answer: `report`, or `template` (text or null) when that is wanted.

    `path` is one of the checkpoint's files. Raises `InvalidModel` as `child.ask`.
    """
    request: dict[str, Json] = {"path": str(path), "template": template}
    return child.ask("mmadmin.core.formats.checkpoint.report", request, path, tools)
