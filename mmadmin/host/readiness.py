"""Proof that a started engine is what it should be, before anything is routed to it.

A healthy answer on the right port is no proof: it may come from an older engine, or from one whose
authentication is off. So: the engine's process must own the listening socket, a wrong secret must
be refused, the right one must show the planned alias, model file and context, and a tiny
completion must come back with text. 503 means loading; an ended process is a failure at once, told
with its last log lines.
"""

from __future__ import annotations

import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import httpx2

from mmadmin.core.build.recipe import Json
from mmadmin.core.engines.protocol import LaunchSpec
from mmadmin.core.errors import ProbeFailed, Unreachable
from mmadmin.core.home import Home
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.host import process_tree
from mmadmin.host.engine_process import failed_probe, is_listened_on, port_owner
from mmadmin.host.supervisor import ProgramStatus, Supervisor

POLL_S = 0.02
"""Between two questions whether it is healthy: each costs a millisecond, a late one the client."""
LOOK_S = 0.2
"""Between two looks at its process and port while it loads; these cost ten times as much."""
ANSWER_S = 10.0
"""How long a probe question may take."""
COMPLETION_S = 60.0
"""How long the tiny completion may take; busy processors are slow, dead ones are silent."""
UNSEEN_LOOKS = 20
"""How many looks in a row an owner of the port may stay unseen before it counts as a stranger."""
CONTEXT_GRAIN = 256
"""The server rounds contexts up to a multiple of this."""
_OK, _UNAUTHORIZED, _LOADING = 200, 401, 503
_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Engines speak plain HTTP on loopback: reading the authorities of the web would take 25 ms."""
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


def _nothing(_line: str) -> None:
    return


def _go_on() -> None:
    return


class EngineClient:
    """Questions to one engine, with its secret or with a wrong one. Close it after use."""

    def __init__(self, launch: LaunchSpec, secret: str) -> None:
        self._right = {"Authorization": f"Bearer {secret}"}
        self._http = httpx2.Client(
            base_url=launch.url,
            timeout=ANSWER_S,
            trust_env=False,
            verify=_PLAIN,
            limits=httpx2.Limits(max_keepalive_connections=0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, *, wrong_secret: bool = False) -> httpx2.Response:
        """GET with the right secret, or with one that nobody has."""
        return self._http.get(path, headers=self._headers(wrong=wrong_secret))

    def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float = COMPLETION_S
    ) -> httpx2.Response:
        """POST JSON with the right secret."""
        return self._http.post(path, json=body, headers=self._right, timeout=timeout_s)

    def lines(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Iterator[str]:
        """POST JSON and read the answer's lines as they come; `timeout_s` is for the whole.

        Raises `httpx2.HTTPStatusError` for a refusal and `httpx2.ReadTimeout` at the deadline.
        """
        give_up = time.monotonic() + timeout_s
        with self._http.stream(
            "POST", path, json=body, headers=self._right, timeout=timeout_s
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                yield line
                if time.monotonic() > give_up:
                    raise httpx2.ReadTimeout("the stream takes too long", request=answer.request)

    def _headers(self, *, wrong: bool) -> dict[str, str]:
        if wrong:
            return {"Authorization": f"Bearer {secrets.token_hex(32)}"}
        return self._right


def wait_ready(
    home: Home,
    uid: str,
    launch: LaunchSpec,
    secret: str,
    *,
    deadline_s: float | None = None,
    on_progress: Callable[[str], None] = _nothing,
    check: Callable[[], None] = _go_on,
) -> Ready:
    """Wait until the engine has proved itself. Blocking; changes nothing; may be called again.

    `deadline_s` defaults to the launch's own. `check` is called at every turn and may raise to
    end the wait. Raises `ProbeFailed` with `details["probe"]` and the last log lines.
    """
    began = time.monotonic()
    give_up = began + (launch.load_deadline_s if deadline_s is None else deadline_s)
    watch = _Watch(home, uid)
    told, look_at = "", began
    with EngineClient(launch, secret) as client:
        while True:
            check()
            words = _state(client, launch)
            if words is None or time.monotonic() >= look_at:
                watch.look(launch)
                look_at = time.monotonic() + LOOK_S
            if words is None:
                break
            if time.monotonic() > give_up:
                raise watch.failed("ready", f"it is not ready in time: {words}")
            if words != told:
                on_progress(words)
                told = words
            time.sleep(POLL_S)
        on_progress("answering; proving that it is the right one")
        return _prove(client, launch, watch, time.monotonic() - began)


def is_loading(launch: LaunchSpec, secret: str) -> bool:
    """True while an engine whose process runs does not listen yet, or says that it loads."""
    with EngineClient(launch, secret) as client:
        return _state(client, launch) in (STARTING, LOADING)


def _state(client: EngineClient, launch: LaunchSpec) -> str | None:
    """What the engine is doing, in words; None = it says that it is healthy."""
    try:
        answer = client.get(launch.probe.health_path)
    except httpx2.TimeoutException:
        return "it does not answer in time"
    except httpx2.HTTPError:
        return STARTING
    if answer.status_code == _LOADING:
        return LOADING
    if answer.status_code != _OK:
        return f"{launch.probe.health_path} answers {answer.status_code}"
    return None


class _Watch:
    """One engine's process, as the supervisor and the system see it."""

    def __init__(self, home: Home, uid: str) -> None:
        self._home = home
        self._uid = uid
        self._supervisor = Supervisor(home)
        self.process: ProcessIdentity | None = None
        self._unseen = 0

    def look(self, launch: LaunchSpec) -> None:
        """Fail when the process has ended, or when another one listens on its port."""
        found = self._supervisor.program(self._uid)
        if found is None:
            raise self.failed("process", "the supervisor does not know it")
        process = self._check_process(found)
        if process is None or not is_listened_on(launch.port):
            self._unseen = 0
            return
        if process_tree.listens(process.pid, launch.port):
            return
        owner = port_owner(launch.port, launch.host)
        if owner is not None and owner.pid == 0:
            self._unseen += 1
        else:
            self._unseen = 0
        ours = {one.pid for one in process_tree.members(process.pid)}
        stranger = owner is not None and owner.pid not in {0, *ours}
        if owner is not None and (stranger or self._unseen > UNSEEN_LOOKS):
            raise self.failed(
                "identity",
                f"port {launch.port} belongs to {owner.name} (pid {owner.pid}), not to the engine",
            )

    def _check_process(self, found: ProgramStatus) -> ProcessIdentity | None:
        """The engine's process, the same at each look; None when it has ended just now."""
        if found.pid is None or found.state not in ("STARTING", "RUNNING"):
            raise self.failed("process", f"it ended{self._how(found)} while it was loading")
        if self.process is None:
            self.process = ProcessIdentity.of(found.pid)
        elif found.pid != self.process.pid:
            raise self.failed(
                "process", f"it ended{self._how(found)} while it was loading and was started again"
            )
        return self.process

    def _how(self, found: ProgramStatus) -> str:
        """With which exit code or signal, and what that usually means."""
        signal = self._supervisor.last_signal(self._uid)
        if signal:
            meaning = SIGNALS.get(signal)
            return f" by {signal} ({meaning})" if meaning else f" by {signal}"
        return f" with exit code {found.exit_status}" if found.exit_status else ""

    def owner(self, launch: LaunchSpec) -> ProcessIdentity | None:
        """The engine's process, if it listens on its port and is still the same one."""
        found = self.process
        return (
            found
            if found and process_tree.listens(found.pid, launch.port) and found.alive
            else None
        )

    def failed(self, probe: str, words: str) -> ProbeFailed:
        """The failure, with the log's last lines."""
        return failed_probe(self._home, self._uid, probe, words)


def _prove(client: EngineClient, launch: LaunchSpec, watch: _Watch, after_s: float) -> Ready:
    """Ask the questions that only the right engine answers rightly."""
    probe = launch.probe
    if watch.owner(launch) is None:
        raise watch.failed("identity", f"its process does not own port {launch.port}")
    try:
        refused = client.get("/props", wrong_secret=True)
        if refused.status_code != _UNAUTHORIZED:
            raise watch.failed(
                "secret", f"a wrong secret was answered with {refused.status_code} instead of 401"
            )
        props = _json(client.get("/props"), "secret", "the right secret", watch)
        models = _json(client.get(probe.models_path), "identity", probe.models_path, watch)
        names = [str(row.get("id")) for row in models.get("data", [])]
        if probe.alias not in names:
            raise watch.failed("identity", f"it serves {', '.join(names)}, not {probe.alias}")
        path = str(props.get("model_path", ""))
        if probe.model_path and path != probe.model_path:
            raise watch.failed("identity", f"it serves the file {path}, not {probe.model_path}")
        _check_template(props, launch, watch)
        context = int(props.get("default_generation_settings", {}).get("n_ctx", 0))
        slots = int(props.get("total_slots", 0))
        _check_context(context, slots, launch, watch)
        text = tiny_completion(client, launch, timeout_s=COMPLETION_S)
    except httpx2.HTTPError as error:
        raise watch.failed("completion", f"it stopped answering ({error})") from error
    except Unreachable as error:
        raise watch.failed("completion", error.message) from error
    if (process := watch.owner(launch)) is None:
        raise watch.failed("identity", f"its process no longer owns port {launch.port}")
    return Ready(
        process=process,
        ready_after_ms=int(after_s * 1000),
        alias=probe.alias,
        model_path=path,
        context_per_slot=context,
        slots=slots,
        completion=text,
    )


def _json(answer: httpx2.Response, probe: str, what: str, watch: _Watch) -> dict[str, Any]:
    if answer.status_code != _OK:
        raise watch.failed(probe, f"{what} was answered with {answer.status_code}")
    try:
        data = answer.json()
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise watch.failed(probe, f"{what} was not answered with a JSON object")
    return data


def _check_template(props: Mapping[str, Any], launch: LaunchSpec, watch: _Watch) -> None:
    """A template that the engine could not parse may be replaced by a default one in silence."""
    if not launch.probe.template_path:
        return
    planned = Path(launch.probe.template_path).read_text(encoding="utf-8")
    if not is_same_template(str(props.get("chat_template", "")), planned):
        raise watch.failed("identity", "it uses another chat template than the planned one")


SWITCHED_OFF = "{%- if false %}"
CONDITION = r"\{%- if (?:(?!%\}).)*%\}"


def is_same_template(served: str, planned: str) -> bool:
    """True for the planned text, blanks at its ends and switched-off conditions aside.

    llama-server makes conditions false that it knows to fail in its interpreter, those of Mistral's
    and of gpt-oss' templates among them (llama.cpp, common/chat.cpp); the rest of the text stays.
    """
    kept = served.strip().split(SWITCHED_OFF)
    return (
        re.fullmatch(CONDITION.join(map(re.escape, kept)), planned.strip(), re.DOTALL) is not None
    )


def _check_context(context: int, slots: int, launch: LaunchSpec, watch: _Watch) -> None:
    planned, planned_slots = launch.probe.context_per_slot, launch.probe.slots
    if planned_slots and slots != planned_slots:
        raise watch.failed("context", f"it has {slots} slots, planned were {planned_slots}")
    if planned and not planned <= context < planned + CONTEXT_GRAIN:
        raise watch.failed(
            "context", f"a slot has {context} tokens of context, planned were {planned}"
        )


def tiny_completion(
    client: EngineClient, launch: LaunchSpec, *, timeout_s: float = COMPLETION_S
) -> str:
    """A token out of the engine, or an embedding, or a rank: whatever it is for.

    A token may be a part of a character, which is no text yet: then a few are asked for.
    Raises `Unreachable` when the answer is empty, late or an error: healthy is not alive.
    """
    path, bodies, found = _QUESTIONS[launch.probe.task]
    for body in bodies:
        try:
            answer = client.post(path, body, timeout_s=timeout_s)
        except httpx2.TimeoutException as error:
            raise Unreachable(
                f"a tiny {launch.probe.task} did not come back within {timeout_s:.0f} s",
                remedy="the engine says that it is healthy but does not work: restart it",
            ) from error
        if answer.status_code != _OK:
            raise Unreachable(f"a tiny {launch.probe.task} was answered with {answer.status_code}")
        if text := _text(answer, found):
            return text
    raise Unreachable(f"a tiny {launch.probe.task} came back empty")


def _text(answer: httpx2.Response, found: Callable[[Any], Any]) -> str:
    """What a tiny question brought; empty when it is not in the answer."""
    try:
        return str(found(answer.json()))
    except (ValueError, KeyError, IndexError, TypeError):
        return ""


def _completion(tokens: int) -> Mapping[str, Any]:
    return {
        "prompt": _PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }


_QUESTIONS: Mapping[str, tuple[str, Sequence[Mapping[str, Any]], Callable[[Any], Any]]] = {
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
"""Path, bodies (the next is asked where one brought nothing) and where the answer lies."""
