"""What llama-server's answers mean; bodies as b11434 sends them, shortened."""

from __future__ import annotations

import json

import pytest

from mmadmin.core.engines.llama_server.questions import QUESTIONS, is_same_template, unknown_options
from mmadmin.core.engines.questions import UNREADABLE, Context, Question, Speed

PROPERTIES = json.dumps(
    {
        "default_generation_settings": {"n_ctx": 8192, "id": 0},
        "total_slots": 2,
        "model_path": "/store/model/m.gguf",
        "chat_template": "{{ messages }}",
        "chat_template_caps": {"supports_tools": False},
        "bos_token": "<s>",
        "eos_token": None,
    }
)


def read(name: str, body: str) -> object:
    """The answer to a question by name."""
    question = getattr(QUESTIONS, name)
    assert isinstance(question, Question)
    return question.read(body)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("model_file", "/store/model/m.gguf"),
        ("context", Context(slots=2, tokens_per_slot=8192)),
        ("chat_template", "{{ messages }}"),
        ("template_takes_tools", False),
        ("special_tokens", {"bos_token": "<s>"}),
    ],
)
def test_its_properties_answer_most_questions(name, answer):
    """Each reads its own part; another form is not taken for an answer."""
    assert read(name, PROPERTIES) == answer
    for damaged in ("", "[]", '"text"', "null"):
        with pytest.raises(UNREADABLE):
            read(name, damaged)


def test_a_template_is_asked_for_tools_unless_it_is_known_to_have_none():
    """Older servers say nothing about it."""
    assert read("template_takes_tools", "{}") is True
    assert read("template_takes_tools", '{"chat_template_caps": null}') is True


def test_names_refusals_and_prompts_are_read():
    """As the OpenAI API has them, and the rendering of its own path."""
    assert read("served_names", '{"data": [{"id": "chat"}, {"id": "other"}]}') == ["chat", "other"]
    assert QUESTIONS.error_message('{"error": {"code": 401, "message": "no"}}') == "no"
    assert QUESTIONS.rendering is not None
    assert QUESTIONS.rendering.read('{"prompt": "<s>Hi"}') == "<s>Hi"
    assert QUESTIONS.rendering.body({"messages": []}) == {"messages": []}
    assert QUESTIONS.speed is not None
    timings = '{"timings": {"prompt_per_second": 1000.5, "predicted_per_second": 9}}'
    assert QUESTIONS.speed(timings) == Speed(prompt_milli=1_000_500, generation_milli=9000)


def test_progress_is_a_mark_of_the_busy_slots():
    """It moves with their counters and not with their options; idle slots leave it empty."""
    idle = {"id": 0, "is_processing": False}
    busy = {"id": 1, "is_processing": True, "next_token": [{"n_decoded": 3}]}
    mark = read("progress", json.dumps([idle, busy]))
    assert mark
    assert read("progress", json.dumps([idle, {**busy, "params": {"seed": 2}}])) == mark
    further = {**busy, "next_token": [{"n_decoded": 4}]}
    assert read("progress", json.dumps([idle, further])) not in ("", mark)
    assert read("progress", json.dumps([idle])) == ""


def test_options_that_a_build_lacks_are_found_in_its_help():
    """A value that looks like an option counts as one; short forms are not used."""
    text = "-c, --ctx-size N   size\n--jinja, --no-jinja   template engine"
    assert unknown_options(["x", "--ctx-size", "1", "--no-jinja"], text) == []
    assert unknown_options(["x", "--jinjo", "--ctx"], text) == ["--jinjo", "--ctx"]


@pytest.mark.parametrize(
    ("served", "same"),
    [
        ("a{%- if x.y == '%' %}b{%- endif %}c\n{%- if z %}d", True),
        ("\na{%- if x.y == '%' %}b{%- endif %}c\n{%- if z %}d\n", True),
        ("a{%- if false %}b{%- endif %}c\n{%- if z %}d", True),
        ("a{%- if false %}b{%- endif %}c\n{%- if false %}d", True),
        ("a{%- if true %}b{%- endif %}c\n{%- if z %}d", False),
        ("a{%- if false %}d", False),
        ("a{%- if false %}b{%- endif %}", False),
        ("{%- if false %}", False),
        ("", False),
    ],
)
def test_a_condition_that_the_engine_switches_off_is_no_other_template(served, same):
    """llama-server does so with Mistral's; every other character must be the planned one."""
    planned = "a{%- if x.y == '%' %}b{%- endif %}c\n{%- if z %}d"
    assert is_same_template(served, planned) is same
