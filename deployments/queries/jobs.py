"""Builds, activations and the logs of jobs."""

from __future__ import annotations

from typing import Any

from django.db.models import Prefetch

from deployments.models import (
    Activation,
    Build,
    BuildStep,
    LogChunk,
    User,
)
from deployments.queries.paging import Page, paged, recorded, require
from mmadmin.core.errors import InvalidInput, NotFound


def builds(actor: User, *, name: str = "", page: int = 1) -> Page[Build]:
    """Builds, newest first; of one deployment, or of all."""
    require(actor)
    rows = Build.objects.select_related("deployment", "generation__deployment", "actor").defer(
        *recorded("generation"), "spec_toml", "plan"
    )
    return paged(rows.filter(deployment__name=name) if name else rows, page)


def build(actor: User, build_id: int) -> Build:
    """One build with its steps. Raises `NotFound`."""
    require(actor)
    found = (
        Build.objects.select_related("deployment", "generation__deployment", "actor", "host")
        .defer(*recorded("generation"))
        .prefetch_related(Prefetch("steps", BuildStep.objects.order_by("position")))
        .filter(pk=build_id)
        .first()
    )
    if found is None:
        raise NotFound(f"there is no build {build_id}")
    return found


PLANS_LOOKED_AT = 10


def warnings(actor: User, name: str) -> dict[str, str]:
    """What the rules last warned a deployment of: rule → words, from its newest judged plan."""
    require(actor)
    plans = (
        Build.objects.filter(deployment__name=name, plan__isnull=False)
        .order_by("-pk")
        .values_list("plan", flat=True)[:PLANS_LOOKED_AT]
    )
    judged: list[dict[str, Any]] = next((p["fit"] for p in plans if p and p.get("fit")), [])
    return {
        warning["rule"]: warning["words"] for row in judged for warning in row.get("warnings", [])
    }


def activations(actor: User, *, name: str = "", page: int = 1) -> Page[Activation]:
    """Activations, newest first; of one deployment, or of all."""
    require(actor)
    rows = Activation.objects.select_related(
        "deployment", "target__deployment", "previous__deployment", "actor"
    ).defer(*recorded("target", "previous"))
    return paged(rows.filter(deployment__name=name) if name else rows, page)


def activation(actor: User, activation_id: int) -> Activation:
    """One activation. Raises `NotFound`."""
    require(actor)
    found = (
        Activation.objects.select_related(
            "deployment", "target__deployment", "previous__deployment", "actor", "host"
        )
        .defer(*recorded("target", "previous"))
        .filter(pk=activation_id)
        .first()
    )
    if found is None:
        raise NotFound(f"there is no activation {activation_id}")
    return found


def build_log(
    actor: User,
    *,
    build_id: int = 0,
    step_id: int = 0,
    activation_id: int = 0,
    task_id: int = 0,
    after_id: int = 0,
    limit: int = 500,
) -> list[LogChunk]:
    """Log chunks after `after_id`, oldest first: of a build, a step, an activation or a task."""
    require(actor)
    of = {"build": build_id, "step": step_id, "activation": activation_id, "task": task_id}
    given = {whose: pk for whose, pk in of.items() if pk}
    if len(given) != 1:
        raise InvalidInput("name one of build, step, activation and task")
    rows = LogChunk.objects.filter(pk__gt=after_id, **given)
    return list(rows.order_by("pk")[: min(max(1, limit), 5000)])
