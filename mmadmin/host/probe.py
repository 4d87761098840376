"""Probes of a ready engine: streaming, template matrix, tool calls, reasoning, speed; liveness.

`wait_ready` proves that the engine is the right one; these rows show what it can do. Each row has
a deadline of its own, no row stops the others, and the report says what each has seen. A row that
the deployment file requires and that does not pass refuses the generation. Templates are rendered
by the engine itself where it can: it is the authority on what clients will get. A row about
something that the kind of engine cannot tell is skipped as not applicable.

Where requests wait for the proof (a swap), it is brief: the rows that decide, and those that
measure, which traffic would spoil; together some fifty tokens. The others, up to a thousand tokens,
are asked by `ask_rest` once the generation serves; they decide nothing, so nothing is lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import httpx2

from mmadmin.core.callbacks import Report, silent
from mmadmin.core.chat_templates.patches import (
    IGNORES_TOOLS,
    conversations,
    ignores_tools,
    problem_of,
)
from mmadmin.core.engines.probes import (
    ALWAYS_REQUIRED,
    GENERATING,
    MEASURING,
    PROBE_ROWS,
    TEMPLATE_PREFIX,
    ProbeReport,
    ProbeRow,
)
from mmadmin.core.engines.protocol import LaunchSpec
from mmadmin.core.engines.questions import UNREADABLE
from mmadmin.core.errors import ProbeFailed, Unreachable
from mmadmin.core.home import Home
from mmadmin.core.spec.spec import ActivationSpec
from mmadmin.host.engine_client import OK, EngineClient, Unanswered
from mmadmin.host.readiness import Ready, tiny_completion, wait_ready

TEMPLATE_S = 20.0
STREAM_S = 120.0
CHAT_S = 300.0
LIVENESS_S = 60.0
STREAM_TOKENS = 16
SPEED_TOKENS = 32
TOOL_TOKENS = 128
REASONING_TOKENS = 1024
MILLI = 1000
PERCENT = 100
NOT_APPLICABLE = "not applicable: this kind of engine does not tell"
_THINKING_MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>analysis")
"""How reasoning looks when it was not taken out of the text."""
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}},
            "required": ["numbers"],
        },
    },
}


_IN_BODY = ("messages", "tools", "reasoning_effort")
"""What a client sends at the top of a request; other variables go by `chat_template_kwargs`."""


class _Skip(Exception):
    """The row does not apply to this engine; the text says why."""


class _Fail(Exception):
    """The row did not pass; the text says what was seen."""


@dataclass(slots=True)
class _Session:
    """One engine under questions."""

    client: EngineClient
    launch: LaunchSpec
    required: frozenset[str]
    floor_milli: int
    measured: dict[str, int] = field(default_factory=dict)

    def chats(self) -> None:
        """Skip what needs a chat when the engine has none."""
        if self.launch.expect.task != "completion":
            raise _Skip(f"the engine serves {self.launch.expect.task}")

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> str:
        """The answer's body; a refusal is a failed row with the engine's own message."""
        answer = self.client.post(path, body, timeout_s=timeout_s)
        if answer.status_code != OK:
            raise _Fail(self.client.refusal(answer))
        return answer.text

    def chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The first choice of a chat's answer."""
        choice: Mapping[str, Any] = json.loads(self.post("/v1/chat/completions", body, CHAT_S))[
            "choices"
        ][0]
        return choice


def run_probes(
    launch: LaunchSpec,
    secret: str,
    ready: Ready,
    *,
    required: Collection[str] = (),
    brief: bool = False,
    slowest_milli: int = 0,
    on_progress: Report = silent,
    check: Callable[[], None] = silent,
) -> ProbeReport:
    """Ask every row and report. Blocking, may be called again; leaves nothing in the engine.

    `required` are row names that must pass besides the four that `wait_ready` has proved; a
    `brief` report has no more than these and the measuring ones.
    `slowest_milli` is the generation speed (thousandths of a token a second) that the `speed` row
    asks for, 0 = any. `check` is called before each row and may raise to end it.
    """
    with EngineClient(launch, secret) as client:
        session = _Session(client, launch, frozenset(required), slowest_milli)
        rows = _proved(launch, ready)
        for name in PROBE_ROWS:
            if name in ALWAYS_REQUIRED or (brief and name not in {*required, *MEASURING}):
                continue
            check()
            row = _ask(session, name)
            rows.append(row)
            if row.state == "failed" or row.message == IGNORES_TOOLS:
                on_progress(f"{name}: {row.message}")
    session.measured["load_ms"] = ready.ready_after_ms
    return ProbeReport(tuple(rows), session.measured, ready.as_json())


def prove(
    home: Home,
    uid: str,
    launch: LaunchSpec,
    secret: str,
    *,
    wanted: ActivationSpec,
    deadline_s: float | None = None,
    parent_report: Mapping[str, Any] | None = None,
    brief: bool = False,
    on_progress: Report = silent,
    check: Callable[[], None] = silent,
) -> ProbeReport:
    """Everything before the flip: wait until it is ready and the right one, ask the rows.

    `wanted` is the deployment file's `[activation]`; `parent_report` the report of the generation
    that is replaced, for the speed floor; `brief` leaves the rows out that `ask_rest` asks.
    Raises `ProbeFailed`, with the report where there is one.
    """
    ready = wait_ready(
        home, uid, launch, secret, deadline_s=deadline_s, on_progress=on_progress, check=check
    )
    floor = floor_of(wanted.speed_floor_percent, parent_report)
    report = run_probes(
        launch,
        secret,
        ready,
        required={*wanted.required_probes, *(["speed"] if floor else [])},
        brief=brief,
        slowest_milli=floor,
        on_progress=on_progress,
        check=check,
    )
    require(report)
    return report


def ask_rest(
    launch: LaunchSpec,
    secret: str,
    report: Mapping[str, Any],
    *,
    may_generate: Callable[[], bool],
    on_progress: Report = silent,
) -> dict[str, Any]:
    """A brief report with the rows that it lacks, of an engine that serves. Blocking.

    Clients come first: before a row that generates, `may_generate` is asked (it may block), and a
    row for which there was no room says so. Raises nothing of the engine's: that is in the rows.
    """
    rows = {row["name"]: row for row in report["rows"]}
    with EngineClient(launch, secret) as client:
        session = _Session(client, launch, frozenset(), 0)
        for name in PROBE_ROWS:
            if name in rows:
                continue
            if name in GENERATING and not may_generate():
                row = ProbeRow(name, "skipped", "its clients needed the engine", required=False)
            else:
                row = _ask(session, name)
            rows[name] = asdict(row)
            if row.state == "failed" or row.message == IGNORES_TOOLS:
                on_progress(f"{name}: {row.message}")
    return {**report, "rows": [rows[name] for name in PROBE_ROWS if name in rows]}


def require(report: ProbeReport) -> None:
    """Raise `ProbeFailed` when a required row did not pass; the report is in its details."""
    if not report.refused:
        return
    failed = "; ".join(f"{row.name}: {row.message}" for row in report.refused)
    raise ProbeFailed(
        f"the engine failed what its deployment file requires: {failed}",
        remedy="change the template, the options or the engine, or require less",
        probe=report.refused[0].name,
        report=report.as_json(),
    )


def floor_of(percent: int, parent: Mapping[str, Any] | None) -> int:
    """The slowest allowed speed (thousandths of a token a second) after a parent's report."""
    measured = (parent or {}).get("measured") or {}
    speed = int(measured.get("generation_tokens_per_s_milli") or 0)
    return speed * percent // PERCENT


def liveness(launch: LaunchSpec, secret: str, *, timeout_s: float = LIVENESS_S) -> None:
    """One tiny completion with a deadline. Raises `Unreachable`: healthy is not alive."""
    with EngineClient(launch, secret) as client:
        try:
            tiny_completion(client, launch, timeout_s=timeout_s)
        except httpx2.HTTPError as error:
            raise Unreachable(
                f"the engine does not answer: {error or type(error).__name__}",
                remedy="restart it",
            ) from error


def work(launch: LaunchSpec, secret: str) -> str | None:
    """A mark of how far the engine's requests are: it changes while any of them makes progress.

    Empty = none is in work; None = this engine does not tell. Raises `Unreachable` without an
    answer. A dead engine may well answer: then its mark stays as it is.
    """
    question = launch.questions.progress
    if question is None:
        return None
    with EngineClient(launch, secret) as client:
        try:
            return client.ask(question)
        except Unanswered:
            return None
        except httpx2.HTTPError as error:
            raise Unreachable(
                f"the engine does not answer: {error or type(error).__name__}",
                remedy="restart it",
            ) from error


def _proved(launch: LaunchSpec, ready: Ready) -> list[ProbeRow]:
    """The rows that `wait_ready` has asked, as far as the kind of engine can answer them."""
    questions = launch.questions
    messages = {
        "identity": f"process {ready.process.pid} serves {ready.alias}",
        "secret": "a wrong secret is refused" if questions.guarded else None,
        "context": _context_words(ready) if questions.context else None,
        "completion": f"it said {ready.completion!r}",
    }
    return [
        ProbeRow(name, "skipped", NOT_APPLICABLE, required=False)
        if (message := messages[name]) is None
        else ProbeRow(name, "passed", message, required=True)
        for name in ALWAYS_REQUIRED
    ]


def _context_words(ready: Ready) -> str:
    tokens = f"{ready.context_per_slot} tokens"
    return f"{ready.slots} slots of {tokens}" if ready.slots else f"{tokens} a request"


def _ask(session: _Session, name: str) -> ProbeRow:
    """One row; whatever goes wrong in it is its answer."""
    began = time.monotonic()
    state: Literal["passed", "failed", "skipped"] = "passed"
    try:
        if name.startswith(TEMPLATE_PREFIX):
            message = _template(session, name.removeprefix(TEMPLATE_PREFIX))
        else:
            message = _ROWS[name](session)
    except _Skip as skip:
        state, message = "skipped", str(skip)
    except (_Fail, Unanswered) as fail:
        state, message = "failed", str(fail)
    except httpx2.TimeoutException:
        state, message = "failed", "it did not answer in time"
    except httpx2.HTTPError as error:
        state, message = "failed", f"it stopped answering ({error or type(error).__name__})"
    except UNREADABLE as error:
        state, message = "failed", f"its answer has another form ({type(error).__name__}: {error})"
    ms = int((time.monotonic() - began) * MILLI)
    return ProbeRow(name, state, message, required=name in session.required, ms=ms)


def template_request(row: str) -> dict[str, Any]:
    """A conversation of the matrix as a client sends it."""
    variables: dict[str, Any] = dict(conversations()[row])
    body = {name: variables.pop(name) for name in _IN_BODY if name in variables}
    return {**body, "chat_template_kwargs": variables} if variables else body


def _template(session: _Session, row: str) -> str:
    session.chats()
    rendering = session.launch.questions.rendering
    if rendering is None:
        raise _Skip(NOT_APPLICABLE)
    if row == "image" and not session.launch.expect.capabilities.images:
        raise _Skip("the engine has no projector")
    body = rendering.body(template_request(row))
    prompt = rendering.read(session.post(rendering.path, body, TEMPLATE_S))
    if problem := problem_of(row, prompt):
        raise _Fail(problem)
    if ignores_tools(row, prompt):
        if f"{TEMPLATE_PREFIX}{row}" in session.required:
            raise _Fail(IGNORES_TOOLS)
        raise _Skip(IGNORES_TOOLS)
    return f"{len(prompt)} characters"


def _stream(session: _Session) -> str:
    session.chats()
    body = {
        "prompt": "Once upon a time",
        "max_tokens": STREAM_TOKENS,
        "temperature": 0,
        **session.launch.questions.full_work,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    pieces, usage, ended = 0, 0, False
    for line in session.client.lines("/v1/completions", body, timeout_s=STREAM_S):
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            ended = True
            continue
        chunk = json.loads(data)
        usage = max(usage, int((chunk.get("usage") or {}).get("completion_tokens", 0)))
        if any(choice.get("text") for choice in chunk.get("choices", [])):
            if not pieces:
                session.measured["ttft_ms"] = int((time.monotonic() - began) * MILLI)
            pieces += 1
    if pieces < 2:  # noqa: PLR2004 (one piece is not a stream)
        raise _Fail(f"{STREAM_TOKENS} tokens came in {pieces} pieces")
    if not ended:
        raise _Fail("the stream ended without [DONE]")
    if not usage:
        raise _Fail("the stream told no usage")
    return f"{usage} tokens in {pieces} pieces"


def _reasoning(session: _Session) -> str:
    """Reasoning in its own field and an answer beside it; then an answer with thinking off."""
    session.chats()
    wanted = "reasoning" in session.required
    if not wanted and not session.launch.expect.capabilities.reasoning:
        raise _Skip("reasoning is left to the template")
    question: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What is 17 * 23?"}],
        "max_tokens": REASONING_TOKENS,
    }
    thought, is_whole = _answer(session, question)
    if not thought:
        if wanted:
            raise _Fail("no reasoning came")
        raise _Skip("the model did not reason about a small question")
    message = f"{thought} characters of reasoning in their own field"
    if not is_whole:
        message += f", cut off after {REASONING_TOKENS} tokens"
    off = session.launch.questions.without_thinking
    if off is not None:
        still, is_whole = _answer(session, {**question, **off})
        message += f"; {still or 'none'} with thinking off"
    if not is_whole:
        raise _Skip(f"no answer came within {REASONING_TOKENS} tokens")
    return message


def _answer(session: _Session, question: Mapping[str, Any]) -> tuple[int, bool]:
    """How many characters of reasoning an answer has; whether its text came before the limit."""
    choice = session.chat(question)
    message = choice["message"]
    thought, text = message.get("reasoning_content") or "", message.get("content") or ""
    if mark := next((mark for mark in _THINKING_MARKS if mark in text), None):
        raise _Fail(f"the answer's text holds {mark}")
    is_whole = bool(text.strip())
    if not is_whole and choice.get("finish_reason") != "length":
        raise _Fail(f"the answer is empty, beside {len(thought)} characters of reasoning")
    return len(thought), is_whole


def _tool_call(session: _Session) -> str:
    session.chats()
    if not session.launch.expect.capabilities.tools:
        raise _Skip("the options switch tools off")
    takes_tools = session.launch.questions.template_takes_tools
    if takes_tools is not None and not session.client.ask(takes_tools):
        raise _Skip("the chat template has no tools")
    body = {
        "messages": [{"role": "user", "content": "What is 17 * 23? Use the tool."}],
        "tools": [_TOOL],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": TOOL_TOKENS,
    }
    message = session.chat(body)["message"]
    calls = message.get("tool_calls") or []
    if not calls:
        raise _Fail(f"no tool call came; it said {(message.get('content') or '')[:100]!r}")
    function = calls[0]["function"]
    if function["name"] != "multiply":
        raise _Fail(f"the call names {function['name']}")
    if not isinstance(json.loads(function["arguments"]), dict):
        raise _Fail("the call's arguments are not a JSON object")
    return f"{function['name']}({function['arguments']})"


def _speed(session: _Session) -> str:
    session.chats()
    read = session.launch.questions.speed
    if read is None:
        raise _Skip(NOT_APPLICABLE)
    body = {
        "prompt": "The history of the printing press begins " * 8,
        "max_tokens": SPEED_TOKENS,
        "temperature": 0,
        **session.launch.questions.full_work,
    }
    speed = read(session.post("/v1/completions", body, CHAT_S))
    session.measured["generation_tokens_per_s_milli"] = speed.generation_milli
    session.measured["prompt_tokens_per_s_milli"] = speed.prompt_milli
    message = (
        f"{speed.generation_milli / MILLI:.1f} tokens a second, "
        f"prompt {speed.prompt_milli / MILLI:.1f}"
    )
    if speed.generation_milli < session.floor_milli:
        raise _Fail(f"{message}; the floor is {session.floor_milli / MILLI:.1f}")
    return message


_ROWS: Mapping[str, Callable[[_Session], str]] = {
    "stream": _stream,
    "reasoning": _reasoning,
    "tool-call": _tool_call,
    "speed": _speed,
}
