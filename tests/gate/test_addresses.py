"""Addresses: what is served, what a near miss is told, other origins, health, Anthropic's shapes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import anthropic
import pytest

from mmadmin.core.errors import InvalidInput
from mmadmin.gate.settings import GateSettings
from tests.gate.harness import MODEL, Harness
from tests.gate.raw import RawClient, ask

CHAT = "/v1/chat/completions"
PAGE = "https://app.example.org"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completions/", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1//chat/completions", CHAT),
        ("//v1/chat/completions", CHAT),
        ("/chat/completions", CHAT),
        ("/V1/Chat/Completions", CHAT),
        ("/openai/v1/chat/completions", CHAT),
        ("/api/chat", CHAT),
        ("/api/v1/messages", "/v1/messages"),
        ("/v2/embeddings", "/v1/embeddings"),
        ("/completion", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/v1", "/v1"),
        ("/", "/v1"),
    ],
)
async def test_a_near_miss_is_told_what_was_meant(harness: Harness, path: str, meant: str) -> None:
    """It is refused, and the message names the address."""
    answer = await ask(harness.port, path, b"{}", key=harness.key.text)
    assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_url")
    assert f"`{meant}`" in answer.json["error"]["message"]
    assert harness.engine.calls == []


async def test_health_needs_no_key_and_follows_the_gate(harness: Harness) -> None:
    """A load balancer in front asks the clients' port; a gate that stops says 503."""
    assert (await ask(harness.port, "/health", method="GET")).status == 200
    harness.gate.traffic.stopping = True
    assert (await ask(harness.port, "/health", method="GET")).status == 503
    assert harness.engine.calls == []


async def test_anthropics_client_gets_its_own_shapes(harness: Harness) -> None:
    """The model list and the refusal of an unknown address, to who sends `anthropic-version`."""
    async with anthropic.AsyncAnthropic(
        api_key=harness.key.text, base_url=f"http://127.0.0.1:{harness.port}", max_retries=0
    ) as client:
        models = [model async for model in client.models.list()]
        assert [(m.id, m.type, m.created_at.year) for m in models] == [(MODEL, "model", 2023)]
        assert (await client.models.retrieve(MODEL)).display_name == MODEL
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.post("/v1/message_batches", cast_to=object, body={})
    assert unknown.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_pages_of_an_allowed_origin_may_call(tmp_path, engine, allowed: str) -> None:
    """The preflight is answered without a key; answers and refusals can be read."""
    harness = Harness(tmp_path, engine)
    harness.settings = replace(harness.settings, cors_origins=(allowed,))
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with harness.open():
        async with RawClient(harness.port) as client:
            await client.send(CHAT, method="OPTIONS", headers=preflight)
            status, headers = await client.head()
        assert (status, headers["access-control-allow-origin"]) == (204, PAGE)
        assert headers["access-control-allow-headers"] == "authorization,content-type"
        body = {"model": MODEL, "messages": []}
        for key in (harness.key.text, "sk-wrong"):
            answer = await ask(harness.port, CHAT, body, key=key, headers={"Origin": PAGE})
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_pages_of_other_origins_may_not_call(tmp_path, engine) -> None:
    """Off by default; and an origin that is not listed gets no header."""
    harness = Harness(tmp_path, engine)
    for origins in ((), (PAGE,)):
        harness.settings = replace(harness.settings, cors_origins=origins)
        async with harness.open():
            for method in ("OPTIONS", "POST"):
                answer = await ask(
                    harness.port,
                    CHAT,
                    {"model": MODEL, "messages": []},
                    key=harness.key.text,
                    method=method,
                    headers={
                        "Origin": "https://evil.example",
                        "Access-Control-Request-Method": "POST",
                    },
                )
                assert "access-control-allow-origin" not in answer.headers


def test_origins_are_checked(tmp_path) -> None:
    """Blanks, capitals and a trailing slash are mended; what is not an origin is refused."""
    env = {"MM_HOME": str(tmp_path), "MM_KEY_PEPPER": "p", "MM_ENGINE_MASTER": "m"}
    given = " https://App.example.org/, http://localhost:3000"
    found = GateSettings.from_env(env | {"MM_GATE_CORS_ORIGINS": given}).cors_origins
    assert found == ("https://app.example.org", "http://localhost:3000")
    with pytest.raises(InvalidInput, match="MM_GATE_CORS_ORIGINS"):
        GateSettings.from_env(env | {"MM_GATE_CORS_ORIGINS": "app.example.org/page"})


async def test_a_body_that_stops_arriving_is_given_up(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """408, the connection closed, and nothing of it stays in memory."""
    monkeypatch.setattr("mmadmin.gate.request.BODY_SILENCE_S", 0.3)
    async with RawClient(harness.port) as client:
        await client.send(CHAT, b"{", key=harness.key.text, headers={"Content-Length": "1000"})
        answer = await client.answer()
        assert await client.reader.read() == b""
    assert (answer.status, answer.json["error"]["code"]) == (408, "body_timeout")
    assert harness.gate.traffic.body_bytes == 0
    assert harness.engine.calls == []


async def test_a_body_is_let_go_once_the_engine_answers(harness: Harness) -> None:
    """A long answer does not hold its request's pictures."""
    answering, go_on = asyncio.Event(), asyncio.Event()

    async def script(call) -> None:
        await call.head(Content_Type="text/event-stream")
        answering.set()
        await go_on.wait()
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()

    harness.engine.script = script
    big = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 2_000_000}]}
    async with RawClient(harness.port) as client:
        await client.send(CHAT, big | {"stream": True}, key=harness.key.text)
        await answering.wait()
        await harness.until(lambda: harness.gate.traffic.body_bytes == 0)
        go_on.set()
        assert (await client.answer()).whole
    assert harness.engine.calls[0].json["messages"] == big["messages"]
