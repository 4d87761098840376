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

import httpx2

from mmadmin.core import catalog
from mmadmin.core.build.recipe import Json
from mmadmin.core.callbacks import silent
from mmadmin.core.chat_templates.patches import (
    IGNORES_TOOLS,
    Renders,
    conversations,
    ignores_tools,
    problem_of,
    render_matrix,
)
from mmadmin.core.chat_templates.render import BOS
from mmadmin.core.engines.protocol import LaunchSpec, System
from mmadmin.core.engines.questions import UNREADABLE
from mmadmin.core.errors import InvalidModel, Unreachable
from mmadmin.host.engine_client import OK, EngineClient, Unanswered
from mmadmin.host.probe import template_request
from mmadmin.host.toolbox import HostConfig, HostToolbox

ENGINE_S = 30.0
TOKENS = ("bos_token", "eos_token")
AROUND = 40
"""Characters of a line that are shown on both sides of where it differs."""


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

    def take(self, sha256: str, size: int, to: Path, *, executable: bool = False) -> bool:
        """No file of a store is wanted."""
        del sha256, size, to, executable
        return False

    def keep(self, path: Path, sha256: str) -> None:
        """Nothing is fetched here."""


@contextmanager
def _child() -> Iterator[HostToolbox]:
    """A toolbox that can run a limited child and nothing else."""
    with tempfile.TemporaryDirectory(prefix="mmadmin-template-") as folder:
        scratch = Path(folder)
        yield HostToolbox(
            _Scratch(scratch),
            silent,
            silent,
            lambda: False,
            config=HostConfig.from_env(scratch / "downloads"),
        )


def template_of(system: System) -> str:
    """The chat template that a system is served with: its own file, or the one in the model.

    Raises `InvalidModel` when the model has none.
    """
    if system.template is not None:
        return system.template.read_text(encoding="utf-8")
    model = system.parts["model"]
    model_format = catalog.engine(system.engine_kind).model_format
    with _child() as tools:
        text = catalog.model_format(model_format).read_template(model, tools)
    if text is None:
        raise InvalidModel(f"{model.name} has no chat template", remedy="give one in [template]")
    return text


def render_in_child(
    templates: Mapping[str, str], variables: Mapping[str, Json] | None = None
) -> dict[str, Renders]:
    """Every conversation with each of the named templates, in a limited child.

    Raises `PatchFails` for a template that goes beyond its limits.
    """
    with _child() as tools:
        return render_matrix(templates, tools, variables)


def tokens_of(launch: LaunchSpec, secret: str) -> Mapping[str, Json]:
    """The begin and end tokens that a running engine gives its template; empty = it cannot tell.

    Raises `Unreachable`.
    """
    question = launch.questions.special_tokens
    if question is None:
        return {}
    with EngineClient(launch, secret) as client:
        try:
            return client.ask(question)
        except (httpx2.HTTPError, Unanswered) as error:
            raise _unreachable(error) from error


def render_on_engine(launch: LaunchSpec, secret: str) -> Renders | None:
    """Every conversation as a running engine renders it; None = this kind of engine renders none.

    Raises `Unreachable`.
    """
    rendering = launch.questions.rendering
    if rendering is None:
        return None
    renders: dict[str, dict[str, Json]] = {}
    with EngineClient(launch, secret) as client:
        for row in conversations():
            body = rendering.body(template_request(row))
            try:
                answer = client.post(rendering.path, body, timeout_s=ENGINE_S)
                if answer.status_code == OK:
                    renders[row] = {"output": rendering.read(answer.text)}
                    continue
            except (httpx2.HTTPError, *UNREADABLE) as error:
                raise _unreachable(error) from error
            # A refusal of the template may quote its source; the reason is in the last line.
            last = (client.message(answer) or f"HTTP {answer.status_code}").splitlines()[-1]
            renders[row] = {"error": last.removeprefix("Error: ")}
    return renders


def _unreachable(error: Exception) -> Unreachable:
    return Unreachable(
        f"the engine does not answer: {error or type(error).__name__}",
        remedy="`mm status` says whether it runs",
    )


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One conversation: what came of it, and where child and engine differ."""

    conversation: str
    ok: bool
    message: str
    """What is wrong, or how long the prompt is."""
    text: str
    """The prompt, the engine's where there is one; empty when it failed."""
    ignored: bool = False
    """True where the prompt lacks the tools that the conversation has."""
    difference: str = ""
    """The first line that differs; empty = none, or nothing to compare with."""


def matrix(child: Renders, engine: Renders | None = None, *, bos: str = BOS) -> list[MatrixRow]:
    """The rows of a template; where there is an engine, its rendering decides.

    `bos` is the begin token that the child rendered with.
    """
    return [_row(name, child[name], engine[name] if engine else None, bos) for name in child]


def _row(
    name: str, child: Mapping[str, Json], engine: Mapping[str, Json] | None, bos: str
) -> MatrixRow:
    decisive = engine if engine is not None else child
    difference = _difference(child, engine, bos) if engine is not None else ""
    if "error" in decisive:
        return MatrixRow(
            name, ok=False, message=str(decisive["error"]), text="", difference=difference
        )
    text = str(decisive["output"])
    problem = problem_of(name, text)
    ignored = not problem and ignores_tools(name, text)
    message = problem or (IGNORES_TOOLS if ignored else f"{len(text)} characters")
    return MatrixRow(name, not problem, message, text, ignored=ignored, difference=difference)


def _difference(child: Mapping[str, Json], engine: Mapping[str, Json], bos: str) -> str:
    """Where two renderings part, by line; a begin-of-text mark at the start does not count."""
    if "error" in child or "error" in engine:
        if "error" in child and "error" in engine:
            return ""
        refused = "the sandbox" if "error" in child else "the engine"
        return f"only {refused} refuses it: {child.get('error') or engine.get('error')}"
    old = str(child["output"]).removeprefix(bos).splitlines()
    new = str(engine["output"]).removeprefix(bos).splitlines()
    for number in range(max(len(old), len(new))):
        was = old[number] if number < len(old) else None
        now = new[number] if number < len(new) else None
        if was != now:
            at = _parting(was or "", now or "")
            return f"line {number + 1}: sandbox {_piece(was, at)}, engine {_piece(now, at)}"
    return ""


def _parting(one: str, other: str) -> int:
    """Where two different lines part."""
    shared = zip(one, other, strict=False)
    return next(
        (at for at, (was, now) in enumerate(shared) if was != now), min(len(one), len(other))
    )


def _piece(line: str | None, at: int) -> str:
    """What is around a place of a line."""
    if line is None:
        return "has none"
    start, end = max(0, at - AROUND), at + AROUND
    shown = repr(line[start:end])
    return f"{'…' if start else ''}{shown}{'…' if end < len(line) else ''}"
