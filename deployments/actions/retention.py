"""A person's word on generations and deployments: pins, marks, archive, settings."""

from __future__ import annotations

from typing import Literal

from django.db import transaction
from django.utils import timezone

from deployments.actions.lookups import locked_deployment
from deployments.actions.permissions import audit, require
from deployments.broker import feed
from deployments.models import (
    Deployment,
    Generation,
    Mark,
    Role,
    User,
)
from deployments.queries.lookups import deployment_named, generation_of
from mmadmin.core.errors import Conflict, InvalidInput


def pin(
    actor: User,
    name: str,
    number: int,
    on: bool,  # noqa: FBT001
    *,
    reason: str = "",
) -> Generation:
    """Keep a generation's objects whatever its age (or no longer)."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        generation = generation_of(deployment_named(name), number)
        Generation.objects.filter(pk=generation.pk).update(pinned=on)
        verb = "pin" if on else "unpin"
        audit(
            actor,
            f"generation.{verb}",
            f"generation:{generation.uid}",
            _because(f"{verb} {generation.uid}", reason),
        )
        announce_generation(generation)
    generation.pinned = on
    return generation


def mark(
    actor: User, name: str, number: int, mark: Literal["good", "bad", ""], *, reason: str = ""
) -> Generation:
    """Put a person's word on a generation: good, bad or none."""
    require(actor, Role.OPERATOR)
    if mark not in Mark.values:
        raise InvalidInput(f"{mark!r} is not a mark", remedy='use "good", "bad" or ""')
    with transaction.atomic():
        generation = generation_of(deployment_named(name), number)
        Generation.objects.filter(pk=generation.pk).update(mark=mark)
        audit(
            actor,
            "generation.mark",
            f"generation:{generation.uid}",
            _because(f"{generation.uid} is {mark or 'unmarked'}", reason),
            mark=mark,
        )
        announce_generation(generation)
    generation.mark = mark
    return generation


def _because(summary: str, reason: str) -> str:
    return f"{summary}: {reason.strip()}" if reason.strip() else summary


def announce_generation(generation: Generation) -> None:
    """Tell open pages, once it is committed, that a generation changed."""
    name = generation.deployment.name
    transaction.on_commit(lambda: feed.announce("generation", generation.pk, deployment=name))


def archive(actor: User, name: str, *, on: bool = True) -> Deployment:
    """Put a deployment that serves nothing out of sight (or take it back)."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        deployment = locked_deployment(name)
        busy = (
            deployment.live_id is not None
            or deployment.activations.active().exists()
            or deployment.builds.active().exists()
            or deployment.trials.active().exists()
        )
        if on and busy:
            raise Conflict(f"{name} is in use", remedy="stop it and let its jobs end first")
        deployment.archived_at = timezone.now() if on else None
        deployment.save(update_fields=["archived_at"])
        verb = "archive" if on else "unarchive"
        audit(actor, f"deployment.{verb}", f"deployment:{name}", f"{verb} {name}")
        transaction.on_commit(feed.publish_snapshot)
        transaction.on_commit(lambda: feed.announce("deployment", deployment.pk, deployment=name))
    return deployment


def configure(
    actor: User,
    name: str,
    *,
    auto_rollback: bool | None = None,
    keep_generations: int | None = None,
    keep_days: int | None = None,
    description: str | None = None,
) -> Deployment:
    """Change what is not part of a generation: auto-rollback, what is kept, description."""
    require(actor, Role.OPERATOR)
    if keep_generations is not None and not 1 <= keep_generations <= 1000:  # noqa: PLR2004
        raise InvalidInput("keep_generations is out of range", remedy="use 1 to 1000")
    if keep_days is not None and not 0 <= keep_days <= 3650:  # noqa: PLR2004
        raise InvalidInput("keep_days is out of range", remedy="use 0 to 3650")
    changes = {
        field: value
        for field, value in {
            "auto_rollback": auto_rollback,
            "keep_generations": keep_generations,
            "keep_days": keep_days,
            "description": description,
        }.items()
        if value is not None
    }
    with transaction.atomic():
        deployment = locked_deployment(name)
        for field, value in changes.items():
            setattr(deployment, field, value)
        if changes:
            deployment.save(update_fields=list(changes))
            audit(
                actor,
                "deployment.configure",
                f"deployment:{name}",
                f"settings of {name}: {', '.join(changes)}",
                **changes,
            )
            transaction.on_commit(
                lambda: feed.announce("deployment", deployment.pk, deployment=name)
            )
    return deployment
