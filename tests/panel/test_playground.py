"""The playground's own key: kept while it works, and had anew when somebody has ended it."""

from __future__ import annotations

import json

import pytest
from asgiref.sync import sync_to_async
from django.http import JsonResponse
from django.test import AsyncClient, override_settings

from deployments.models import ClientKey, User
from deployments.views import playground

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
