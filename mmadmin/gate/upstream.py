"""The gate's side of the connection to one engine: HTTP/1.1, kept alive, watched.

Written on `asyncio.Protocol` with httptools' parser, because a general client costs more time a
request than all the rest of the gate, and hides the three things that the gate lives on: closing
the engine's connection at once, knowing whether an answer was whole, and not reading faster than
the client does.

An answer is whole when the engine's framing says so (Content-Length or chunks); one that is framed
by closing the connection is whole as far as HTTP can tell, and the reader decides.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools

CONNECT_TIMEOUT_S = 5.0
IDLE_LIMIT_S = 4.0
"""Engines close connections that are idle for 5 s (cpp-httplib, uvicorn); ours close first."""
IDLE_AT_LEAST = 4
"""Connections kept for a replica, however few slots it has."""
HIGH_WATER_BYTES = 256 * 1024
LOW_WATER_BYTES = 64 * 1024
HEAD_LIMIT_BYTES = 256 * 1024


class ConnectFailed(Exception):
    """Nothing was sent: another replica may be tried."""


class AnswerLost(Exception):
    """The connection ended before the answer was whole."""


class Connection(asyncio.Protocol):
    """One connection to an engine; carries one exchange at a time."""

    __slots__ = (
        "_buffered",
        "_chunks",
        "_framed",
        "_head_done",
        "_keep",
        "_loop",
        "_lost",
        "_parser",
        "_paused",
        "_waiter",
        "_whole",
        "_woken",
        "exchanges",
        "headers",
        "idle_since",
        "status",
        "touched",
        "transport",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.transport: Any = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._whole = True
        self._head_done = False
        self._framed = False
        self._keep = True
        self._woken = False
        self.touched = False
        """Whether any byte of the present answer has come."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.exchanges = 0
        self.idle_since = 0.0

    # what the gate calls

    @property
    def usable(self) -> bool:
        """Whether another exchange may be started on it."""
        return not self._lost and self._whole and self._keep

    def send(self, head: bytes, body: bytes | bytearray | memoryview) -> None:
        """Start an exchange."""
        self.exchanges += 1
        self.status = 0
        self.headers = []
        self._chunks.clear()
        self._buffered = 0
        self._whole = self._head_done = self._framed = self._woken = self.touched = False
        if len(body) < LOW_WATER_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    async def answer_head(self) -> bool:
        """Wait for status and headers; False = woken before they came."""
        while not self._head_done:
            if self._lost:
                raise AnswerLost
            if self._woken:
                self._woken = False
                return False
            await self._wait()
        return True

    async def read(self) -> bytes | None:
        """What has come since; b"" at the end, None when woken without data."""
        while not self._chunks:
            if self._whole:
                return b""
            if self._lost:
                raise AnswerLost
            if self._woken:
                self._woken = False
                return None
            await self._wait()
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return data

    async def read_whole(self) -> bytes:
        """The whole body."""
        parts: list[bytes] = []
        while (data := await self.read()) != b"":
            if data is not None:
                parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def wake_reader(self) -> None:
        """Wake the reader although nothing came."""
        self._woken = True
        self._wake()

    def abort(self) -> None:
        """Close now, without sending what is left: the engine notices at its next write."""
        self._keep = False
        if self.transport is not None:
            self.transport.abort()

    # what the event loop calls

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes from the engine."""
        if self._whole:  # nothing was asked: the engine talks out of turn
            self.abort()
            return
        self.touched = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._keep = False
            self._lost = True
            self._wake()
            self.transport.abort()

    def eof_received(self) -> bool:
        """The engine has nothing more to say: close."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Over; an answer framed by closing is whole now."""
        if self._head_done and not self._whole and not self._framed and exc is None:
            self._whole = True
        self._lost = True
        self._wake()

    # what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        status = self._parser.get_status_code()
        if status < 200:  # noqa: PLR2004 (an interim answer)
            self.headers = []
            return
        self.status = status
        self._keep = self._parser.should_keep_alive()
        self._head_done = True
        if status in (204, 304):
            self._framed = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, without framing."""
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > HIGH_WATER_BYTES and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        if self._waiter is not None:
            self._wake()

    def on_message_complete(self) -> None:
        """The framing says that the answer is whole."""
        if self._head_done:
            self._whole = True
            self._wake()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Upstream:
    """One replica: its socket, its credential, its idle connections."""

    __slots__ = (
        "_idle",
        "_loop",
        "_retired",
        "head",
        "running",
        "slots",
        "socket",
        "uid",
    )

    def __init__(self, *, uid: str, socket: str, secret: str, slots: int) -> None:
        self.uid = uid
        self.socket = socket
        self.slots = max(slots, 1)
        self._retired = False
        self.running = 0
        self._idle: list[Connection] = []
        self._loop = asyncio.get_running_loop()
        self.head = (
            f"Host: localhost\r\nAuthorization: Bearer {secret}\r\nAccept-Encoding: identity\r\n"
        ).encode()
        """Headers that every request to this replica carries."""

    async def connection(self) -> Connection:
        """An idle connection, else a new one; `ConnectFailed` when the engine refuses."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and self._loop.time() - connection.idle_since < IDLE_LIMIT_S:
                return connection
            connection.abort()
        return await self.fresh_connection()

    async def fresh_connection(self) -> Connection:
        """A new connection."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self._loop.create_unix_connection(
                    lambda: Connection(self._loop), self.socket
                )
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(str(error)) from error
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep it for the next request, or close it when it cannot be used again."""
        keep = connection.usable and not self._retired
        if keep and len(self._idle) < max(self.slots, IDLE_AT_LEAST):
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        else:
            connection.abort()

    def retire(self) -> None:
        """No new requests: running exchanges end, no connection is kept."""
        self._retired = True
        self.close_idle(all_of_them=True)

    def close_idle(self, *, all_of_them: bool = False) -> None:
        """Close what has been idle for too long."""
        limit = self._loop.time() - (-1 if all_of_them else IDLE_LIMIT_S)
        kept = []
        for connection in self._idle:
            if connection.usable and connection.idle_since > limit:
                kept.append(connection)
            else:
                connection.abort()
        self._idle = kept
