"""Fixtures: a gate over a scriptable engine, both on real sockets."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from mmadmin.gate import limits, upstream
from tests.gate.cluster import Broker
from tests.gate.harness import PATIENCE_S, Harness
from tests.gate.stub import StubEngine


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broker and engine are not given up because the machine is busy."""
    monkeypatch.setattr(limits, "ASK_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(upstream, "CONNECT_TIMEOUT_S", PATIENCE_S)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[StubEngine]:
    """A stub engine that listens."""
    stub = StubEngine()
    await stub.start()
    yield stub
    await stub.stop()


@pytest_asyncio.fixture
async def harness(tmp_path, engine) -> AsyncIterator[Harness]:
    """A gate that serves one model from the stub engine."""
    async with Harness(tmp_path, engine).open() as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broker() -> AsyncIterator[Broker]:
    """A broker for the module."""
    with tempfile.TemporaryDirectory(prefix="mm-broker-") as folder:
        running = Broker(Path(folder))
        await running.start()
        yield running
        running.kill()
