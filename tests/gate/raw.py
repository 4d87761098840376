"""A client that sees bytes: what went over the wire, in order, with times."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Self


@dataclass
class Answer:
    """A response, its body without the transfer framing."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    """False = the connection ended before the framing did."""

    @property
    def json(self):
        """The body, parsed."""
        return json.loads(self.body)


def request_bytes(
    path: str,
    body: bytes | dict | None = None,
    *,
    key: str | None = None,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> bytes:
    """A request as it goes over the wire."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body or b""
    lines = [f"{method} {path} HTTP/1.1", "Host: gate"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    names = {
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **(headers or {}),
    }
    lines += [f"{name}: {value}" for name, value in names.items() if value]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


class RawClient:
    """One connection to the gate."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, *args, **kwargs) -> None:
        """Send a request."""
        self.writer.write(request_bytes(*args, **kwargs))
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read status and headers."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, f"{name} comes twice"
            headers[name.lower()] = value
        return int(first.split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """Read one HTTP chunk; empty = the last."""
        size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> Answer:
        """Read a whole response."""
        status, headers = await self.head()
        body, whole = b"", True
        try:
            if headers.get("transfer-encoding") == "chunked":
                assert "content-length" not in headers
                while data := await self.chunk():
                    body += data
            else:
                body = await self.reader.readexactly(int(headers["content-length"]))
        except (asyncio.IncompleteReadError, ConnectionError):
            whole = False
        return Answer(status, headers, body, whole)


async def ask(port: int, *args, **kwargs) -> Answer:
    """One request on a connection of its own."""
    async with RawClient(port) as client:
        await client.send(*args, **kwargs)
        return await client.answer()
