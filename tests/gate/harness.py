"""A gate on a real socket inside the test's loop, over a directory that the test writes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mmadmin.core.access import NewKey, new_key
from mmadmin.core.engines.llama_server.questions import QUESTIONS
from mmadmin.core.home import Home
from mmadmin.core.snapshot import KeyRecord, ReplicaRoute, Route, Snapshot, Usage
from mmadmin.gate.app import Gate
from mmadmin.gate.directory import EMPTY
from mmadmin.gate.heartbeat import Heartbeat
from mmadmin.gate.limits import Limiter
from mmadmin.gate.settings import GateSettings
from mmadmin.gate.worker import front_of, server, wind_down
from tests.gate.stub import StubEngine

PEPPER = b"test-only-pepper"
MASTER = b"test-only-engine-master"
MODEL = "small-model"
PATIENCE_S = 60.0
"""How long a busy machine may take for what happens unprompted; waiting longer passes no test."""


def record_of(key: NewKey) -> KeyRecord:
    """An active key without limits."""
    return KeyRecord(key_id=key.key_id, digest=key.digest, state="active")


def route_to(socket_path: str, *, slots: int) -> Route:
    """The usual deployment: generation 3 of `small`, one replica."""
    return Route(
        deployment="small",
        public_name=MODEL,
        mode="open",
        generation=3,
        generation_uid="small/3",
        replicas=(ReplicaRoute(uid="small-3-0", socket=socket_path, slots=slots),),
        created=1_700_000_000,
        context_per_slot=2048,
        errors=QUESTIONS.error_patterns,
        answers=QUESTIONS.answer_fields,
    )


class ListDirectory:
    """A directory in memory."""

    def __init__(self) -> None:
        self.now = EMPTY
        self.recorded: list[Usage] = []
        self.listener: Callable[[Snapshot], None] = lambda _: None

    async def snapshot(self) -> Snapshot:
        """The present one."""
        return self.now

    def watch(self, listener: Callable[[Snapshot], None]) -> None:
        """One listener is enough."""
        self.listener = listener

    def record(self, usages: Sequence[Usage]) -> None:
        """Into the list."""
        self.recorded.extend(usages)

    def publish(self, snapshot: Snapshot) -> None:
        """As a nudge does."""
        self.now = replace(snapshot, version=self.now.version + 1)
        self.listener(self.now)


class Harness:
    """One gate, its stub engine, one key."""

    def __init__(self, home: Path, engine: StubEngine) -> None:
        self.engine = engine
        self.directory = ListDirectory()
        self.key: NewKey = new_key(PEPPER)
        self.record = record_of(self.key)
        self.route = route_to(engine.socket, slots=4)
        self.settings = GateSettings(
            home=Home(home), pepper=PEPPER, engine_master=MASTER, access_log=False
        )
        self.gate: Gate
        self.port = 0
        self.stop_within_s = 1.0
        """How long requests may go on when the block ends."""

    @property
    def recorded(self) -> list[Usage]:
        """What was recorded."""
        return self.directory.recorded

    @property
    def base_url(self) -> str:
        """For clients."""
        return f"http://127.0.0.1:{self.port}/v1"

    def publish(
        self,
        *,
        routes: Sequence[Route] = (),
        keys: Sequence[KeyRecord] = (),
        trials: Sequence[Route] = (),
    ) -> None:
        """Publish these instead of the usual ones."""
        self.directory.publish(
            Snapshot(
                version=0,
                routes={r.public_name: r for r in (routes or (self.route,))},
                keys={k.key_id: k for k in (keys or (self.record,))},
                trials={r.public_name: r for r in trials},
            )
        )

    @contextlib.asynccontextmanager
    async def open(self, limiter: Limiter | None = None) -> AsyncIterator[Harness]:
        """Serve while the block runs."""
        self.gate = Gate(self.settings, self.directory, limiter=limiter or Limiter())
        self.publish()
        await self.gate.start()
        heartbeat = Heartbeat(self.gate.traffic, None, "test")
        heartbeat.start()
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        self.port = listening.getsockname()[1]
        front = server(front_of(self.gate), graceful_s=3, keep_alive_s=125)
        serving = asyncio.create_task(front.serve(sockets=[listening]))
        while not front.started:  # noqa: ASYNC110 (the server has no event for it)
            await asyncio.sleep(0.005)
        try:
            yield self
        finally:
            await wind_down(self.gate, front, serving, within_s=self.stop_within_s)
            await heartbeat.stop()
            for upstream in self.gate.traffic.upstreams.values():
                upstream.close_idle(all_of_them=True)

    async def until(self, condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 (any condition)
                await asyncio.sleep(0.005)
