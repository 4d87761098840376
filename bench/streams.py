"""Both ends of a stream under load: an engine that writes timed events, a client that times them.

`python -m bench.streams serve SOCKET RATE` answers every POST with a stream of `RATE` events a
second, each carrying the moment it was written. `python -m bench.streams client HOST:PORT KEY
STREAMS SECONDS` opens that many streams and prints, as JSON, how late events arrive. Both run on
raw protocols, so that one core carries them beside the gate.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ALL_ANSWERED_WITHIN_S = 30
GROUPS = 50
"""The streams are spread over so many ticks, as real ones are."""


class Engine(asyncio.Protocol):
    """Answers anything with an endless stream."""

    def __init__(self, groups: list[set[Any]]) -> None:
        self._groups = groups
        self._group: set[Any] = set()
        self._request = b""
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """The request is whole when its body is; then join the group with the fewest."""
        self._request += data
        head, found, body = self._request.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(body) >= length:
            self._request = b""
            self.transport.write(HEAD)
            self._group = min(self._groups, key=len)
            self._group.add(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The gate closed."""
        del exc
        self._group.discard(self.transport)


async def serve(path: str, rate: float) -> None:
    """Write to every stream `rate` times a second."""
    groups: list[set[Any]] = [set() for _ in range(GROUPS)]
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(lambda: Engine(groups), path, backlog=4096)
    step = 1 / rate / GROUPS
    due = loop.time()
    while True:
        for group in groups:
            due += step
            if (pause := due - loop.time()) > 0:
                await asyncio.sleep(pause)
            event = (
                b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,'
                b'"choices":[{"index":0,"finish_reason":null,"delta":{"content":" %d"}}]}\n\n'
                % time.monotonic_ns()
            )
            chunk = b"%x\r\n%b\r\n" % (len(event), event)
            for transport in tuple(group):
                transport.write(chunk)


class Client(asyncio.Protocol):
    """One stream; notes the delay of each event."""

    def __init__(self, request: bytes, delays: list[int]) -> None:
        self._request = request
        self._delays = delays
        self.status = 0

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Look at the last event of what came."""
        if not self.status:
            self.status = int(data[9:12])
        at = data.rfind(b'"content":" ')
        if at >= 0:
            written = data[at + 12 : data.find(b'"', at + 12)]
            if written.isdigit():
                self._delays.append(time.monotonic_ns() - int(written))


async def client(host: str, port: int, key: str, streams: int, seconds: float) -> None:
    """Open the streams, let them settle, measure."""
    body = json.dumps({"model": "bench", "stream": True, "messages": []}).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    delays: list[int] = []
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    for _ in range(streams):
        _, protocol = await loop.create_connection(lambda: Client(request, delays), host, port)
        clients.append(protocol)
        await asyncio.sleep(0.002)
    deadline = loop.time() + ALL_ANSWERED_WITHIN_S
    while (  # noqa: ASYNC110 (a thousand protocols, no event)
        loop.time() < deadline and not all(protocol.status for protocol in clients)
    ):
        await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)
    delays.clear()
    await asyncio.sleep(seconds)
    seen = sorted(delays)
    answered = sum(protocol.status == 200 for protocol in clients)
    print(
        json.dumps(
            {
                "streams": answered,
                "events_per_s": round(len(seen) / seconds),
                "p50_ms": seen[len(seen) // 2] / 1e6 if seen else None,
                "p99_ms": seen[len(seen) * 99 // 100] / 1e6 if seen else None,
                "max_ms": seen[-1] / 1e6 if seen else None,
            }
        )
    )


def main(arguments: list[str]) -> None:
    """Run one end."""
    if arguments[0] == "serve":
        uvloop.run(serve(arguments[1], float(arguments[2])))
    else:
        host, port = arguments[1].split(":")
        uvloop.run(client(host, int(port), arguments[2], int(arguments[3]), float(arguments[4])))


if __name__ == "__main__":
    main(sys.argv[1:])
