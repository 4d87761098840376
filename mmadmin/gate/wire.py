"""Fewer writes towards clients.

A server writes an answer's head and body apart, and the event loop sends each at once: two system
calls and two packets. Here what is written during one turn of the event loop leaves as one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class GatheringTransport:
    """A transport whose writes of one turn of the loop are one write."""

    __slots__ = ("_chunks", "_loop", "_transport")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._chunks: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send at the end of this turn."""
        if not self._chunks:
            self._loop.call_soon(self._flush)
        self._chunks.append(data)

    def close(self) -> None:
        """Send what is there, then close."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the transport takes no more."""
        return bool(self._transport.is_closing())

    def _flush(self) -> None:
        chunks = self._chunks
        if not chunks:
            return
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if not self._transport.is_closing():
            self._transport.write(data)


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's protocol over such a transport."""

    def connection_made(self, transport: Any) -> None:
        """A client connected."""
        super().connection_made(GatheringTransport(transport, self.loop))  # type: ignore[arg-type]
