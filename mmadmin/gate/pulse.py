"""The pulse: one task a worker that does everything that is due by the clock.

Ten times a second it looks at the running requests (clients that left, silences, deadlines); once
a second it tells the broker that this worker lives, which snapshot it serves and what runs where.
An activation reads that to know when a generation is drained, so a change is told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from mmadmin.core.snapshot import GATE_PRESENCE_PREFIX, GATE_WATCH_PREFIX
from mmadmin.gate.app import Gate
from mmadmin.gate.flight import Flight, Stop
from mmadmin.gate.relay import watch

BEAT_S = 0.1
TELL_EVERY_S = 1.0
PRESENCE_EXPIRES_S = 5
LIVE_SHOWN = 200
"""At most so many running requests are told to those who watch."""


class Pulse:
    """Drives one gate."""

    def __init__(self, gate: Gate, redis: Redis | None, gate_id: str) -> None:
        self._gate = gate
        self._redis = redis
        self.gate_id = gate_id
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._turn())]
        if self._redis is not None:
            self._tasks.append(asyncio.create_task(self._tell_for_ever(self._redis)))

    async def stop(self) -> None:
        """End, and take this worker out of the list of the living."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._gate.access_log.flush()
        if self._redis is not None:
            with contextlib.suppress(RedisError, OSError):
                await self._redis.delete(
                    GATE_PRESENCE_PREFIX + self.gate_id, GATE_WATCH_PREFIX + self.gate_id
                )

    async def _beat(self) -> None:
        gate = self._gate
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            for flight in tuple(gate.flights.values()):
                self._look_at(flight, now)

    def _look_at(self, flight: Flight, now: float) -> None:
        if flight.settled:
            return
        if flight.receive is not None and flight.watcher is None:
            flight.watcher = asyncio.create_task(watch(flight, flight.receive))
        if now > flight.deadline:
            flight.stop(Stop.DEADLINE)
        elif flight.streamed and now - flight.last_sent >= self._gate.settings.silence_s:
            flight.last_sent = now
            flight.poke()

    async def _turn(self) -> None:
        gate = self._gate
        while True:
            await asyncio.sleep(1.0)
            gate.rates.turn()
            for upstream in gate.upstreams.values():
                upstream.close_idle()
            if gate.access_log.enabled:
                await asyncio.to_thread(gate.access_log.flush)

    async def _tell_for_ever(self, redis: Redis) -> None:
        gate = self._gate
        while True:
            gate.changed.clear()
            with contextlib.suppress(RedisError, OSError):
                await self._tell(redis)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_EVERY_S):
                    await gate.changed.wait()
            await asyncio.sleep(0.02)

    async def _tell(self, redis: Redis) -> None:
        pipe = redis.pipeline(transaction=False)
        pipe.set(
            GATE_PRESENCE_PREFIX + self.gate_id,
            orjson.dumps(presence(self._gate)),
            ex=PRESENCE_EXPIRES_S,
        )
        pipe.set(
            GATE_WATCH_PREFIX + self.gate_id,
            orjson.dumps(live(self._gate)),
            ex=PRESENCE_EXPIRES_S,
        )
        await pipe.execute()


def presence(gate: Gate) -> dict[str, object]:
    """What an activation needs to know of this worker."""
    return {
        "version": gate.snapshot.version,
        "inflight": dict(gate.inflight),
        "held": {name: stile.waiting for name, stile in gate.turnstiles.items() if stile.waiting},
        "at": time.time(),
        "stopping": gate.stopping,
    }


def live(gate: Gate) -> dict[str, object]:
    """What `mm top` shows of this worker."""
    now = time.monotonic()
    return {
        "at": time.time(),
        "rates": gate.rates.rows(),
        "lines": {
            name: {"running": stile.running, "waiting": stile.waiting, "slots": stile.capacity}
            for name, stile in gate.turnstiles.items()
        },
        "requests": [
            {
                "id": flight.request_id,
                "key": flight.key.key_id if flight.key else "",
                "deployment": flight.route.deployment if flight.route else "",
                "generation": flight.generation_uid,
                "endpoint": flight.endpoint.name if flight.endpoint else "",
                "state": flight.state,
                "stream": flight.streamed,
                "age_s": round(now - flight.started, 1),
                "events": flight.tap.events if flight.tap else 0,
            }
            for flight in list(gate.flights.values())[:LIVE_SHOWN]
        ],
    }
