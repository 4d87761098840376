"""What a running vLLM answers, as it was recorded from version 0.32.0."""

from __future__ import annotations

import pytest

from mmadmin.core.engines.questions import Context
from mmadmin.core.engines.vllm.questions import (
    QUESTIONS,
    cause_of_end,
    context,
    error_message,
    progress,
    served_names,
)

MODELS = (
    '{"object":"list","data":[{"id":"tiny","object":"model","created":1796129450,'
    '"owned_by":"vllm","root":"/srv/bf16","parent":null,"max_model_len":1024,"permission":[]}]}'
)
LABELS = '{engine="0",model_name="tiny"}'


def metrics(running: float, generated: float, computed: float) -> str:
    """A page of metrics."""
    return (
        "# HELP vllm:num_requests_running Number of requests\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{LABELS} {running}\n"
        f"vllm:generation_tokens_total{LABELS} {generated}\n"
        f"vllm:iteration_tokens_total_sum{LABELS} {computed}\n"
    )


def test_names_and_context() -> None:
    """One row a model; how many requests are served at once it does not tell."""
    assert served_names(MODELS) == ["tiny"]
    assert context(MODELS) == Context(slots=0, tokens_per_slot=1024)


def test_progress_is_a_mark_while_a_request_runs() -> None:
    """It changes with every step, and is empty without requests."""
    assert progress(metrics(0.0, 8.0, 12.0)) == ""
    first = progress(metrics(1.0, 8.0, 12.0))
    assert first == progress(metrics(2.0, 8.0, 12.0))
    assert first != progress(metrics(1.0, 9.0, 13.0))
    assert first != progress(metrics(1.0, 8.0, 8204.0)), "a prompt that is computed in parts"


def test_refusals_have_two_forms() -> None:
    """A table, or a text where the secret is wrong."""
    assert error_message('{"error":{"message":"too long","code":400}}') == "too long"
    assert error_message('{"error":"Unauthorized"}') == "Unauthorized"


CORE = "(EngineCore pid=9) ERROR 12-01 12:47:54 [core.py:1] "
SERVER = "(APIServer pid=8) "


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            [
                "usage: vllm serve [model_tag] [options]",
                "vllm serve: error: unrecognized arguments: --bad",
            ],
            "unrecognized arguments: --bad",
        ),
        (
            [
                "main.py serve: error: argument --dtype: invalid choice: 'x'",
                "",
            ],
            "argument --dtype: invalid choice: 'x'",
        ),
        (
            [
                f"{CORE}ValueError: To serve at least one request, 4.0 GiB KV cache is needed",
                f"{SERVER}Traceback (most recent call last):",
                f"{SERVER}RuntimeError: Engine core initialization failed. See root cause above.",
                "nanobind: leaked 64 types!",
            ],
            "To serve at least one request, 4.0 GiB KV cache is needed",
        ),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, max_model_len (9) is greater than 8 [type=value_error]",
            ],
            "Value error, max_model_len (9) is greater than 8 [type=value_error]",
        ),
        (["INFO 12-01 12:47:54 started"], ""),
    ],
)
def test_the_cause_of_an_end_is_found_in_the_log(log: list[str], cause: str) -> None:
    """The error itself, not those that follow it."""
    assert cause_of_end(log) == cause


def test_what_it_cannot_answer_is_not_asked() -> None:
    """Template, model file and speed are not applicable."""
    asked = (QUESTIONS.chat_template, QUESTIONS.model_file, QUESTIONS.rendering, QUESTIONS.speed)
    assert asked == (None, None, None, None)
