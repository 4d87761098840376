"""A generation on trial: begun beside the live one, and ended."""

from __future__ import annotations

from django.db import IntegrityError, transaction

from deployments.actions.lookups import locked_deployment, unbuilt
from deployments.actions.permissions import audit, require
from deployments.broker import feed
from deployments.broker.queue import enqueue_on_commit
from deployments.models import Deployment, Generation, Role, Trial, User
from deployments.queries.lookups import generation_of
from mmadmin.core.errors import Conflict, InvalidInput, NotFound
from mmadmin.core.generations.trial import MINUTES, MOST_MINUTES


def begin_trial(
    actor: User, name: str, number: int, *, minutes: int = MINUTES, reason: str = ""
) -> Trial:
    """Run a kept generation beside the live one for so long; the playground can ask it.

    Whether both fit into memory shows when the host's worker looks: if not, the trial fails.
    """
    require(actor, Role.OPERATOR)
    if not 1 <= minutes <= MOST_MINUTES:
        raise InvalidInput(
            f"a trial lasts 1 to {MOST_MINUTES} minutes", remedy="give others", field="minutes"
        )
    with transaction.atomic():
        deployment = locked_deployment(name)
        generation = generation_of(deployment, number)
        _refuse(deployment, generation)
        try:
            with transaction.atomic():
                trial = Trial.objects.create(
                    deployment=deployment,
                    generation=generation,
                    minutes=minutes,
                    reason=reason,
                    host=deployment.host,
                    actor=actor,
                )
        except IntegrityError as error:
            raise Conflict(
                f"{name} has a generation on trial already", remedy="end that trial first"
            ) from error
        enqueue_on_commit(trial)
        feed.announce_job(trial)
        summary = f"trial of {generation.uid} for {minutes} min"
        audit(
            actor,
            "trial.begin",
            f"deployment:{name}",
            f"{summary}: {reason}" if reason else summary,
            generation=number,
            trial=trial.pk,
            minutes=minutes,
        )
    return trial


def _refuse(deployment: Deployment, generation: Generation) -> None:
    """Say why this generation cannot be on trial now."""
    name, uid = deployment.name, generation.uid
    if deployment.archived_at is not None:
        raise Conflict(f"{name} is archived")
    if not generation.system:
        raise unbuilt(generation, "cannot be tried")
    if deployment.live is None:
        raise Conflict(
            f"{name} has no live generation to run beside", remedy=f"activate {uid} instead"
        )
    if deployment.live_id == generation.pk:
        raise Conflict(f"{uid} is live already", remedy="try another generation")
    if deployment.activations.active().exists():
        raise Conflict(
            f"{name} is in the middle of an activation", remedy="wait for it or cancel it"
        )
    if Deployment.objects.filter(public_name=uid, archived_at=None).exists():
        raise Conflict(
            f"clients call another deployment {uid}", remedy="give that one another public name"
        )


def end_trial(actor: User, trial_id: int) -> Trial:
    """End a trial before its time: what it is saying it may finish, for a moment."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        trial = (
            Trial.objects.select_related("deployment", "generation__deployment", "host")
            .filter(pk=trial_id)
            .first()
        )
        if trial is None:
            raise NotFound(f"there is no trial {trial_id}")
        if not trial.active:
            raise Conflict(f"the trial of {trial.generation.uid} has ended already")
        if trial.end_soon(f"ended by {actor.get_username()}"):
            name = trial.deployment.name
            audit(
                actor,
                "trial.end",
                f"deployment:{name}",
                f"trial of {trial.generation.uid} ended",
                generation=trial.generation.number,
                trial=trial.pk,
            )
            if trial.active:
                enqueue_on_commit(trial)
            feed.announce_job(trial)
    return trial
