"""Fewer writes towards clients.

A server writes an answer's head and body apart, and the event loop sends each at once: two system
calls and two packets. Here they leave together. While several requests run, what they write during
one turn of the event loop leaves at its end, so that clients on the same machine are woken once for
many answers; a request that runs alone does not wait for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's protocol over such a transport."""

    def connection_made(self, transport: Any) -> None:
        """A client connected."""
        gathering = GatheringTransport(transport, self.loop, self.tasks)
        super().connection_made(gathering)  # type: ignore[arg-type]
