"""Chat templates over the matrix of conversations: in a limited child, and in a live engine.

The child renders as the template's authors expect (a transformers-like sandbox with CPU, memory
and output limits); the engine renders as clients will get it, and is the authority. Where they
differ, the line that differs is told.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mmadmin.core.engine import LaunchSpec, System
from mmadmin.core.errors import InvalidModel, Unreachable
from mmadmin.core.model_check import ask
from mmadmin.core.recipe import Json
from mmadmin.core.shards import find_set
from mmadmin.core.templates import Renders, conversations, problem_of, render_matrix
from mmadmin.host.probe import template_request
from mmadmin.host.readiness import EngineClient
from mmadmin.host.toolbox import HostConfig, HostToolbox

ENGINE_S = 30.0
_OK = 200


@dataclass(frozen=True, slots=True)
class _Scratch:
    """The part of a staging that a child needs: a folder that vanishes."""

    scratch: Path
    inherit: Sequence[int] = ()

    @property
    def out(self) -> Path:
        """Nothing is built here."""
        return self.scratch

    def reserve(self, size_bytes: int) -> None:
        """A child's answer is bounded by its limits."""

    def take(self, sha256: str, size: int, to: Path) -> bool:
        """No file of a store is wanted."""
        del sha256, size, to
        return False

    def keep(self, path: Path, sha256: str) -> None:
        """Nothing is fetched here."""


@contextmanager
def _child() -> Iterator[HostToolbox]:
    """Hands that can run a limited child and nothing else."""
    with tempfile.TemporaryDirectory(prefix="mmadmin-template-") as folder:
        scratch = Path(folder)
        yield HostToolbox(
            _Scratch(scratch),
            lambda _line: None,
            lambda _done, _total, _unit: None,
            lambda: False,
            config=HostConfig.from_env(scratch / "downloads"),
        )


def template_of(system: System) -> str:
    """The chat template that a system is served with: its own file, or the one in the model.

    Raises `InvalidModel` when the model has none.
    """
    if system.template is not None:
        return system.template.read_text(encoding="utf-8")
    with _child() as tools:
        answer = ask(find_set(system.model), tools, template=True)
    text = answer.get("template")
    if not isinstance(text, str):
        raise InvalidModel(
            f"{system.model.name} has no chat template", remedy="give one in [template]"
        )
    return text


def render_in_child(templates: Mapping[str, str]) -> dict[str, Renders]:
    """Every conversation with each of the named templates, in a limited child.

    Raises `PatchFails` for a template that goes beyond its limits.
    """
    with _child() as tools:
        return render_matrix(templates, tools)


def render_on_engine(launch: LaunchSpec, secret: str) -> Renders:
    """Every conversation as a running engine renders it. Raises `Unreachable`."""
    renders: dict[str, dict[str, Json]] = {}
    with EngineClient(launch, secret) as client:
        for row in conversations():
            try:
                answer = client.post("/apply-template", template_request(row), timeout_s=ENGINE_S)
            except httpx.HTTPError as error:
                raise Unreachable(
                    f"the engine does not answer: {error or type(error).__name__}",
                    remedy="`mm status` says whether it runs",
                ) from error
            data: Any = answer.json()
            if answer.status_code == _OK:
                renders[row] = {"output": str(data["prompt"])}
            else:
                renders[row] = {"error": str(data.get("error", {}).get("message", data))}
    return renders


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One conversation: what came of it, and where child and engine differ."""

    conversation: str
    ok: bool
    words: str
    """What is wrong, or how long the prompt is."""
    text: str
    """The prompt, the engine's where there is one; empty when it failed."""
    difference: str = ""
    """The first line that differs, in words; empty = none, or nothing to compare with."""


def matrix(child: Renders, engine: Renders | None = None) -> list[MatrixRow]:
    """The rows of a template; the engine's word counts where there is one."""
    return [_row(name, child[name], engine[name] if engine else None) for name in child]


def _row(name: str, child: Mapping[str, Json], engine: Mapping[str, Json] | None) -> MatrixRow:
    decisive = engine if engine is not None else child
    difference = _difference(child, engine) if engine is not None else ""
    if "error" in decisive:
        return MatrixRow(
            name, ok=False, words=str(decisive["error"]), text="", difference=difference
        )
    text = str(decisive["output"])
    problem = problem_of(name, text)
    words = problem or f"{len(text)} characters"
    return MatrixRow(name, ok=not problem, words=words, text=text, difference=difference)


def _difference(child: Mapping[str, Json], engine: Mapping[str, Json]) -> str:
    """Where two renderings part, by line; a begin-of-text mark at the head is no difference."""
    if "error" in child or "error" in engine:
        if "error" in child and "error" in engine:
            return ""
        refused = "the sandbox" if "error" in child else "the engine"
        return f"only {refused} refuses it: {child.get('error') or engine.get('error')}"
    old = str(child["output"]).removeprefix("<s>").splitlines()
    new = str(engine["output"]).removeprefix("<s>").splitlines()
    for number in range(max(len(old), len(new))):
        was = old[number] if number < len(old) else None
        now = new[number] if number < len(new) else None
        if was != now:
            return f"line {number + 1}: sandbox {was!r}, engine {now!r}"
    return ""
