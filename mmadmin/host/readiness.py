"""Proof that a started engine is what it should be, before anything is routed to it.

A healthy answer is not a proof: it may come from another engine, or from one whose authentication
is off. So the engine's processes must own the listening socket, a wrong secret must be refused, the
right one must show the planned alias, model file and context, and a tiny completion must come back
with text. What the kind of engine cannot tell is not asked. An engine whose process ends fails at
once, with the last lines of its log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from mmadmin.core.build.recipe import Json
from mmadmin.core.callbacks import Report, silent
from mmadmin.core.engines.protocol import LaunchSpec, Task
from mmadmin.core.engines.questions import UNREADABLE, Context
from mmadmin.core.errors import ProbeFailed, Unreachable
from mmadmin.core.home import Home
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.host import process_tree
from mmadmin.host.engine_client import OK, EngineClient, Unanswered
from mmadmin.host.engine_process import failed_probe
from mmadmin.host.supervisor import ProgramStatus, Supervisor

POLL_S = 0.01
"""Between two questions about its health: each costs a millisecond, a late one delays clients."""
LOOK_S = 0.2
"""Between two looks at its process while it loads; these cost ten times as much."""
COMPLETION_S = 60.0
"""How long the tiny completion may take; busy processors are slow, dead ones are silent."""
SIGNALS: Mapping[str, str] = {
    "SIGILL": "the program uses instructions that this CPU does not have",
    "SIGKILL": "killed from outside, often by the kernel for lack of memory",
    "SIGSEGV": "it crashed",
    "SIGBUS": "it crashed, often on a file that shrank or a full disk",
    "SIGABRT": "it gave up by itself",
}
"""What a signal that ends an engine usually means."""
STARTING, LOADING = "starting", "loading the model"
_PROMPT = "The sun rises in the"


@dataclass(frozen=True, slots=True)
class Ready:
    """What was proved."""

    process: ProcessIdentity
    ready_after_ms: int
    alias: str
    model_path: str
    context_per_slot: int
    slots: int
    completion: str

    def as_json(self) -> dict[str, Json]:
        """As a probe report's part; times in milliseconds."""
        data: dict[str, Any] = asdict(self)
        return {**data.pop("process"), **data}


def wait_ready(
    home: Home,
    uid: str,
    launch: LaunchSpec,
    secret: str,
    *,
    deadline_s: float | None = None,
    on_progress: Report = silent,
    check: Callable[[], None] = silent,
) -> Ready:
    """Wait until the engine has proved itself. Blocking; changes nothing; may be called again.

    `deadline_s` defaults to the launch's own. `check` is called before each look and may
    raise to end the wait. Raises `ProbeFailed` with `details["probe"]` and the last log lines.
    """
    began = time.monotonic()
    give_up = began + (launch.load_deadline_s if deadline_s is None else deadline_s)
    watch = _Watch(home, uid, launch)
    reported, look_at = "", began
    with EngineClient(launch, secret) as client:
        while True:
            check()
            state = _state(client, launch)
            if state is None or time.monotonic() >= look_at:
                watch.look()
                look_at = time.monotonic() + LOOK_S
            if state is None:
                break
            if time.monotonic() > give_up:
                raise watch.failed("ready", f"it is not ready in time: {state}")
            if state != reported:
                on_progress(state)
                reported = state
            time.sleep(POLL_S)
        on_progress("answering; proving that it is the right one")
        return _prove(client, launch, watch, time.monotonic() - began)


def is_loading(launch: LaunchSpec, secret: str) -> bool:
    """True while an engine whose process runs does not listen yet, or says that it loads."""
    with EngineClient(launch, secret) as client:
        return _state(client, launch) in (STARTING, LOADING)


def _state(client: EngineClient, launch: LaunchSpec) -> str | None:
    """What the engine is doing; None = it says that it is healthy."""
    health = launch.questions.health
    try:
        answer = client.get(health.path)
    except httpx2.TimeoutException:
        return "it does not answer in time"
    except httpx2.HTTPError:
        return STARTING
    if answer.status_code in health.loading:
        return LOADING
    if answer.status_code != OK:
        return f"{health.path} answers {answer.status_code}"
    return None


class _Watch:
    """One engine's process, as the supervisor and the system see it."""

    def __init__(self, home: Home, uid: str, launch: LaunchSpec) -> None:
        self._home = home
        self._uid = uid
        self._launch = launch
        self._supervisor = Supervisor(home)
        self.process: ProcessIdentity | None = None

    def look(self) -> None:
        """Fail when the process has ended."""
        found = self._supervisor.program(self._uid)
        if found is None:
            raise self.failed("process", "the supervisor does not know it")
        if found.pid is None or found.state not in ("STARTING", "RUNNING"):
            raise self.failed("process", f"it ended{self._how(found)} while it was loading")
        if self.process is None:
            self.process = ProcessIdentity.of(found.pid)
        elif found.pid != self.process.pid:
            raise self.failed(
                "process", f"it ended{self._how(found)} while it was loading and was started again"
            )

    def _how(self, found: ProgramStatus) -> str:
        """With which exit code or signal, and what that usually means."""
        signal = self._supervisor.last_signal(self._uid)
        if signal:
            meaning = SIGNALS.get(signal)
            return f" by {signal} ({meaning})" if meaning else f" by {signal}"
        return f" with exit code {found.exit_status}" if found.exit_status else ""

    def owner(self, launch: LaunchSpec) -> ProcessIdentity | None:
        """The engine's process, if its tree listens on the socket and it is still the same one."""
        found = self.process
        owns = found and process_tree.listens(found.pid, launch.socket) and found.alive
        return found if owns else None

    def failed(self, probe: str, message: str) -> ProbeFailed:
        """The failure, with the log's last lines."""
        return failed_probe(self._home, self._uid, probe, message, self._launch)


def _prove(client: EngineClient, launch: LaunchSpec, watch: _Watch, after_s: float) -> Ready:
    """Ask the questions that only the right engine answers rightly."""
    if watch.owner(launch) is None:
        raise watch.failed("identity", "its process does not own its socket")
    try:
        _check_secret(client, launch, watch)
        model_file = _check_identity(client, launch, watch)
        context = _check_context(client, launch, watch)
        text = tiny_completion(client, launch, timeout_s=COMPLETION_S)
    except httpx2.HTTPError as error:
        raise watch.failed("completion", f"it stopped answering ({error})") from error
    except Unreachable as error:
        raise watch.failed("completion", error.message) from error
    if (process := watch.owner(launch)) is None:
        raise watch.failed("identity", "its process no longer owns its socket")
    return Ready(
        process=process,
        ready_after_ms=int(after_s * 1000),
        alias=launch.expect.alias,
        model_path=model_file,
        context_per_slot=context.tokens_per_slot,
        slots=context.slots,
        completion=text,
    )


def _check_secret(client: EngineClient, launch: LaunchSpec, watch: _Watch) -> None:
    guarded = launch.questions.guarded
    if guarded is None:
        return
    status = client.get(guarded.path, wrong_secret=True).status_code
    if status not in guarded.refusals:
        wanted = " or ".join(map(str, guarded.refusals))
        raise watch.failed("secret", f"a wrong secret got {status} instead of {wanted}")
    status = client.get(guarded.path).status_code
    if status != OK:
        raise watch.failed("secret", f"the right secret got {status} on {guarded.path}")


def _check_identity(client: EngineClient, launch: LaunchSpec, watch: _Watch) -> str:
    """Refuse another model or another template; the model file that it names, or empty."""
    questions, expect = launch.questions, launch.expect
    try:
        names = client.ask(questions.served_names)
        file = client.ask(questions.model_file) if questions.model_file else ""
        template = None
        if questions.chat_template and expect.template_path:
            template = client.ask(questions.chat_template)
    except Unanswered as error:
        raise watch.failed("identity", str(error)) from error
    if expect.alias not in names:
        raise watch.failed("identity", f"it serves {', '.join(names)}, not {expect.alias}")
    if file and expect.model_file and file != expect.model_file:
        raise watch.failed("identity", f"it serves the file {file}, not {expect.model_file}")
    if template is not None:
        # A template that an engine cannot parse may be replaced by a default one without a word.
        planned = Path(expect.template_path).read_text(encoding="utf-8")
        if not questions.is_same_template(template, planned):
            raise watch.failed("identity", "it uses another chat template than the planned one")
    return file


def _check_context(client: EngineClient, launch: LaunchSpec, watch: _Watch) -> Context:
    """The engine's slots and context; zeros where it does not tell."""
    questions, expect = launch.questions, launch.expect
    if questions.context is None:
        return Context(slots=0, tokens_per_slot=0)
    try:
        found = client.ask(questions.context)
    except Unanswered as error:
        raise watch.failed("context", str(error)) from error
    if expect.slots and found.slots and found.slots != expect.slots:
        raise watch.failed("context", f"it has {found.slots} slots, planned were {expect.slots}")
    tokens, planned = found.tokens_per_slot, expect.context_per_slot
    if planned and not planned <= tokens < planned + questions.context_grain:
        subject = "a slot" if found.slots else "a request"
        raise watch.failed(
            "context", f"{subject} has {tokens} tokens of context, planned were {planned}"
        )
    return found


def tiny_completion(
    client: EngineClient, launch: LaunchSpec, *, timeout_s: float = COMPLETION_S
) -> str:
    """A token out of the engine, or an embedding, or a rank: whatever it is for.

    A token may be a part of a character, which is not text yet: then a few are asked for.
    Raises `Unreachable` when the answer is empty, late or an error: healthy is not alive.
    """
    task = launch.expect.task
    path, bodies, found = _TINY[task]
    for body in bodies:
        try:
            answer = client.post(path, {**body, **launch.questions.full_work}, timeout_s=timeout_s)
        except httpx2.TimeoutException as error:
            raise Unreachable(
                f"a tiny {task} did not come back within {timeout_s:.0f} s",
                remedy="the engine says that it is healthy but does not work: restart it",
            ) from error
        if answer.status_code != OK:
            raise Unreachable(f"a tiny {task} was answered with {answer.status_code}")
        if text := _text(answer, found):
            return text
    raise Unreachable(f"a tiny {task} came back empty")


def _text(answer: httpx2.Response, found: Callable[[Any], Any]) -> str:
    """What a tiny question brought; empty when it is not in the answer."""
    try:
        return str(found(answer.json()))
    except UNREADABLE:
        return ""


def _completion(tokens: int) -> Mapping[str, Any]:
    return {"prompt": _PROMPT, "max_tokens": tokens, "temperature": 0}


_TINY: Mapping[Task, tuple[str, Sequence[Mapping[str, Any]], Callable[[Any], Any]]] = {
    "completion": (
        "/v1/completions",
        (_completion(1), _completion(8)),
        lambda data: data["choices"][0]["text"],
    ),
    "embedding": (
        "/v1/embeddings",
        ({"input": _PROMPT},),
        lambda data: f"{len(data['data'][0]['embedding'])} dimensions",
    ),
    "rerank": (
        "/v1/rerank",
        ({"query": _PROMPT, "documents": [_PROMPT, "east"]},),
        lambda data: f"{len(data['results'])} ranks",
    ),
}
"""By task: path, bodies (the next one where one brought nothing) and where the answer lies."""
