"""The rows that actions are about, by their names."""

from __future__ import annotations

from deployments.models import (
    Deployment,
    Generation,
)
from deployments.queries.lookups import no_deployment
from mmadmin.core.errors import Conflict
from mmadmin.core.generations.lifecycle import GenerationState


def locked_deployment(name: str) -> Deployment:
    """The deployment with that name, its row locked until the transaction ends."""
    deployment = (
        Deployment.objects.select_for_update(of=("self",))
        .select_related("host", "live")
        .filter(name=name)
        .first()
    )
    if deployment is None:
        raise no_deployment(name)
    return deployment


def unbuilt(generation: Generation, cannot: str) -> Conflict:
    """Why a generation without a system `cannot` do what is asked, and what helps."""
    if generation.state == GenerationState.FAILED:
        return Conflict(
            f"{generation.uid} {cannot}: its build failed or was cancelled",
            remedy="build it again on its build's page, or deploy its file again",
            command="mm deploy FILE",
        )
    return Conflict(
        f"{generation.uid} {cannot}: it is not built yet",
        remedy="wait for its build",
        command=f"mm follow {generation.deployment.name}",
    )
