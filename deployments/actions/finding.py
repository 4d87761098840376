"""The rows that actions are about, by their names; `NotFound` in words."""

from __future__ import annotations

from deployments.models import (
    Deployment,
    Generation,
)
from mmadmin.core.errors import NotFound
from mmadmin.core.lifecycle import JobState

ACTIVE_JOB = (JobState.QUEUED, JobState.RUNNING)


def deployment_named(name: str) -> Deployment:
    """The deployment with that name."""
    deployment = Deployment.objects.select_related("host", "live").filter(name=name).first()
    if deployment is None:
        raise NotFound(f"there is no deployment {name}", remedy="see the list of deployments")
    return deployment


def locked_deployment(name: str) -> Deployment:
    """The same, its row locked until the transaction ends."""
    deployment = (
        Deployment.objects.select_for_update(of=("self",))
        .select_related("host", "live")
        .filter(name=name)
        .first()
    )
    if deployment is None:
        raise NotFound(f"there is no deployment {name}", remedy="see the list of deployments")
    return deployment


def generation_of(deployment: Deployment, number: int) -> Generation:
    """A deployment's generation by its number."""
    generation = deployment.generations.select_related("deployment").filter(number=number).first()
    if generation is None:
        raise NotFound(f"{deployment.name} has no generation {number}")
    return generation
