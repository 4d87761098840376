"""What is live: activate, roll back, stop."""

from __future__ import annotations

from django.db import IntegrityError, transaction

from deployments.actions.lookups import locked_deployment, unbuilt
from deployments.actions.permissions import audit, require
from deployments.broker import feed
from deployments.broker.queue import enqueue_on_commit
from deployments.models import (
    Activation,
    ActivationKind,
    Deployment,
    Generation,
    Role,
    User,
)
from deployments.queries.lookups import generation_of, no_rollback_target
from mmadmin.core.errors import Conflict, InvalidInput, NotFound
from mmadmin.core.generations.lifecycle import GenerationState, JobState

MAY_START = (GenerationState.BUILT, GenerationState.RETIRED, GenerationState.FAILED)


def activate(actor: User, name: str, number: int, *, reason: str = "") -> Activation:
    """Make a built generation live."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        deployment = locked_deployment(name)
        target = generation_of(deployment, number)
        return _queue_activation(actor, deployment, target, ActivationKind.ACTIVATE, reason)


def rollback(actor: User, name: str, *, to: int | None = None, reason: str) -> Activation:
    """Bring an earlier generation back; without `to`, the last one that was live before."""
    require(actor, Role.OPERATOR)
    if not reason.strip():
        raise InvalidInput("a roll-back needs a reason", remedy="say why, for the history")
    with transaction.atomic():
        deployment = locked_deployment(name)
        target = generation_of(deployment, to) if to is not None else deployment.rollback_target()
        if target is None:
            raise Conflict(**no_rollback_target(deployment))
        return _queue_activation(actor, deployment, target, ActivationKind.ROLLBACK, reason)


def stop(actor: User, name: str, *, reason: str = "") -> Activation:
    """Take the deployment's live generation down."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        deployment = locked_deployment(name)
        if deployment.live is None:
            raise Conflict(f"{name} has no live generation")
        return _queue_activation(actor, deployment, None, ActivationKind.STOP, reason)


def _queue_activation(
    actor: User,
    deployment: Deployment,
    target: Generation | None,
    kind: ActivationKind,
    reason: str,
) -> Activation:
    if deployment.archived_at is not None:
        raise Conflict(f"{deployment.name} is archived")
    if target is not None:
        if deployment.live_id == target.pk:
            raise Conflict(f"{target.uid} is live already")
        if not target.system:
            raise unbuilt(target, "cannot go live")
        if target.state not in MAY_START:
            raise Conflict(f"{target.uid} cannot go live: it is {target.state}")
    try:
        with transaction.atomic():
            activation = Activation.objects.create(
                deployment=deployment,
                target=target,
                previous=deployment.live,
                kind=kind,
                reason=reason,
                host=deployment.host,
                actor=actor,
            )
    except IntegrityError as error:
        raise Conflict(
            f"{deployment.name} is in the middle of another activation",
            remedy="wait for it or cancel it",
        ) from error
    enqueue_on_commit(activation)
    feed.announce_job(activation)
    what = target.uid if target else deployment.name
    audit(
        actor,
        f"deployment.{kind.value}",
        f"deployment:{deployment.name}",
        f"{kind.value} {what}: {reason}" if reason else f"{kind.value} {what}",
        generation=target.number if target else None,
        activation=activation.pk,
    )
    return activation


def _too_late(activation: Activation) -> Conflict:
    """What runs can only be finished."""
    what = f"activation {activation.pk} of {activation.deployment.name}"
    if activation.undoing:
        return Conflict(f"{what} is on its way back already", remedy="wait for its end")
    if activation.target is None:
        return Conflict(
            f"{what} takes it down already", remedy="activate a generation once it has ended"
        )
    return Conflict(
        f"{what} can only be finished: {activation.target.uid} serves already",
        remedy="roll back once it has ended",
    )


def cancel_activation(actor: User, activation_id: int) -> Activation:
    """Cancel an activation; what was live before stays or comes back.

    Raises `Conflict` once that is of no use.
    """
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        activation = (
            Activation.objects.select_related("deployment", "target__deployment")
            .filter(pk=activation_id)
            .first()
        )
        if activation is None:
            raise NotFound(f"there is no activation {activation_id}")
        if activation.state == JobState.RUNNING and not activation.may_be_cancelled:
            raise _too_late(activation)
        if not activation.cancel():
            raise Conflict(f"activation {activation.pk} has ended already ({activation.state})")
        name = activation.deployment.name
        audit(
            actor,
            "activation.cancel",
            f"deployment:{name}",
            f"cancel of activation {activation.pk} of {name}",
        )
        feed.announce_job(activation)
    return activation
