"""HTTP/1.1 towards clients, as gate and panel serve it: uvicorn's protocol, with four corrections.

No `Upgrade` is taken (RFC 9110 §7.8 lets a server ignore it). httptools ends a message at a head
that offers one, and reads the body that follows as the next request. `PlainProtocol` gives such a
head to a new parser without the offer, so that the body is read by its length.

A client of HTTP/1.0 knows no chunks: what has no length ends with the connection.

A connection that sends no whole head in time is closed.

Fewer writes: a server writes an answer's head and body apart, and the event loop sends each at
once: two system calls and two packets. Here they leave together. While several requests run, what
they write during one turn of the event loop leaves at its end, so that clients on the same machine
are woken once for many answers; a request that runs alone does not wait for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_S = 30
"""How long a connection may take to send the head of a request: idle ones must not hold files."""
_HEAD = b"HTTP/"
"""How the head of an answer begins; a piece of a body that begins so may wait a turn, too."""


class GatheringTransport:
    """A transport whose writes of one turn of the loop are one write."""

    __slots__ = ("_chunks", "_loop", "_running", "_transport", "is_closing")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop, running: Sized) -> None:
        self._transport = transport
        self._loop = loop
        self._running = running
        self._chunks: list[bytes] = []
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send at the end of this turn; alone, as soon as there is more than a head."""
        chunks = self._chunks
        if len(self._running) > 1:
            if not chunks:
                self._loop.call_soon(self._flush)
            chunks.append(data)
        elif chunks:
            chunks.append(data)
            self._flush()
        elif data.startswith(_HEAD):
            chunks.append(data)
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send what is there, then close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        chunks = self._chunks
        if not chunks:
            return
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if not self.is_closing():
            self._transport.write(data)


class UnframedCycle(RequestResponseCycle):
    """A response to HTTP/1.0: without a length, its end is the end of the connection."""

    async def send(self, message: Any) -> None:
        """Send head or body without transfer encoding."""
        self.chunked_encoding = False
        self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class PlainProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which neither upgrades nor tunnels."""

    _offered: bytes | None = None
    """What the present head offered in `Upgrade`."""
    _again = b""
    """The head that stopped the parser, without the offer."""
    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client connected: the head of a request is due."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._head_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def _head_came(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            except httptools.HttpParserUpgrade as stopped:
                if self._again:
                    data = self._again + data[stopped.args[0] :]
                    self._again = b""
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    continue
                self.send_400_response("CONNECT is not supported.")
            return

    def on_headers_complete(self) -> None:
        """Start the request; a head that offers an upgrade is read again without the offer."""
        if self.parser.should_upgrade():
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if method != b"CONNECT":
                offers = [value for name, value in self.headers if name == b"upgrade"]
                self._offered = b", ".join(offers)
                lines = [method + b" " + self.url + b" HTTP/" + version.encode()]
                lines += [n + b": " + v for n, v in self.headers if n != b"upgrade"]
                self._again = b"\r\n".join(lines) + b"\r\n\r\n"
            return
        self._head_came()
        super().on_headers_complete()
        if self._offered is not None:
            self.headers.append((b"upgrade", self._offered))
            self._offered = None
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = UnframedCycle

    def on_message_complete(self) -> None:
        """The request is whole; nothing to do where only its head was read."""
        if not self.parser.should_upgrade():
            super().on_message_complete()


class GatheringProtocol(PlainProtocol):
    """The gate's protocol: over a transport that gathers writes."""

    def connection_made(self, transport: Any) -> None:
        """A client connected."""
        gathering = GatheringTransport(transport, self.loop, self.tasks)
        super().connection_made(gathering)
