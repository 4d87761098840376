"""Idle connections: closed when no head comes, and no lock-out at a shell's limit of open files."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys

import pytest

from mmadmin.gate import wire
from mmadmin.gate.open_files import ENOUGH
from tests.gate.raw import request_bytes


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HT"])
async def test_a_head_that_does_not_come_closes_the_connection(
    harness, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Nothing at all, or an unfinished head; also behind an answered request."""
    monkeypatch.setattr(wire, "HEAD_S", 0.3)
    whole = request_bytes("/health", method="GET")
    for before in (b"", whole):
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        writer.write(before)
        if before:
            await reader.readuntil(b"\r\n\r\n")
        if before and not sent:
            writer.close()
            continue  # kept alive for its own time
        writer.write(sent)
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()


async def test_a_request_that_takes_longer_than_its_head_may_is_served(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is the head's alone."""
    monkeypatch.setattr(wire, "HEAD_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    body = b'{"model": "nothing"}'
    head = request_bytes("/v1/chat/completions", body)[: -len(body)]
    writer.write(head)
    await asyncio.sleep(0.5)
    writer.write(body)
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()


def test_the_soft_limit_of_open_files_is_raised() -> None:
    """As far as the hard one allows."""
    script = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, r.getrlimit(r.RLIMIT_NOFILE)[1]));"
        "from mmadmin.gate.open_files import raise_limit; raise_limit();"
        "print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(done.stdout) == (ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH))
