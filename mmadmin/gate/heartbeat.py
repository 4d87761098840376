"""The heartbeat: one task per worker for everything that is due by the clock.

Ten times a second it checks the running requests (clients that left, silences, deadlines). Once a
second it publishes that this worker is alive, which snapshot it serves and what runs where. An
activation reads that to know when a generation is drained, so a change is published at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from mmadmin.core.snapshot import GATE_PRESENCE_PREFIX, GATE_WATCH_PREFIX
from mmadmin.gate.relay import watch
from mmadmin.gate.request import Request, Stop
from mmadmin.gate.traffic import Traffic

CHECK_S = 0.1
PUBLISH_EVERY_S = 1.0
PRESENCE_EXPIRES_S = 5
LIVE_SHOWN = 200
"""Running requests published for `mm top`, at most."""


class Heartbeat:
    """Drives one worker."""

    def __init__(self, traffic: Traffic, redis: Redis | None, gate_id: str) -> None:
        self._traffic = traffic
        self._redis = redis
        self.gate_id = gate_id
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the tasks."""
        self._tasks = [
            asyncio.create_task(self._check()),
            asyncio.create_task(self._every_second()),
        ]
        if self._redis is not None:
            self._tasks.append(asyncio.create_task(self._keep_publishing(self._redis)))

    async def stop(self) -> None:
        """Stop them, and withdraw this worker's heartbeat."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._traffic.access_log.flush()
        if self._redis is not None:
            with contextlib.suppress(RedisError, OSError):
                await self._redis.delete(
                    GATE_PRESENCE_PREFIX + self.gate_id, GATE_WATCH_PREFIX + self.gate_id
                )

    async def _check(self) -> None:
        traffic = self._traffic
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            for request in tuple(traffic.requests.values()):
                self._look_at(request, now)

    def _look_at(self, request: Request, now: float) -> None:
        if request.settled:
            return
        response = request.response
        if request.receive is not None and request.watcher is None:
            request.watcher = asyncio.create_task(watch(request, request.receive))
        if now > request.deadline:
            request.stop(Stop.DEADLINE)
        elif response.streamed and now - response.last_sent >= self._traffic.settings.silence_s:
            response.last_sent = now
            request.wake_for_comment()

    async def _every_second(self) -> None:
        traffic = self._traffic
        while True:
            await asyncio.sleep(1.0)
            traffic.rates.turn()
            for upstream in traffic.upstreams.values():
                upstream.close_idle()
            if traffic.access_log.enabled:
                await asyncio.to_thread(traffic.access_log.flush)

    async def _keep_publishing(self, redis: Redis) -> None:
        traffic = self._traffic
        while True:
            traffic.changed.clear()
            with contextlib.suppress(RedisError, OSError):
                await self._publish(redis)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_EVERY_S):
                    await traffic.changed.wait()
            await asyncio.sleep(0.02)

    async def _publish(self, redis: Redis) -> None:
        pipe = redis.pipeline(transaction=False)
        pipe.set(
            GATE_PRESENCE_PREFIX + self.gate_id,
            orjson.dumps(presence(self._traffic)),
            ex=PRESENCE_EXPIRES_S,
        )
        pipe.set(
            GATE_WATCH_PREFIX + self.gate_id,
            orjson.dumps(live(self._traffic)),
            ex=PRESENCE_EXPIRES_S,
        )
        await pipe.execute()


def presence(traffic: Traffic) -> dict[str, object]:
    """What an activation needs to know of this worker."""
    return {
        "version": traffic.snapshot.version,
        "inflight": dict(traffic.inflight),
        "held": {name: queue.waiting for name, queue in traffic.queues.items() if queue.waiting},
        "at": time.time(),
        "stopping": traffic.stopping,
    }


def live(traffic: Traffic) -> dict[str, object]:
    """What `mm top` shows of this worker."""
    now = time.monotonic()
    return {
        "at": time.time(),
        "rates": traffic.rates.rows(),
        "queues": {
            name: {"running": queue.running, "waiting": queue.waiting, "slots": queue.capacity}
            for name, queue in traffic.queues.items()
        },
        "requests": [
            {
                "id": request.request_id,
                "key": request.key.key_id if request.key else "",
                "deployment": request.route.deployment if request.route else "",
                "generation": request.generation_uid,
                "endpoint": request.endpoint.name if request.endpoint else "",
                "state": request.state,
                "stream": request.response.streamed,
                "age_s": round(now - request.started, 1),
                "events": request.response.tap.events if request.response.tap else 0,
            }
            for request in list(traffic.requests.values())[:LIVE_SHOWN]
        ],
    }
