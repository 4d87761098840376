"""The engine's own token counts, from a response's `usage` in any dialect."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

BYTES_A_TOKEN = 4
"""For estimates only: the usual rule of thumb for English text."""
PARSED_WHOLE_BYTES = 64 * 1024
"""A longer answer (embeddings) is searched from its end instead of parsed."""
INFLATED_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one request cost."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    per_s_milli: int = 0
    """Generation speed as the engine measured it; 0 = not reported."""
    exact: bool = True
    """False = an estimate."""


def tokens_of_answer(body: bytes, content_encoding: bytes = b"") -> Tokens | None:
    """Tokens of a whole JSON answer, or None when it does not say."""
    if content_encoding not in (b"", b"identity"):
        inflated = _inflate(body)
        if inflated is None:
            return None
        body = inflated
    if len(body) <= PARSED_WHOLE_BYTES:
        return _tokens(_parse(body))
    start = body.rfind(b'"usage":')
    if start < 0:
        return None
    try:
        text = body[start + 8 : start + 4096].decode(errors="replace").lstrip()
        usage, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    return _tokens({"usage": usage})


def tokens_of_answers(reported: Tokens, answer: bytes, prompt_bytes: int, most: int) -> Tokens:
    """Tokens of several answers whose usage is that of the first: the others by their lengths.

    All of them, with their prompts, are at most `most`.
    """
    data = _parse(answer)
    choices = data.get("choices") if isinstance(data, dict) else None
    first, *others = [_written_bytes(choice) for choice in choices or ()] or [0]
    each = reported.completion / first if first >= 2 * BYTES_A_TOKEN else 1 / BYTES_A_TOKEN
    completion = reported.completion + sum(math.ceil(other * each) for other in others)
    return replace(
        reported,
        prompt=max(reported.prompt, prompt_bytes // BYTES_A_TOKEN),
        completion=max(min(completion, most - prompt_bytes // BYTES_A_TOKEN), reported.completion),
        exact=False,
    )


def _written_bytes(choice: Any) -> int:
    """Bytes that an engine wrote into one answer."""
    if not isinstance(choice, dict):
        return 0
    text, message = choice.get("text"), choice.get("message")
    if isinstance(text, str):
        return len(text.encode())
    if not isinstance(message, dict):
        return 0
    return sum(
        len(value.encode()) if isinstance(value, str) else len(orjson.dumps(value))
        for name, value in message.items()
        if value and name != "role"
    )


def sum_of_events(notes: Sequence[bytes], *, one_prompt: bool) -> Tokens | None:
    """Tokens of a stream of several answers, each of which reports its own usage."""
    found = [tokens for note in notes if (tokens := _tokens(_parse(note))) is not None]
    if not found:
        return None
    prompts = found[:1] if one_prompt else found
    return Tokens(
        prompt=sum(each.prompt for each in prompts),
        completion=sum(each.completion for each in found),
        cached=sum(each.cached for each in prompts),
        reasoning=sum(each.reasoning for each in found),
        per_s_milli=found[-1].per_s_milli,
    )


def tokens_of_events(notes: Sequence[bytes]) -> Tokens | None:
    """Tokens of a stream, from the events that carried usage; the later numbers win."""
    found: Tokens | None = None
    for note in notes:
        tokens = _tokens(_parse(note))
        if tokens is None:
            continue
        found = Tokens(
            prompt=max(tokens.prompt, found.prompt if found else 0),
            completion=max(tokens.completion, found.completion if found else 0),
            cached=max(tokens.cached, found.cached if found else 0),
            reasoning=max(tokens.reasoning, found.reasoning if found else 0),
            per_s_milli=tokens.per_s_milli,
        )
    return found


def _parse(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _inflate(body: bytes) -> bytes | None:
    """A gzip or deflate body, within a limit; None for anything else."""
    try:
        return zlib.decompressobj(wbits=47).decompress(body, INFLATED_LIMIT_BYTES)
    except zlib.error:
        return None


def _number(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) and value > 0 else 0


def _detail(usage: dict[str, Any], group: str, name: str) -> int:
    details = usage.get(group)
    return _number(details.get(name)) if isinstance(details, dict) else 0


def _tokens(data: Any) -> Tokens | None:
    """Read any of the shapes: chat, completions, embeddings, responses, messages."""
    if not isinstance(data, dict):
        return None
    for wrapper in ("response", "message"):
        if "usage" not in data and isinstance(data.get(wrapper), dict):
            data = data[wrapper]
    usage = data.get("usage")
    if not isinstance(usage, dict):
        if isinstance(count := data.get("input_tokens"), int):
            return Tokens(prompt=count)
        return None
    timings = data.get("timings")
    speed = timings.get("predicted_per_second") if isinstance(timings, dict) else None
    per_s_milli = min(int(_number(speed and speed * 1000)), 2**31 - 1)
    if "prompt_tokens" in usage or ("total_tokens" in usage and "input_tokens" not in usage):
        return Tokens(
            prompt=_number(usage.get("prompt_tokens", usage.get("total_tokens"))),
            completion=_number(usage.get("completion_tokens")),
            cached=_detail(usage, "prompt_tokens_details", "cached_tokens"),
            reasoning=_detail(usage, "completion_tokens_details", "reasoning_tokens"),
            per_s_milli=per_s_milli,
        )
    cache_read = _number(usage.get("cache_read_input_tokens"))
    cache_written = _number(usage.get("cache_creation_input_tokens"))
    return Tokens(
        prompt=_number(usage.get("input_tokens")) + cache_read + cache_written,
        completion=_number(usage.get("output_tokens")),
        cached=cache_read or _detail(usage, "input_tokens_details", "cached_tokens"),
        reasoning=_detail(usage, "output_tokens_details", "reasoning_tokens"),
        per_s_milli=per_s_milli,
    )
