"""The official clients against the stub: what a small real model does not produce."""

from __future__ import annotations

import json

import anthropic
import openai

from tests.gate.harness import MODEL, Harness
from tests.gate.stub import DONE, USAGE, Call, event


def tool_chunk(index: int, **call) -> bytes:
    """A chunk with a piece of a tool call."""
    piece = {"index": index, **call}
    return event(
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}],
        }
    )


async def test_parallel_tool_calls_arrive_as_deltas(harness: Harness) -> None:
    """Two calls, their arguments in pieces, ids and names once; reasoning in its own field."""

    async def script(call: Call) -> None:
        await call.head(Content_Type="text/event-stream")
        await call.chunk(event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}))
        for number, city in enumerate(("Paris", "Rome")):
            arguments = json.dumps({"city": city})
            await call.chunk(
                tool_chunk(
                    number,
                    id=f"call_{number}",
                    type="function",
                    function={"name": "weather", "arguments": ""},
                )
            )
            for at in range(0, len(arguments), 5):
                piece = {"arguments": arguments[at : at + 5]}
                await call.chunk(tool_chunk(number, function=piece))
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
        await call.chunk(event(last) + USAGE + DONE)
        await call.end()

    harness.engine.script = script
    calls: dict[int, list[str]] = {}
    thought = ""
    async with openai.AsyncOpenAI(
        api_key=harness.key.text, base_url=harness.base_url, max_retries=0
    ) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=[], stream=True)
        async for chunk in stream:
            delta = chunk.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                parts = calls.setdefault(call.index, ["", "", ""])
                for position, text in enumerate(
                    (call.id, call.function.name, call.function.arguments)
                ):
                    parts[position] += text or ""
    assert thought == "hm"
    assert calls == {
        0: ["call_0", "weather", '{"city": "Paris"}'],
        1: ["call_1", "weather", '{"city": "Rome"}'],
    }
    assert harness.recorded[0].completion_tokens == 3


async def test_an_error_in_the_stream_is_raised_by_the_clients(harness: Harness) -> None:
    """Both clients' streams end in their own exception, not in silence."""

    async def script(call: Call) -> None:
        await call.head(Content_Type="text/event-stream")
        if call.path == "/v1/messages":
            await call.chunk(b'event: ping\ndata: {"type":"ping"}\n\n')
        else:
            await call.chunk(tool_chunk(0, function={"arguments": ""}))
        call.reset()

    harness.engine.script = script
    async with openai.AsyncOpenAI(
        api_key=harness.key.text, base_url=harness.base_url, max_retries=0
    ) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=[], stream=True)
        caught: Exception | None = None
        try:
            async for _ in stream:
                pass
        except openai.APIError as error:
            caught = error
        assert caught is not None
        assert caught.code == "upstream_error"
    async with anthropic.AsyncAnthropic(
        api_key=harness.key.text, base_url=f"http://127.0.0.1:{harness.port}", max_retries=0
    ) as other:
        raised: Exception | None = None
        try:
            async for _ in await other.messages.create(
                model=MODEL, messages=[], max_tokens=5, stream=True
            ):
                pass
        except anthropic.APIStatusError as error:
            raised = error
        assert raised is not None
        assert "The engine stopped" in str(raised)


async def test_the_clients_own_retries_work(harness: Harness) -> None:
    """A 503 with Retry-After is tried again by the client, and succeeds."""

    async def script(call: Call) -> None:
        if len(harness.engine.calls) == 1:
            await call.answer({"error": {"message": "Loading model"}}, 503, Retry_After="1")
            return
        await call.answer(
            {
                "object": "list",
                "model": MODEL,
                "data": [],
                "usage": {"prompt_tokens": 1, "total_tokens": 1},
            }
        )

    harness.engine.script = script
    async with openai.AsyncOpenAI(
        api_key=harness.key.text, base_url=harness.base_url, max_retries=1
    ) as client:
        await client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    assert [usage.status for usage in harness.recorded] == [503, 200]
