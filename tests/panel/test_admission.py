"""Requests take turns: a burst waits, and who is slow or streams holds nobody up."""

from __future__ import annotations

import asyncio
from typing import Any

from django.http import HttpRequest

from deployments.panel.admission import InTurn, let_go
from deployments.panel.public_scheme import PublicScheme

END = {"type": "http.request", "body": b"", "more_body": False}


class App:
    """An application whose requests end when the test says so."""

    def __init__(self) -> None:
        self.in_work: list[str] = []
        self.go_on: dict[str, asyncio.Event] = {}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Work on a request."""
        name = scope["path"]
        while (await receive()).get("more_body"):
            pass
        self.in_work.append(name)
        self.go_on[name] = asyncio.Event()
        await self.go_on[name].wait()
        if scope.get("fails"):
            raise RuntimeError(name)
        await send({"type": "http.response.start", "status": 200})
        if scope.get("streams"):
            self.go_on[name].clear()
            await self.go_on[name].wait()
        await send({"type": "http.response.body", "body": b""})


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def ask(
    app: InTurn, name: str = "", *, messages: Any = None, scope: Any = None, **more: Any
) -> asyncio.Task[None]:
    """A request; `messages` yields what its client sends."""
    scope = scope or {"type": "http", "path": name, **more}

    async def receive() -> Any:
        return await messages.get() if messages else END

    async def send(_message: Any) -> None:
        pass

    return asyncio.create_task(app(scope, receive, send))


async def test_so_many_at_once_and_the_others_after_them() -> None:
    """In the order in which they came; every one is answered."""
    app = App()
    turns = InTurn(app, at_once=2)
    asked = [ask(turns, name) for name in "abcd"]
    await settle()
    assert app.in_work == ["a", "b"]
    app.go_on["b"].set()
    await settle()
    assert app.in_work == ["a", "b", "c"]
    for name in "ac":
        app.go_on[name].set()
    await settle()
    app.go_on["d"].set()
    await asyncio.gather(*asked)


async def test_a_stream_holds_no_turn() -> None:
    """It ends when the answer begins."""
    app = App()
    turns = InTurn(app, at_once=1)
    streams = [ask(turns, f"s{n}", streams=True) for n in range(3)]
    for n in range(3):
        await settle()
        assert app.in_work == [f"s{m}" for m in range(n + 1)]
        app.go_on[f"s{n}"].set()
    await settle()
    for event in app.go_on.values():
        event.set()
    await asyncio.gather(*streams)


async def test_a_slow_sender_holds_no_turn() -> None:
    """A turn begins when the request has been read whole."""
    app = App()
    turns = InTurn(app, at_once=1)
    messages: asyncio.Queue[Any] = asyncio.Queue()
    slow = ask(turns, "slow", messages=messages)
    messages.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
    quick = ask(turns, "quick")
    await settle()
    assert app.in_work == ["quick"]
    app.go_on["quick"].set()
    await quick
    messages.put_nowait(END)
    await settle()
    app.go_on["slow"].set()
    await slow


async def test_a_failed_and_a_cancelled_request_give_their_turns_back() -> None:
    """Whether they were in work or waited."""
    app = App()
    turns = InTurn(app, at_once=1)
    fails = ask(turns, "fails", fails=True)
    await settle()
    waits, last = ask(turns, "waits"), ask(turns, "last")
    await settle()
    waits.cancel()
    app.go_on["fails"].set()
    answers = await asyncio.gather(fails, waits, return_exceptions=True)
    assert [type(answer) for answer in answers] == [RuntimeError, asyncio.CancelledError]
    await settle()
    assert app.in_work == ["fails", "last"]
    app.go_on["last"].set()
    await last


async def test_a_view_that_waits_for_an_engine_lets_go() -> None:
    """Its request goes on without a turn; without one (not under ASGI) nothing happens."""
    app = App()
    turns = InTurn(app, at_once=1)
    request = HttpRequest()
    await let_go(request)
    request.scope = {"type": "http", "path": "chat"}  # type: ignore[attr-defined]
    asked = [ask(turns, scope=request.scope), ask(turns, "other")]  # type: ignore[attr-defined]
    await settle()
    assert app.in_work == ["chat"]
    await let_go(request)
    await settle()
    assert app.in_work == ["chat", "other"]
    for event in app.go_on.values():
        event.set()
    await asyncio.gather(*asked)


async def test_requests_to_the_public_host_have_its_scheme() -> None:
    """TLS ends at a proxy whose headers nobody needs to believe; other hosts keep their scheme."""
    seen: list[str] = []

    async def app(scope: dict[str, Any], _receive: Any, _send: Any) -> None:
        seen.append(scope["scheme"])

    panel = PublicScheme(app, "https://mm.example.org:8443")
    for host in (b"MM.example.org:8443", b"mm.example.org", b"localhost:8000"):
        scope = {"type": "http", "scheme": "http", "headers": [(b"host", host)]}
        await panel(scope, None, None)  # type: ignore[arg-type]
    assert seen == ["https", "http", "http"]
