"""Asking a limited child what a model file says: how recipes look at files nobody vouches for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.recipe import Json, Toolbox
from mmadmin.core.formats import child


def ask(files: Sequence[Path], tools: Toolbox, *, template: bool = False) -> Mapping[str, Json]:
    """The child's answer: `report`, and `template` (text or null) when wanted.

    Raises `InvalidModel` as `child.ask`.
    """
    request: dict[str, Json] = {"files": [str(file) for file in files], "template": template}
    return child.ask("mmadmin.core.formats.gguf.report", request, files[0], tools)
