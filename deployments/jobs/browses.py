"""A look into a hub repository, done where the network and the GPUs are: by a host's worker."""

from __future__ import annotations

from typing import Any, Protocol

from deployments.jobs import lease
from deployments.jobs.recorder import Recorder
from deployments.models import Browse, Replica, ReplicaState


class Hands(Protocol):
    """What a browse does to the machine."""

    def offers(
        self, repo: str, revision: str, options: dict[str, Any] | None, running: list[Replica]
    ) -> dict[str, Any]:
        """The repository's models and whether each fits; asks the network."""
        ...


def run(recorder: Recorder[Browse], hands: Hands) -> None:
    """Look, and write down what was found."""
    job = recorder.job
    recorder.check()
    running = Replica.objects.filter(host=job.host, state=ReplicaState.READY)
    found = hands.offers(
        job.repo, job.revision, job.options, list(running.select_related("generation__deployment"))
    )
    lease.write(job, result=found)
