"""Bytes that no client library sends: upgrades, tunnels, HTTP/1.0, one request inside another."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn

from mmadmin.gate.wire import PlainProtocol
from tests.gate.harness import MODEL, Harness
from tests.gate.raw import RawClient

CHAT = b'{"model":"%s","messages":[{"role":"user","content":"hi"}]}' % MODEL.encode()
OFFERS = ("h2c", "websocket", "TLS/1.2", "foo")


def head(
    first: str, key: str, offer: str | None, *, length: int | None = None, **more: str
) -> bytes:
    """A request's head that offers an upgrade."""
    lines = [first, "Host: x", f"Authorization: Bearer {key}", "Content-Type: application/json"]
    if offer is not None:
        lines += [f"Connection: keep-alive, Upgrade\r\nUpgrade: {offer}\r\nHTTP2-Settings: AAMA"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunked(body: bytes, at: int = 7) -> bytes:
    """A body in three chunks and an empty one."""
    parts = (body[:at], body[at : 2 * at], body[2 * at :])
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("form", ["one segment", "two segments", "byte by byte", "chunked"])
async def test_an_offered_upgrade_changes_nothing(harness: Harness, offer: str, form: str) -> None:
    """The body is read by its framing, and the connection serves the next request."""
    async with RawClient(harness.port) as client:
        line = "POST /v1/chat/completions HTTP/1.1"
        if form == "chunked":
            first = head(line, harness.key.text, offer, Transfer_Encoding="chunked")
            pieces = [first, chunked(CHAT)]
        else:
            first = head(line, harness.key.text, offer, length=len(CHAT))
            pieces = {
                "one segment": [first + CHAT],
                "two segments": [first, CHAT],
                "byte by byte": [first[:-20], first[-20:], *(bytes([b]) for b in CHAT)],
            }[form]
        for piece in pieces:
            client.writer.write(piece)
            await client.writer.drain()
            await asyncio.sleep(0.01 if len(pieces) < 5 else 0)
        answer = await client.answer()
        assert answer.status == 200
        assert answer.headers.get("upgrade") is None
        await client.send("/v1/models", method="GET", key=harness.key.text)
        assert (await client.answer()).json["data"][0]["id"] == MODEL
    assert [call.body for call in harness.engine.calls] == [CHAT]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_body_is_never_read_as_a_request(harness: Harness, path: str) -> None:
    """A body that is itself a request gets one answer, the refusal of the outer one."""
    inner = head("GET /v1/models HTTP/1.1", harness.key.text, None)
    async with RawClient(harness.port) as client:
        outer = head(f"POST {path} HTTP/1.1", harness.key.text, "h2c", length=len(inner))
        client.writer.write(outer)
        await asyncio.sleep(0.05)
        client.writer.write(inner)
        answer = await client.answer()
        assert answer.status == 400
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.reader.readexactly(1)


async def test_pipelined_requests_behind_an_upgrade_are_answered(harness: Harness) -> None:
    """Three requests in one segment, each with an offer: three answers, in order."""
    key = harness.key.text
    async with RawClient(harness.port) as client:
        client.writer.write(
            head("GET /v1/models HTTP/1.1", key, "h2c")
            + head("POST /v1/chat/completions HTTP/1.1", key, "foo", length=len(CHAT))
            + CHAT
            + head(f"GET /v1/models/{MODEL} HTTP/1.1", key, "websocket")
        )
        shapes = [(await client.answer()).json["object"] for _ in range(3)]
    assert shapes == ["list", "chat.completion", "model"]


async def test_a_websocket_is_told_to_use_http(harness: Harness) -> None:
    """426: clients that try a WebSocket first fall back to HTTP on it."""
    async with RawClient(harness.port) as client:
        client.writer.write(head("GET /v1/responses HTTP/1.1", harness.key.text, "websocket"))
        answer = await client.answer()
    assert answer.status == 426
    assert answer.json["error"]["code"] == "websocket_not_supported"


async def test_a_tunnel_is_refused(harness: Harness) -> None:
    """CONNECT gets one refusal, and what follows is not read as a request."""
    async with RawClient(harness.port) as client:
        client.writer.write(
            b"CONNECT x:1 HTTP/1.1\r\nHost: x:1\r\n\r\n"
            + head("GET /v1/models HTTP/1.1", harness.key.text, None)
        )
        everything = await client.reader.read()
    assert everything.startswith(b"HTTP/1.1 400")
    assert everything.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(harness: Harness, *, stream: bool) -> None:
    """The answer comes without transfer encoding, and its end closes the connection."""
    body = CHAT[:-1] + (b',"stream":true}' if stream else b"}")
    async with RawClient(harness.port) as client:
        client.writer.write(
            head("POST /v1/chat/completions HTTP/1.0", harness.key.text, None, length=len(body))
            + body
        )
        raw = await client.reader.read()
    first, _, text = raw.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in first
    assert b"connection: close" in first
    assert text.endswith(b"data: [DONE]\n\n") if stream else text.endswith(b"}")


async def test_the_panels_protocol_ignores_upgrades_too() -> None:
    """The panel runs uvicorn with the same protocol: one answer, to the outer request."""

    async def app(scope, receive, send) -> None:
        body = (await receive())["body"]
        answer = f"{scope['method']} {len(body)}".encode()
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    config = uvicorn.Config(app, http=PlainProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    server = uvicorn.Server(config)
    listening = await asyncio.get_running_loop().create_server(
        lambda: PlainProtocol(config=config, server_state=server.server_state, app_state={}),
        "127.0.0.1",
        0,
    )
    inner = head("GET /secret HTTP/1.1", "none", None)
    async with listening, RawClient(listening.sockets[0].getsockname()[1]) as client:
        client.writer.write(head("POST /login/ HTTP/1.1", "none", "h2c", length=len(inner)))
        await asyncio.sleep(0.05)
        client.writer.write(inner)
        assert (await client.answer()).body == f"POST {len(inner)}".encode()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.reader.readexactly(1)
