"""A scriptable engine on a real socket: tests write, byte by byte, what it answers and when."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Call:
    """One request that reached the engine."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gate closed this connection."""
    gone_at: float = 0.0

    @property
    def json(self):
        """The body, parsed."""
        return json.loads(self.body)

    async def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, **headers: str) -> None:
        """Send a head with chunked framing unless a length is given."""
        lines = [f"HTTP/1.1 {status} Whatever"]
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if "Content-Length" not in names and "Connection" not in names:
            names["Transfer-Encoding"] = "chunked"
        lines += [f"{name}: {value}" for name, value in names.items()]
        await self.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def chunk(self, data: bytes) -> None:
        """Send one HTTP chunk."""
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        """Send the last chunk."""
        await self.write(b"0\r\n\r\n")

    async def answer(self, data, status: int = 200, **headers: str) -> None:
        """Send a whole answer."""
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        headers.setdefault("Content_Type", "application/json")
        await self.head(status, Content_Length=str(len(body)), **headers)
        await self.write(body)

    def reset(self) -> None:
        """Close at once, without what is still to be written, as a killed process does."""
        self.writer.transport.abort()

    def close(self) -> None:
        """Close in order."""
        self.writer.close()


Script = Callable[[Call], Awaitable[None]]


class StubEngine:
    """Listens on a socket of its own; `script` answers each call."""

    def __init__(self) -> None:
        self.script: Script = chat_answer
        self.calls: list[Call] = []
        self.arrived = asyncio.Event()
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()
        folder = tempfile.mkdtemp(prefix="mm-stub-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.socket = str(Path(folder) / "engine.sock")

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self.socket)

    async def stop(self) -> None:
        """Stop listening and end what runs."""
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader, writer) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, path, _ = first.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        call = Call(method, path, headers, body, reader, writer)
        self.calls.append(call)
        self.arrived.set()
        watch = asyncio.create_task(self._watch(call))
        try:
            await self.script(call)
        except ConnectionError:  # a write met the closed connection before the watch did
            self._note_gone(call)
            raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        return not writer.is_closing() and not call.gone.is_set()

    async def _watch(self, call: Call) -> None:
        """Notice that the gate closed; the gate sends nothing before an answer is whole."""
        while True:
            if call.reader.at_eof() or call.reader.exception() is not None:
                break
            await asyncio.sleep(0.005)
        self._note_gone(call)

    def _note_gone(self, call: Call) -> None:
        call.gone_at = asyncio.get_running_loop().time()
        call.gone.set()


def event(data) -> bytes:
    """One event of a stream."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def delta(text: str, **more) -> bytes:
    """A chat chunk."""
    return event(
        {
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
            **more,
        }
    )


FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
USAGE = event(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 11,
            "completion_tokens": 3,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 5},
        },
        "timings": {"predicted_per_second": 12.5},
    }
)
TIMED = FINISH.replace(b"}\n\n", b',"timings":{"predicted_per_second":12.5}}\n\n')
"""The finish as an engine sends it when no usage event follows."""
DONE = b"data: [DONE]\n\n"
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "17 times 23 is 391."},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 11, "completion_tokens": 9, "total_tokens": 20},
}


async def chat_answer(call: Call) -> None:
    """What an engine does when all is well."""
    if not call.body.lstrip().startswith(b"{") or not call.json.get("stream"):
        await call.answer(ANSWER)
        return
    await call.head(Content_Type="text/event-stream")
    for text in ("17", " times", " 23"):
        await call.chunk(delta(text))
    await call.chunk(FINISH)
    if call.json.get("stream_options", {}).get("include_usage"):
        await call.chunk(USAGE)
    await call.chunk(DONE)
    await call.end()


def paused(go_on: asyncio.Event) -> Script:
    """A script that streams one event, waits for the test, and ends well."""

    async def script(call: Call) -> None:
        await call.head(Content_Type="text/event-stream")
        await call.chunk(delta("a"))
        await go_on.wait()
        await call.chunk(DONE)
        await call.end()

    return script
