"""The questions that a running vLLM answers (vLLM's OpenAI-compatible server)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from mmadmin.core.engines.questions import Context, Guarded, Health, Question, Questions

MODELS = "/v1/models"
RUNNING = "vllm:num_requests_running"
STEPS = ("vllm:iteration_tokens_total_sum", "vllm:generation_tokens_total")
"""Counters that rise with every step of the engine."""
_METRIC = re.compile(r"(?P<name>[\w:]+)(?:\{[^}]*\})? (?P<value>\S+)")
_PREFIX = re.compile(r"^\([^)]*pid=\d+\) ?")
_ERROR = re.compile(
    r"(?:^|\s)(?P<kind>[\w.]*(?:Error|Exception)): (?P<message>\S.*)"
    r"|^\S+ serve: error: (?P<usage>\S.*)|^\S+: error: (?P<other>\S.*)"
)
_NOT_THE_CAUSE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|See (?:the )?root cause"
    r"|Engine process failed to start|failed to be inspected"
)
"""Errors that only say that there was one before."""


def served_names(text: str) -> list[str]:
    """Every model name that it answers to."""
    return [str(row["id"]) for row in json.loads(text)["data"]]


def error_message(text: str) -> str:
    """The message of a refusal; the one of a wrong secret is no table."""
    error = json.loads(text)["error"]
    return error if isinstance(error, str) else str(error["message"])


def context(text: str) -> Context:
    """The tokens that a request may use; how many are served at once it does not tell."""
    (row,) = json.loads(text)["data"][:1]
    return Context(slots=0, tokens_per_slot=int(row["max_model_len"]))


def metric(text: str, *names: str) -> float:
    """The sum of metrics over all their labels, in the form that Prometheus reads."""
    found = (_METRIC.fullmatch(line) for line in text.splitlines())
    return sum(float(one["value"]) for one in found if one and one["name"] in names)


def progress(text: str) -> str:
    """What was computed so far, while a request runs."""
    if not metric(text, RUNNING):
        return ""
    return ",".join(str(metric(text, name)) for name in STEPS)


def cause_of_end(lines: Sequence[str]) -> str:
    """The error in its log that ended it: vLLM logs much after it, and errors that only follow."""
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        found = _ERROR.search(_PREFIX.sub("", line.rstrip()))
        if found is None or _NOT_THE_CAUSE.search(line):
            continue
        message = found["message"] or found["usage"] or found["other"]
        if "validation error" in message and number + 1 < len(lines):
            message = lines[number + 1].strip()
            if _NOT_THE_CAUSE.search(message):
                continue
        return message
    return ""


QUESTIONS = Questions(
    health=Health("/health"),
    served_names=Question(MODELS, served_names),
    error_message=error_message,
    guarded=Guarded(MODELS),
    context=Question(MODELS, context),
    progress=Question("/metrics", progress),
    full_work={"ignore_eos": True},
    cause_of_end=cause_of_end,
)
