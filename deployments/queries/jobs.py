"""Builds, activations, browses and their logs."""

from __future__ import annotations

from typing import Any

from django.db.models import Prefetch

from deployments.models import (
    Activation,
    Browse,
    Build,
    BuildStep,
    LogChunk,
    Role,
    User,
)
from deployments.queries.looking import Page, paged, recorded, require
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


def browse(actor: User, browse_id: int) -> Browse:
    """One look into a hub repository, with its result once it has ended. Raises `NotFound`."""
    require(actor, Role.OPERATOR)
    found = Browse.objects.select_related("actor", "host").filter(pk=browse_id).first()
    if found is None:
        raise NotFound(f"there is no browse {browse_id}")
    return found


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
    after_id: int = 0,
    limit: int = 500,
) -> list[LogChunk]:
    """Log chunks after `after_id`, oldest first: of a whole build, a step, or an activation."""
    require(actor)
    given = [n for n in (build_id, step_id, activation_id) if n]
    if len(given) != 1:
        raise InvalidInput("name one of build, step and activation")
    rows = LogChunk.objects.filter(pk__gt=after_id)
    if build_id:
        rows = rows.filter(build=build_id)
    elif step_id:
        rows = rows.filter(step=step_id)
    else:
        rows = rows.filter(activation=activation_id)
    return list(rows.order_by("pk")[: min(max(1, limit), 5000)])
