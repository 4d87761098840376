"""The playground's own key: kept while it works, and had anew when somebody has ended it."""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path

import pytest
from asgiref.sync import sync_to_async
from django.http import JsonResponse
from django.test import AsyncClient, override_settings

from deployments.models import ClientKey, User
from deployments.views import playground

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with none."""
    monkeypatch.setattr(playground, "_held", {})


async def vera() -> AsyncClient:
    """A viewer's browser."""
    person = await sync_to_async(User.objects.create_user)("vera", role="viewer")
    client = AsyncClient()
    await client.aforce_login(person)
    return client


async def test_a_key_that_was_ended_is_had_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate's 401 is answered with another key, once; what the gate says then is the answer."""
    keys: list[str] = []
    refused: set[str] = set()

    async def relay(body: bytes, key: str, _agent: str) -> JsonResponse:
        assert json.loads(body) == {"messages": []}
        keys.append(key)
        return JsonResponse({}, status=401 if key in refused or "all" in refused else 200)

    monkeypatch.setattr(playground, "_relay", relay)
    client = await vera()

    async def ask() -> int:
        answer = await client.post(
            "/playground/chat/", {"messages": []}, content_type="application/json"
        )
        return answer.status_code

    assert [await ask(), await ask()] == [200, 200]
    assert keys[0] == keys[1]
    refused.add(keys[0])
    assert await ask() == 200
    assert (keys[2], len(set(keys)), len(keys)) == (keys[0], 2, 4)
    refused.add("all")
    assert await ask() == 401
    assert len(keys) == 6, "not forever"
    assert await ClientKey.objects.filter(playground=True, revoked_at=None).acount() >= 1


async def test_a_conversation_that_is_too_long_is_refused_in_words() -> None:
    """In the shape that the page reads."""
    client = await vera()
    with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=100):
        answer = await client.post(
            "/playground/chat/", {"text": "x" * 200}, content_type="application/json"
        )
    assert answer.status_code == 413
    assert "too long for the playground" in answer.json()["error"]["message"]


async def test_the_gate_is_never_asked_through_a_proxy(
    settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that listens is not told the key and the conversation."""
    asked: list[str] = []

    async def answer(reader, writer, who: str) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(f"{who}: {head.split(b' ')[1].decode()}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    async with (
        await asyncio.start_server(lambda r, w: answer(r, w, "gate"), "127.0.0.1") as gate,
        await asyncio.start_server(lambda r, w: answer(r, w, "proxy"), "127.0.0.1") as proxy,
    ):
        settings.GATE_URL = f"http://127.0.0.1:{gate.sockets[0].getsockname()[1]}"
        address = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, address)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        relayed = await playground._relay(b"{}", "sk-mm-x", "test")
        assert [piece async for piece in relayed] == [b"{}"]
    assert asked == ["gate: /v1/chat/completions"]


def test_every_client_of_loopback_keeps_off_proxies() -> None:
    """Only what talks to other machines may: each other client says so where it is made."""
    outside = {
        "mmadmin/host/hub.py",
        "mmadmin/host/download/answers.py",
        "deployments/accounts/oidc.py",
    }
    found = {}
    for path in (*ROOT.glob("mmadmin/**/*.py"), *ROOT.glob("deployments/**/*.py")):
        calls = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and ast.unparse(node.func)
            in {f"httpx2.{name}" for name in ("Client", "AsyncClient", "get", "post", "stream")}
        ]
        if calls and str(path.relative_to(ROOT)) not in outside:
            found[path.name] = all(
                any(k.arg == "trust_env" and ast.unparse(k.value) == "False" for k in call.keywords)
                for call in calls
            )
    assert len(found) >= 4
    assert all(found.values()), found
