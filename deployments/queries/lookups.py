"""One deployment or generation by its name, and the errors where there is none."""

from __future__ import annotations

from deployments.models import Deployment, Generation
from mmadmin.core.errors import NotFound


def deployment_named(name: str) -> Deployment:
    """The deployment with that name. Raises `NotFound`."""
    found = Deployment.objects.filter(name=name).first()
    if found is None:
        raise no_deployment(name)
    return found


def generation_of(deployment: Deployment, number: int) -> Generation:
    """A deployment's generation by its number. Raises `NotFound`."""
    found = deployment.generations.select_related("deployment").filter(number=number).first()
    if found is None:
        raise no_generation(deployment.name, number)
    return found


def no_deployment(name: str) -> NotFound:
    """The error that there is none of that name."""
    return NotFound(
        f"there is no deployment {name}", remedy="see the list of deployments", command="mm status"
    )


def no_generation(name: str, number: int) -> NotFound:
    """The error that the deployment of that name has none of that number."""
    return NotFound(
        f"{name} has no generation {number}", remedy="see its history", command=f"mm history {name}"
    )


def no_rollback_target(deployment: Deployment) -> dict[str, str]:
    """Message, remedy and command of the error that nothing can be rolled back to."""
    none = f"{deployment.name} has no earlier generation that was live"
    others = deployment.generations.exclude(system="").exclude(pk=deployment.live_id or 0)
    if not others.exists():
        return {
            "message": f"{none}: there is nothing to go back to yet",
            "remedy": "once another goes live, the one before it can be brought back",
        }
    return {
        "message": f"{none} and is not marked bad",
        "remedy": "choose another one from its history",
        "command": f"mm rollback {deployment.name} --to NUMBER",
    }
