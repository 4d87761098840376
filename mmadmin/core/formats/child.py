"""Reading untrusted model files in a limited child, and that child's side.

A format's child is a module that is run as `python -m MODULE REQUEST ANSWER`; it answers
`{"error": {"message", "remedy"}}` where the model is not valid. Any other way of ending means the
same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mmadmin.core.build.recipe import ChildLimits, Json, Toolbox
from mmadmin.core.errors import InvalidModel, MmError, StepFailed

LIMITS = ChildLimits(time_s=120, memory_bytes=2 << 30)


def ask(
    module: str,
    request: dict[str, Json],
    one: Path,
    tools: Toolbox,
    *,
    limits: ChildLimits = LIMITS,
) -> Mapping[str, Json]:
    """The child's answer about a model, of which `one` is a file; its folder is visible to it.

    Raises `InvalidModel` for a file that is wrong, or on which the child died or outgrew its
    limits.
    """
    name = one.name
    try:
        answer = tools.python(module, request, limits=limits, readable=[one.parent])
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


def answered(
    answer: Callable[[Mapping[str, Json]], dict[str, Json]], request: Mapping[str, Json]
) -> dict[str, Json]:
    """An answer; every exception means that the file is not valid."""
    try:
        return answer(request)
    except MmError as error:
        return {"error": {"message": error.message, "remedy": error.remedy}}
    except Exception as error:  # noqa: BLE001 (A hostile file must not look like our bug.)
        message = f"the file cannot be read: {type(error).__name__}: {error}"
        return {"error": {"message": message, "remedy": "fetch the file again"}}


def answer_requests(answer: Callable[[Mapping[str, Json]], dict[str, Json]]) -> None:
    """The child's `main`: read the request file, write the answer file."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(answered(answer, request)), encoding="utf-8")
