"""The client libraries that people use, as they are published, against the gate and a real engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.gate.harness import MODEL, Harness
from tests.gate.libraries.environment import HERE, environment
from tests.gate.raw import RawClient, request_bytes
from tests.gate.real import Server, launched, opened

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
CHAT = "/v1/chat/completions"
SCRIPTS = {"python": HERE / "ask.py", "node": HERE / "ask.mjs"}


@pytest.fixture(scope="module")
def libraries() -> Path:
    """Their environment, installed at the first run."""
    return environment()


@pytest.fixture(scope="module")
def server(engine_store) -> Iterator[Server]:
    """An engine whose template knows tools (one that the engine's own source carries)."""
    templates = engine_store.path("engine-source") / "models" / "templates"
    with launched(
        engine_store, "--chat-template-file", str(templates / "Qwen-Qwen2.5-7B-Instruct.jinja")
    ) as running:
        yield running


@pytest_asyncio.fixture
async def real(tmp_path, server) -> AsyncIterator[Harness]:
    """A gate in front of it."""
    async with opened(tmp_path, server) as harness:
        yield harness


async def use(harness: Harness, libraries: Path, program: str, library: str, folder: Path) -> dict:
    """What the library's user gets."""
    if program == "node":  # packages are looked up beside the script
        script = libraries / "ask.mjs"
        script.write_bytes(SCRIPTS[program].read_bytes())
    else:
        script = SCRIPTS[program]
    process = await asyncio.create_subprocess_exec(
        *(libraries / "bin" / program, script, library),
        *(f"http://127.0.0.1:{harness.port}", harness.key.text, MODEL),
        env={
            "PATH": f"{libraries / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "LLM_USER_PATH": str(folder),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("program", "library"),
    [
        ("python", "openai"),
        ("python", "anthropic"),
        ("python", "langchain-openai"),
        ("python", "litellm"),
        ("python", "instructor"),
        ("python", "pydantic-ai"),
        ("python", "llm"),
        ("python", "httpie"),
        ("node", "openai"),
        ("node", "ai"),
    ],
)
async def test_a_library_works(
    real: Harness, libraries: Path, tmp_path, program: str, library: str
) -> None:
    """Text, streams, offered tools, lists and its own exceptions, wherever the library has them."""
    found = await use(real, libraries, program, library, tmp_path)
    assert found.pop("text")
    wanted = {
        "models": [MODEL],
        "error": "not_found_error" if library == "anthropic" else "model_not_found",
    }
    for name, value in found.items():
        assert value == wanted[name] if name in wanted else value, name
    outcomes = {usage.outcome for usage in real.recorded}
    assert outcomes <= {"ok", "refused", "cancelled"}, real.recorded


@pytest.mark.parametrize(
    ("program", "library"),
    [("python", "openai"), ("python", "anthropic"), ("node", "openai")],
)
async def test_a_librarys_own_retries_work(
    real: Harness, libraries: Path, tmp_path, program: str, library: str
) -> None:
    """One request at a time: it waits for the running one as Retry-After says, and is answered."""
    real.publish(keys=(replace(real.record, concurrency=1),))
    async with RawClient(real.port) as running:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}],
                "max_tokens": 2000, "ignore_eos": True, "stream": True}  # fmt: skip
        await running.send(CHAT, body, key=real.key.text)
        await running.head()
        waiting = asyncio.create_task(use(real, libraries, program, f"{library}-retries", tmp_path))
        await real.until(lambda: waiting.done() or any(u.status == 429 for u in real.recorded))
    assert (await waiting)["text"]
    assert {usage.status for usage in real.recorded} >= {429, 200}


async def test_curl_of_http_1_0_reads_a_stream(real: Harness, tmp_path) -> None:
    """No chunks, the end of the connection as the end, every event."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8, "stream": True}  # fmt: skip
    (tmp_path / "body").write_bytes(request_bytes(CHAT, body).partition(b"\r\n\r\n")[2])
    process = await asyncio.create_subprocess_exec(
        *("curl", "--http1.0", "--silent", "--show-error", "--include", "--noproxy", "*"),
        *("--header", f"Authorization: Bearer {real.key.text}"),
        *("--header", "Content-Type: application/json", "--data-binary", f"@{tmp_path / 'body'}"),
        f"http://127.0.0.1:{real.port}{CHAT}",
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    head, _, text = out.partition(b"\r\n\r\n")
    assert process.returncode == 0
    assert b"transfer-encoding" not in head
    assert text.endswith(b"data: [DONE]\n\n")
