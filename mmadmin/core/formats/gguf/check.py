"""Asking a limited child what a model file says: how recipes look at files nobody vouches for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmadmin.core.build.recipe import ChildLimits, Json, Toolbox
from mmadmin.core.errors import InvalidModel, StepFailed

LIMITS = ChildLimits(time_s=120, memory_bytes=2 << 30)


def ask(files: Sequence[Path], tools: Toolbox, *, template: bool = False) -> Mapping[str, Json]:
    """The child's answer: `report`, and `template` (text or null) when wanted.

    Raises `InvalidModel` for a file that is wrong, or on which the child died or outgrew its
    limits.
    """
    request: Json = {"files": [str(file) for file in files], "template": template}
    name = files[0].name
    try:
        answer = tools.python(
            "mmadmin.core.formats.gguf.report", request, limits=LIMITS, readable=[files[0].parent]
        )
    except StepFailed as error:
        raise InvalidModel(
            f"{name} is not a valid model: reading it {error.message}",
            remedy="do not use this file; a sound one is read in seconds",
            file=name,
        ) from error
    if not isinstance(answer, dict):
        raise InvalidModel(f"{name} is not a valid model", remedy="fetch it again", file=name)
    problem = answer.get("error")
    if isinstance(problem, dict):
        raise InvalidModel(str(problem["message"]), remedy=str(problem["remedy"]), file=name)
    return answer
