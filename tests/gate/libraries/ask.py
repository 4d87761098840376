"""What a program with one of the client libraries does; runs in their environment.

`ask.py LIBRARY ADDRESS KEY MODEL [retry]` prints one JSON object: what came back. It imports
nothing of the project.
"""

# ruff: noqa: T201 (one library a run; prints its result)

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
QUESTION = "What is the weather in Paris?"
SAID = [{"role": "user", "content": QUESTION}]
SHORT = 8
LONG = 200
"""Tokens: of a text, and enough for arguments in JSON."""

Found = dict[str, Any]


def with_openai(url: str, key: str, model: str) -> Found:
    """The official client: chat, stream, tools, responses, an error."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    create = client.chat.completions.create
    text = create(model=model, messages=SAID, max_tokens=SHORT).choices[0].message.content
    stream = create(
        model=model,
        messages=SAID,
        max_tokens=SHORT,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    offered = create(model=model, messages=SAID, max_tokens=SHORT, tools=[TOOL])
    response = client.responses.create(model=model, input=QUESTION, max_output_tokens=SHORT)
    try:
        create(model="unknown", messages=SAID)
        error = ""
    except openai.NotFoundError as refused:
        error = str(refused.code)
    return {
        "text": text,
        "stream": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "tokens": chunks[-1].usage.completion_tokens,
        "with tools": bool(
            offered.choices[0].message.content or offered.choices[0].message.tool_calls
        ),
        "response": response.output_text,
        "models": [card.id for card in client.models.list()],
        "error": error,
    }


def with_anthropic(url: str, key: str, model: str) -> Found:
    """The official client: messages, stream, count, models, an error."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    message = client.messages.create(model=model, messages=SAID, max_tokens=SHORT)
    with client.messages.stream(model=model, messages=SAID, max_tokens=SHORT) as stream:
        streamed = "".join(stream.text_stream)
        tokens = stream.get_final_message().usage.output_tokens
    try:
        client.messages.create(model="unknown", messages=SAID, max_tokens=1)
        error = ""
    except anthropic.NotFoundError as refused:
        error = refused.body["error"]["type"]
    return {
        "text": message.content[0].text,
        "stream": streamed,
        "tokens": tokens,
        "count": client.messages.count_tokens(model=model, messages=SAID).input_tokens,
        "models": [card.id for card in client.models.list()],
        "error": error,
    }


def with_langchain(url: str, key: str, model: str) -> Found:
    """LangChain's chat model: invoke, stream, bound tools, an error."""
    import openai
    from langchain_openai import ChatOpenAI

    def chat(name: str, most: int) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=f"{url}/v1", api_key=key, model=name, max_tokens=most, max_retries=0
        )

    short = chat(model, SHORT)
    pieces = list(short.stream(QUESTION))
    offered = short.bind_tools([TOOL]).invoke(QUESTION)
    try:
        chat("unknown", 1).invoke(QUESTION)
        error = ""
    except openai.NotFoundError as refused:
        error = str(refused.code)
    return {
        "text": short.invoke(QUESTION).text,
        "stream": "".join(piece.text for piece in pieces),
        "with tools": offered.text or offered.tool_calls,
        "error": error,
    }


def with_litellm(url: str, key: str, model: str) -> Found:
    """LiteLLM as OpenAI's API: completion, stream, tools, an error."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    def ask(**more: Any) -> Any:
        asked = {"model": f"openai/{model}", "max_tokens": SHORT, "messages": SAID} | more
        return litellm.completion(api_base=f"{url}/v1", api_key=key, num_retries=0, **asked)

    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    offered = ask(tools=[TOOL]).choices[0].message
    try:
        ask(model="openai/unknown")
        error = ""
    except litellm.NotFoundError as refused:
        error = "model_not_found" if "does not exist" in str(refused) else str(refused)
    return {
        "text": ask().choices[0].message.content,
        "stream": "".join(pieces),
        "with tools": offered.content or bool(offered.tool_calls),
        "error": error,
    }


def with_instructor(url: str, key: str, model: str) -> Found:
    """Instructor: an object instead of text."""
    import instructor
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        """A city."""

        city: str

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    found = client.chat.completions.create(
        model=model, messages=SAID, response_model=City, max_tokens=LONG, max_retries=3
    )
    return {"text": found.city}


def with_pydantic_ai(url: str, key: str, model: str) -> Found:
    """Pydantic AI: an agent, whole and streamed, and an error."""
    import asyncio

    from pydantic_ai import Agent, ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    agent = Agent(OpenAIChatModel(model, provider=provider), model_settings={"max_tokens": SHORT})

    async def streamed() -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    try:
        Agent(OpenAIChatModel("unknown", provider=provider)).run_sync(QUESTION)
        error = ""
    except ModelHTTPError as refused:
        error = str(refused.body["code"])
    text = agent.run_sync(QUESTION).output
    return {"text": text, "stream": asyncio.run(streamed()), "error": error}


def with_llm(url: str, key: str, model: str) -> Found:
    """The command `llm`, with the model as its users configure it."""
    folder = Path(os.environ["LLM_USER_PATH"])
    known = [
        {"model_id": "here", "model_name": model, "api_base": f"{url}/v1", "api_key_name": "x"}
    ]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(known))

    def ask(*more: str) -> str:
        argv = ["llm", "-m", "here", "--key", key, "-o", "max_tokens", str(SHORT), *more, QUESTION]
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    return {"text": ask("--no-stream"), "stream": ask()}


def with_httpie(url: str, key: str, model: str) -> Found:
    """The command `http`, whole and streamed."""
    common = [
        f"{url}/v1/chat/completions",
        f"Authorization: Bearer {key}",
        f"model={model}",
        f"max_tokens:={SHORT}",
    ]
    common.append(f"messages:={json.dumps(SAID)}")

    def ask(*more: str) -> str:
        return subprocess.run(
            ["http", "--ignore-stdin", "--print=b", "--stream", *common, *more],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    whole = json.loads(ask())
    streamed = [
        json.loads(line.removeprefix("data: "))["choices"]
        for line in ask("stream:=true").splitlines()
        if line.startswith("data: {")
    ]
    return {
        "text": whole["choices"][0]["message"]["content"],
        "stream": "".join(c[0]["delta"].get("content") or "" for c in streamed if c),
    }


def retried_openai(url: str, key: str, model: str) -> Found:
    """The official client's own retries, as they are by default."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=8)
    answer = client.chat.completions.create(model=model, messages=SAID, max_tokens=SHORT)
    return {"text": answer.choices[0].message.content}


def retried_anthropic(url: str, key: str, model: str) -> Found:
    """The official client's own retries, as they are by default."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=8)
    answer = client.messages.create(model=model, messages=SAID, max_tokens=SHORT)
    return {"text": answer.content[0].text}


LIBRARIES: dict[str, Callable[[str, str, str], Found]] = {
    "openai": with_openai,
    "anthropic": with_anthropic,
    "langchain-openai": with_langchain,
    "litellm": with_litellm,
    "instructor": with_instructor,
    "pydantic-ai": with_pydantic_ai,
    "llm": with_llm,
    "httpie": with_httpie,
    "openai-retries": retried_openai,
    "anthropic-retries": retried_anthropic,
}

if __name__ == "__main__":
    library, *where = sys.argv[1:]
    print(json.dumps(LIBRARIES[library](*where)))
