"""The official clients against the gate and a real llama-server with a real small model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.gate.harness import MODEL, Harness
from tests.gate.raw import RawClient, ask
from tests.gate.real import Server, launched, opened

pytestmark = pytest.mark.engine
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
ALIKE = {"cache_prompt": False}
"""Each answer is computed from the same beginning, so that the same question has the same answer."""
WHOLE = {"ignore_eos": True}
"""As many tokens as were asked for, whatever the model would like to say."""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
STRICT_TEMPLATE = """
{%- if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] -%}
{{- raise_exception('reasoning_effort must be either "none" or "high"') -}}
{%- endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def server(engine_store) -> Iterator[Server]:
    """The engine as deployments run it."""
    with launched(engine_store) as running:
        yield running


@pytest.fixture(scope="module")
def strict_server(engine_store, tmp_path_factory) -> Iterator[Server]:
    """An engine that embeds, reranks nothing, and whose template refuses some values."""
    template: Path = tmp_path_factory.mktemp("template") / "strict.jinja"
    template.write_text(STRICT_TEMPLATE)
    with launched(engine_store, "--chat-template-file", str(template)) as running:
        yield running


@pytest.fixture(scope="module")
def tools_server(engine_store) -> Iterator[Server]:
    """An engine whose template knows tools (one that the engine's own source carries)."""
    templates = engine_store.path("engine-source") / "models" / "templates"
    with launched(
        engine_store, "--chat-template-file", str(templates / "Qwen-Qwen2.5-7B-Instruct.jinja")
    ) as running:
        yield running


@pytest.fixture(scope="module")
def embedding_server(engine_store) -> Iterator[Server]:
    """An engine that embeds."""
    with launched(engine_store, "--embeddings", "--pooling", "mean") as running:
        yield running


@pytest_asyncio.fixture
async def real(tmp_path, server) -> AsyncIterator[Harness]:
    """The gate over the usual engine."""
    async with opened(tmp_path, server) as harness:
        yield harness


@pytest_asyncio.fixture
async def strict(tmp_path, strict_server) -> AsyncIterator[Harness]:
    """The gate over the engine with the strict template."""
    async with opened(tmp_path, strict_server) as harness:
        yield harness


@pytest_asyncio.fixture
async def tools(tmp_path, tools_server) -> AsyncIterator[Harness]:
    """The gate over the engine that knows tools."""
    async with opened(tmp_path, tools_server) as harness:
        yield harness


@pytest_asyncio.fixture
async def embedding(tmp_path, embedding_server) -> AsyncIterator[Harness]:
    """The gate over the engine that embeds."""
    async with opened(tmp_path, embedding_server) as harness:
        yield harness


@pytest_asyncio.fixture
async def client(real: Harness) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, without retries."""
    async with openai.AsyncOpenAI(
        api_key=real.key.text, base_url=real.base_url, max_retries=0, timeout=600
    ) as official:
        yield official


async def test_models(client) -> None:
    """List and one."""
    assert [model.id async for model in await client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-5")


async def test_chat(client, real: Harness) -> None:
    """Whole and streamed answers, with the engine's token counts in the usage records."""
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0, "seed": 1}
    whole = await client.chat.completions.create(**options, extra_body=ALIKE)
    stream = await client.chat.completions.create(**options, stream=True, extra_body=ALIKE)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert all(chunk.usage is None for chunk in chunks)
    assert whole._request_id == real.recorded[0].id
    again = await client.chat.completions.create(**options)
    asked = await client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}, extra_body=ALIKE
    )
    last = [chunk async for chunk in asked][-1]
    assert last.choices == []
    said = [whole.usage, whole.usage, again.usage, last.usage]
    for usage, told in zip(real.recorded, said, strict=True):
        assert usage.exact
        assert usage.completion_tokens == told.completion_tokens
        assert usage.prompt_tokens == told.prompt_tokens == whole.usage.prompt_tokens
        assert usage.tokens_per_s_milli > 0
    assert real.recorded[1].ttft_ms > 0
    assert real.recorded[2].cached_tokens > 0


async def test_chat_options(client) -> None:
    """stop, n, logprobs, reasoning_effort."""
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    several = await client.chat.completions.create(**options, n=2)
    assert len(several.choices) == 2
    stopped = await client.chat.completions.create(**options, stop=["Paris"])
    assert "Paris" not in stopped.choices[0].message.content
    likely = await client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert len(likely.choices[0].logprobs.content[0].top_logprobs) == 2
    effort = await client.chat.completions.create(**options, reasoning_effort="low")
    assert effort.choices[0].message.content


async def test_structured_output(client) -> None:
    """A JSON schema binds the answer."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "big"}


async def test_tools_and_their_results_are_understood(tools: Harness) -> None:
    """Definitions, a parallel call and its results reach the template: the prompt grows by them.

    (A model this small does not call tools reliably; calls as deltas are tested with the stub.)
    """
    async with openai.AsyncOpenAI(
        api_key=tools.key.text, base_url=tools.base_url, max_retries=0, timeout=600
    ) as client:
        options = {"model": MODEL, "max_tokens": 2, "temperature": 0}
        plain = await client.chat.completions.create(**options, messages=QUESTION)
        offered = await client.chat.completions.create(**options, messages=QUESTION, tools=[TOOL])
        calls = [
            {"id": f"call_{city}", "type": "function",
             "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
            for city in ("Paris", "Rome")
        ]  # fmt: skip
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls
        ]
        told = await client.chat.completions.create(
            **options,
            tools=[TOOL],
            messages=[
                *QUESTION,
                {"role": "assistant", "content": None, "tool_calls": calls},
                *results,
            ],
        )
        sizes = [answer.usage.prompt_tokens for answer in (plain, offered, told)]
        assert sizes == sorted(set(sizes))
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                **options, messages=QUESTION, tools=[{"type": "function"}]
            )


async def test_completions_and_tokens(client, real: Harness) -> None:
    """The older endpoint, and the tokenizer both ways."""
    options = {"model": MODEL, "prompt": "1, 2, 3,", "max_tokens": 6, "temperature": 0}
    answer = await client.completions.create(**options, extra_body=WHOLE)
    assert answer.choices[0].text
    pieces = ""
    async for chunk in await client.completions.create(**options, stream=True, extra_body=WHOLE):
        pieces += chunk.choices[0].text
    assert pieces
    assert [usage.completion_tokens for usage in real.recorded] == [6, 6]
    tokens = await ask(real.port, "/tokenize", {"content": "hello"}, key=real.key.text)
    assert tokens.json["tokens"]
    back = await ask(real.port, "/v1/detokenize", tokens.json, key=real.key.text)
    assert back.json["content"].strip() == "hello"
    counted = await ask(
        real.port,
        "/v1/chat/completions/input_tokens",
        {"model": MODEL, "messages": QUESTION},
        key=real.key.text,
    )
    assert counted.json["input_tokens"] > 5


async def test_responses(client, real: Harness) -> None:
    """The responses API, whole and streamed."""
    options = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 8, "temperature": 0,
               "extra_body": WHOLE}  # fmt: skip
    answer = await client.responses.create(**options)
    assert answer.output_text
    events = [event async for event in await client.responses.create(**options, stream=True)]
    assert events[-1].type == "response.completed"
    assert events[-1].response.usage.output_tokens == 8
    assert [(u.endpoint, u.completion_tokens, u.exact) for u in real.recorded] == [
        ("responses", 8, True)
    ] * 2


async def test_messages(real: Harness) -> None:
    """Anthropic's own client: whole, streamed, counted, refused."""
    async with anthropic.AsyncAnthropic(
        api_key=real.key.text, base_url=f"http://127.0.0.1:{real.port}", max_retries=0, timeout=600
    ) as client:
        options = {"model": MODEL, "messages": QUESTION, "max_tokens": 8,
                   "extra_body": {**WHOLE, "temperature": 0}}  # fmt: skip
        answer = await client.messages.create(**options)
        assert answer.content[0].text
        assert answer.usage.output_tokens == 8
        text = ""
        async with client.messages.stream(**options) as stream:
            async for piece in stream.text_stream:
                text += piece
            final = await stream.get_final_message()
        assert text
        assert final.usage.output_tokens == 8
        count = await client.messages.count_tokens(model=MODEL, messages=QUESTION)
        assert count.input_tokens == answer.usage.input_tokens + (
            answer.usage.cache_read_input_tokens or 0
        )
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**options, "model": "no-such-model"})
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="sk-wrong").messages.create(**options)
    assert [u.completion_tokens for u in real.recorded[:2]] == [8, 8]
    assert {u.endpoint for u in real.recorded} == {"messages"}


async def test_embeddings(embedding: Harness) -> None:
    """Vectors through the official client; the engine's error elsewhere."""
    async with openai.AsyncOpenAI(
        api_key=embedding.key.text, base_url=embedding.base_url, max_retries=0, timeout=600
    ) as client:
        answer = await client.embeddings.create(model=MODEL, input=["hello", "goodbye"])
        assert len(answer.data) == 2
        assert len(answer.data[0].embedding) == 576
    assert embedding.recorded[0].prompt_tokens == answer.usage.prompt_tokens > 0


async def test_errors_become_the_clients_own(client, real: Harness) -> None:
    """Every class of error raises what the client's users catch."""
    chat = client.chat.completions
    with pytest.raises(openai.NotFoundError):
        await chat.create(model="nothing", messages=QUESTION)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").chat.completions.create(
            model=MODEL, messages=QUESTION
        )
    with pytest.raises(openai.BadRequestError) as long:
        await chat.create(model=MODEL, messages=[{"role": "user", "content": "word " * 6000}])
    assert long.value.code == "context_length_exceeded"
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError) as image:
        await chat.create(model=MODEL, messages=[{"role": "user", "content": [picture]}])
    assert image.value.body["message"] == "This model does not accept image input."
    with pytest.raises(openai.BadRequestError) as vectors:
        await client.embeddings.create(model=MODEL, input="x")
    assert vectors.value.code == "not_supported"
    with pytest.raises(openai.BadRequestError):
        await chat.create(model=MODEL, messages="not a list")
    real.publish(keys=(replace(real.record, endpoints=("embeddings",)),))
    with pytest.raises(openai.PermissionDeniedError):
        await chat.create(model=MODEL, messages=QUESTION)
    real.publish(keys=(replace(real.record, rpm=1),))
    await client.post("/tokenize", body={"content": "x"}, cast_to=object)
    with pytest.raises(openai.RateLimitError):
        await chat.create(model=MODEL, messages=QUESTION)
    real.publish(routes=(replace(real.route, mode="closed"),))
    with pytest.raises(openai.InternalServerError):
        await chat.create(model=MODEL, messages=QUESTION)


async def test_a_template_refusal_is_400_with_its_message(strict: Harness) -> None:
    """The engine says 500 'Jinja Exception'; the client is told what to change."""
    async with openai.AsyncOpenAI(
        api_key=strict.key.text, base_url=strict.base_url, max_retries=0, timeout=600
    ) as client:
        for streamed in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, reasoning_effort="low", stream=streamed
                )
            assert refused.value.code == "template_refused"
            assert 'reasoning_effort must be either "none" or "high"' in refused.value.message
        good = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, reasoning_effort="high", max_tokens=4
        )
        assert good.choices
    assert [usage.outcome for usage in strict.recorded] == ["refused", "refused", "ok"]
    assert strict.gate.traffic.metrics.refusals["small", "template_refused"] == 2


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_frees_the_real_slot(
    real: Harness, server: Server, *, streamed: bool
) -> None:
    """Seen on the engine's own state: the slot is busy, the client leaves, the slot is free.

    How soon depends on the machine's load; that the answer was not written to its end does not.
    This engine looks for clients that left only in a second without any other result, and asking
    for its slots is one: so it is asked seldom.
    """
    before = server.tokens_written()
    body = {"model": MODEL, "messages": QUESTION, "stream": streamed, "max_tokens": 1800,
            "ignore_eos": True}  # fmt: skip
    async with RawClient(real.port) as raw:
        await raw.send("/v1/chat/completions", body, key=real.key.text)
        if streamed:
            await raw.head()
            await raw.chunk()
        async with asyncio.timeout(600):
            while not await asyncio.to_thread(lambda: server.busy):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    async with asyncio.timeout(600):
        await asyncio.sleep(2.5)
        while await asyncio.to_thread(lambda: server.busy):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(2.5)
    await real.until(lambda: real.recorded)
    assert real.recorded[0].outcome == "cancelled"
    written = await asyncio.to_thread(server.tokens_written) - before
    assert written < 1800, f"the engine wrote {written} tokens for nobody"


async def test_a_killed_engine_is_reported_in_the_stream(tmp_path, engine_store) -> None:
    """Kill -9 of llama-server in mid-stream: an error event, the request booked as failed."""
    with launched(engine_store) as doomed:
        async with opened(tmp_path, doomed) as harness:
            await _kill_in_mid_stream(harness, doomed)


async def _kill_in_mid_stream(harness: Harness, doomed: Server) -> None:
    body = {"model": MODEL, "messages": QUESTION, "stream": True, "max_tokens": 1800,
            "ignore_eos": True}  # fmt: skip
    async with RawClient(harness.port) as raw:
        await raw.send("/v1/chat/completions", body, key=harness.key.text)
        await raw.head()
        received = await raw.chunk()
        os.kill(doomed.process.pid, signal.SIGKILL)
        doomed.process.wait()
        while data := await raw.chunk():
            received += data
    last = received.split(b"\n\n")[-2].removeprefix(b"data: ")
    assert json.loads(last)["error"]["code"] == "upstream_error"
    assert b"[DONE]" not in received
    assert (harness.recorded[0].outcome, harness.recorded[0].exact) == ("failed", False)
    async with openai.AsyncOpenAI(
        api_key=harness.key.text, base_url=harness.base_url, max_retries=0
    ) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=MODEL, messages=QUESTION)


@pytest.mark.parametrize(
    ("path", "caps"),
    [
        ("/v1/chat/completions", {"max_tokens": 1, "n_predict": 12}),
        ("/v1/chat/completions", {"max_completion_tokens": 1, "max_tokens": 12}),
        ("/v1/chat/completions", {"max_tokens": 5, "n_predict": None}),
        ("/v1/chat/completions", {"max_tokens": 12.7}),
        ("/v1/chat/completions", {"max_tokens": True}),
        ("/v1/chat/completions", {"max_tokens": 6, "n": 2}),
        ("/v1/completions", {"max_tokens": 1, "n_predict": 12}),
        ("/v1/completions", {"max_tokens": 6, "prompt": ["One", "Two"]}),
        ("/v1/responses", {"max_output_tokens": 12, "max_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 1, "n_predict": 12}),
        ("/v1/messages", {"max_tokens": 6, "n_predict": 40}),
    ],
)
async def test_an_answer_never_costs_more_than_was_reserved(real: Harness, path, caps) -> None:
    """What the engine writes, on each endpoint, is within what the gate set aside for it."""
    prompt = {"/v1/completions": {"prompt": "One"}, "/v1/responses": {"input": "One"}}
    asked = {"model": MODEL, **WHOLE, **prompt.get(path, {"messages": QUESTION}), **caps}
    reserved: list[int] = []
    limiter = real.gate.traffic.limiter
    reserve = limiter.reserve

    async def noting(key, tokens: int):
        reserved.append(tokens)
        return await reserve(key, tokens)

    limiter.reserve = noting
    real.publish(keys=(replace(real.record, tokens_per_day=10**9),))
    answer = await ask(real.port, path, asked, key=real.key.text)
    assert answer.status == 200, answer.body
    (recorded,) = real.recorded
    most = max(int(v) for n, v in caps.items() if n not in ("n", "prompt") and v)
    answers = caps.get("n", len(caps.get("prompt", "1")))
    assert recorded.completion_tokens <= reserved[0]
    assert recorded.completion_tokens <= most * answers + answers
