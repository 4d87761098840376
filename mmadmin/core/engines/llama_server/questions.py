"""The questions that a running llama-server answers (llama.cpp, tools/server/README.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from mmadmin.core.engines.questions import (
    Context,
    Guarded,
    Health,
    Question,
    Questions,
    Rendering,
    Speed,
)
from mmadmin.core.snapshot import AnswerFields, ErrorPatterns

MILLI = 1000
PROPERTIES = "/props"
CAPS = ("n_predict", "max_completion_tokens", "max_tokens")
"""Names of one option (tools/server/server-schema.cpp)."""
SPECIAL_TOKENS = ("bos_token", "eos_token")
SWITCHED_OFF = "{%- if false %}"
CONDITION = r"\{%- if (?:(?!%\}).)*%\}"
_OPTION = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9.-]*")


def is_same_template(served: str, planned: str) -> bool:
    """True for the planned text, except for outer blanks and conditions that are switched off.

    llama-server makes conditions false that it knows to fail in its interpreter, those of Mistral's
    and of gpt-oss' templates among them (llama.cpp, common/chat.cpp); the rest of the text stays.
    """
    kept = served.strip().split(SWITCHED_OFF)
    return (
        re.fullmatch(CONDITION.join(map(re.escape, kept)), planned.strip(), re.DOTALL) is not None
    )


def unknown_options(argv: Sequence[str], help_text: str) -> list[str]:
    """The options of a command that the help text does not name."""
    known = set(_OPTION.findall(help_text))
    return [word for word in argv if word.startswith("--") and word not in known]


def _served_names(text: str) -> list[str]:
    return [str(row["id"]) for row in json.loads(text)["data"]]


def _error_message(text: str) -> str:
    return str(json.loads(text)["error"]["message"])


def _model_file(text: str) -> str:
    return str(json.loads(text)["model_path"])


def _context(text: str) -> Context:
    properties = json.loads(text)
    tokens = int(properties["default_generation_settings"]["n_ctx"])
    return Context(slots=int(properties["total_slots"]), tokens_per_slot=tokens)


def _chat_template(text: str) -> str:
    return str(json.loads(text)["chat_template"])


def _special_tokens(text: str) -> Mapping[str, str]:
    properties = json.loads(text)
    return {
        name: properties[name] for name in SPECIAL_TOKENS if isinstance(properties.get(name), str)
    }


def _template_takes_tools(text: str) -> bool:
    capabilities = json.loads(text).get("chat_template_caps") or {}
    return capabilities.get("supports_tools") is not False


def _prompt(text: str) -> str:
    return str(json.loads(text)["prompt"])


def _progress(text: str) -> str:
    """The counters of the busy slots; their options, which may be large, are left out."""
    busy: list[dict[str, Any]] = [
        {name: value for name, value in slot.items() if name != "params"}
        for slot in json.loads(text)
        if slot["is_processing"]
    ]
    return sha256(json.dumps(busy, sort_keys=True).encode()).hexdigest() if busy else ""


def _speed(text: str) -> Speed:
    timings = json.loads(text)["timings"]
    return Speed(
        prompt_milli=int(timings["prompt_per_second"] * MILLI),
        generation_milli=int(timings["predicted_per_second"] * MILLI),
    )


QUESTIONS = Questions(
    health=Health("/health"),
    served_names=Question("/v1/models", _served_names),
    error_message=_error_message,
    error_patterns=ErrorPatterns(
        context_type="exceed_context_size_error",
        template="Jinja Exception: ",
        no_input=r"(image|audio|video) input is not supported",
        request=(
            r"Failed to (?:parse (?:messages|tools|tool call)|load image|download image"
            r"|tokenize prompt)|Unsupported param|Only no echo|Invalid base64"
            r"|Cannot (?:use both|specify)|Multimodal data provided|[\"']\w+[\"'] is required"
        ),
        advice=r"(?:,? try increasing it|\.? Start it with `[^`]*`)",
    ),
    answer_fields=AnswerFields(
        caps={
            "/v1/chat/completions": CAPS,
            "/v1/completions": CAPS,
            "/v1/responses": ("max_output_tokens", *CAPS),
            "/v1/messages": ("max_tokens",),
        },
        choices=("n_cmpl", "n"),
        usage_of_one=True,
    ),
    guarded=Guarded(PROPERTIES),
    model_file=Question(PROPERTIES, _model_file),
    context=Question(PROPERTIES, _context),
    context_grain=256,
    chat_template=Question(PROPERTIES, _chat_template),
    is_same_template=is_same_template,
    special_tokens=Question(PROPERTIES, _special_tokens),
    template_takes_tools=Question(PROPERTIES, _template_takes_tools),
    rendering=Rendering("/apply-template", dict, _prompt),
    progress=Question("/slots", _progress),
    speed=_speed,
    full_work={"cache_prompt": False, "ignore_eos": True},
    without_thinking={"chat_template_kwargs": {"enable_thinking": False}},
    unknown_options=unknown_options,
    own_environment=("LLAMA_ARG_",),
)
