"""Behind nginx as people set it up: one `proxy_pass` line and nothing else."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gate.harness import MODEL, PATIENCE_S, Harness
from tests.gate.raw import RawClient, ask
from tests.gate.stub import ANSWER, DONE, Call, delta, paused
from tests.support.ports import free_port

CHAT = "/v1/chat/completions"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest_asyncio.fixture
async def proxied(harness: Harness, tmp_path) -> AsyncIterator[int]:
    """The port of an nginx in front of the gate, with nginx's defaults (HTTP/1.0, buffering)."""
    port = free_port()
    conf = tmp_path / "nginx.conf"
    folders = "".join(
        f"{name}_temp_path {tmp_path};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf.write_text(
        f"daemon off; pid {tmp_path}/nginx.pid; error_log stderr crit; events {{}}\n"
        f"http {{ access_log off; {folders} server {{ listen 127.0.0.1:{port};"
        f" location / {{ proxy_pass http://127.0.0.1:{harness.port}; }} }} }}\n"
    )
    process = await asyncio.create_subprocess_exec(
        str(NGINX), "-c", str(conf), "-e", "stderr", stderr=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with RawClient(port):
                    break
            except OSError:
                await asyncio.sleep(0.02)
    yield port
    process.terminate()
    await process.wait()


async def test_answers_and_errors_pass(harness: Harness, proxied: int) -> None:
    """Whole answers, their headers, and refusals, as without it."""
    body = {"model": MODEL, "messages": []}
    answer = await ask(proxied, CHAT, body, key=harness.key.text)
    assert answer.json == ANSWER
    assert answer.headers["x-mm-generation"] == "small/3"
    answer = await ask(proxied, CHAT, {**body, "model": "x"}, key=harness.key.text)
    assert answer.json["error"]["code"] == "model_not_found"
    answer = await ask(proxied, "/v1/..%2fslots", {}, key=harness.key.text)
    assert answer.status == 404
    assert len(harness.engine.calls) == 1


async def test_events_pass_one_by_one(harness: Harness, proxied: int) -> None:
    """Nginx buffers answers by default: the gate asks it not to."""
    go_on = asyncio.Event()

    harness.engine.script = paused(go_on)
    async with RawClient(proxied) as client:
        body = {"model": MODEL, "messages": [], "stream": True}
        await client.send(CHAT, body, key=harness.key.text)
        assert (await client.head())[0] == 200
        assert await client.chunk() == delta("a")
        go_on.set()
        rest = b""
        while data := await client.chunk():
            rest += data
        assert rest == DONE


async def test_a_client_that_leaves_is_noticed_through_it(harness: Harness, proxied: int) -> None:
    """Nginx closes towards the gate, the gate towards the engine."""

    async def script(call: Call) -> None:
        await call.head(Content_Type="text/event-stream")
        await call.chunk(delta("a"))
        await call.gone.wait()

    harness.engine.script = script
    async with RawClient(proxied) as client:
        body = {"model": MODEL, "messages": [], "stream": True}
        await client.send(CHAT, body, key=harness.key.text)
        await client.head()
        await client.chunk()
    await asyncio.wait_for(harness.engine.calls[0].gone.wait(), PATIENCE_S)
    await harness.until(lambda: harness.recorded)
    assert harness.recorded[0].outcome == "cancelled"
