"""One deployment, `smol`, on the toy machine: its generations, and a gate that listens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import redis
from django.db import connections

from deployments import actions, tasks
from deployments.models import Activation, Deployment, Generation
from mmadmin.core.generations.lifecycle import GenerationState
from mmadmin.core.snapshot import SNAPSHOT_KEY, snapshot_from_json
from tests.deployments import machines
from tests.deployments.processes import PATIENCE_S
from tests.deployments.specs import spec

if TYPE_CHECKING:
    from tests.deployments.conftest import People


class Gate:
    """A gate that follows the snapshot and says what is in flight."""

    def __init__(self, broker: redis.Redis) -> None:
        self.broker = broker
        self.inflight: dict[str, int] = {}
        self.routes: list[tuple[str, int | None, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            text = self.broker.get(SNAPSHOT_KEY)
            version = 0
            if text:
                snapshot = snapshot_from_json(text)
                version = snapshot.version
                for route in snapshot.routes.values():
                    seen = (route.mode, route.generation, len(route.replicas))
                    if not self.routes or self.routes[-1] != seen:
                        self.routes.append(seen)
            said = {"version": version, "inflight": self.inflight, "held": {}, "at": time.time()}
            self.broker.set("mm:gate:test", json.dumps(said), ex=PATIENCE_S)

    def stop(self) -> None:
        """Fall silent."""
        self._stop.set()
        self._thread.join()


def built(people: People, context: int = 2048, **kwargs: str) -> Generation:
    """A generation that is built and not live."""
    generation = actions.deploy(
        people.bob, spec(context=context, **kwargs), reason=f"context {context}", activate=False
    )
    tasks.run_build(generation.builds.get().pk)
    generation.refresh_from_db()
    assert generation.state == GenerationState.BUILT
    return generation


def go(people: People, number: int) -> Activation:
    """Activate a generation and do the job."""
    activation = actions.activate(people.bob, "smol", number, reason="go")
    tasks.run_activation(activation.pk)
    activation.refresh_from_db()
    return activation


def running() -> list[str]:
    """Which generations have an engine."""
    return sorted(machines.told("engines", {}).values())


def states() -> list[str]:
    """Every generation's state, in order."""
    return list(Generation.objects.order_by("number").values_list("state", flat=True))


def live() -> int | None:
    """The number of the live generation."""
    return Deployment.objects.values_list("live__number", flat=True).get(name="smol")


def in_thread(task: Callable[[int], None], job_id: int) -> threading.Thread:
    """Do a job beside the test."""

    def run() -> None:
        try:
            task(job_id)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    return thread
