"""What an activation or a roll-back would do, before anybody asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings

from deployments.models import (
    Deployment,
    Generation,
    GenerationReport,
    Replica,
    ReplicaState,
    ReportKind,
    User,
)
from deployments.queries.lookups import deployment_named, no_generation, no_rollback_target
from deployments.queries.paging import recorded, reports_of, require
from mmadmin.core.errors import MmError, NotFound

if TYPE_CHECKING:
    from mmadmin.core.fit.facts import HostFacts
    from mmadmin.core.fit.placement import Footprint, Running
    from mmadmin.core.fit.preview import Load, Preview
    from mmadmin.core.spec.spec import Spec

LOADS_LOOKED_AT = 10
"""How fast a host reads is learned from this many of its newest measured generations."""
RUNS = (ReplicaState.PROBING, ReplicaState.READY, ReplicaState.DRAINING)


@dataclass(frozen=True, slots=True)
class ActivationPreview:
    """What making a generation live would do, as far as the records know."""

    target: Generation
    live: Generation | None
    outcome: Preview
    facts_at: datetime | None
    """When the host reported the facts that this rests on."""
    public_name: str
    """What clients call it afterwards."""
    renames: bool
    """They call the deployment something else now."""


def preview(actor: User, name: str, number: int | None = None) -> ActivationPreview:
    """What activating a generation would do; without a number, a roll-back to the last one.

    Raises `NotFound` when there is no such generation, or none to go back to.
    """
    from mmadmin.core.fit import preview as fit
    from mmadmin.core.spec.spec import ActivationSpec

    require(actor)
    of = deployment_named(name)
    target = _generation(of, number) if number is not None else of.rollback_target()
    if target is None and number is not None:
        raise no_generation(name, number)
    if target is None:
        raise NotFound(**no_rollback_target(of))
    running = list(
        Replica.objects.filter(host=of.host, state__in=RUNS)
        .select_related("generation__deployment", "trial")
        .defer(*recorded("generation"))
    )
    live = of.live if of.live_id is not None else None
    mine = [r for r in running if live is not None and r.generation_id == live.pk]
    reports = reports_of(
        [target.pk, *(replica.generation_id for replica in running)],
        ReportKind.NEEDS,
        ReportKind.PROBES,
    )

    def holds(replica: Replica, facts: HostFacts) -> Running | None:
        held = replica.footprint_by(reports[replica.generation_id].get(ReportKind.NEEDS))
        name = replica.generation.deployment.name
        return held.running(name, replica.pid, facts) if held else None

    facts = _facts(of)
    spec = _spec(target)
    wanted = spec.activation if spec else ActivationSpec()
    public_name = spec.public_name if spec else of.public_name
    taken = Deployment.called(public_name, but=name)
    situation = fit.Situation(
        target=target.uid,
        needs=_footprints(reports[target.pk].get(ReportKind.NEEDS), spec, facts),
        mode=wanted.mode,
        load=_load(target, of, reports[target.pk].get(ReportKind.PROBES)),
        drain_s=wanted.drain_timeout_s,
        facts=facts,
        live=mine[0].generation.uid if mine else "",
        leaving=next((r for m in mine if facts and (r := holds(m, facts))), None),
        others=[
            held
            for r in running
            if facts
            and r.trial_id is None
            and r.generation.deployment_id != of.pk
            and (held := holds(r, facts))
        ],
        trials=[
            replace(held, name=r.generation.uid)
            for r in running
            if facts and r.trial_id is not None and (held := holds(r, facts))
        ],
        tried=any(
            r.trial is not None and r.trial.asleep and r.generation_id == target.pk for r in running
        ),
        missing=_missing(target, of),
        name=public_name,
        namesake=taken.name if taken else "",
    )
    return ActivationPreview(
        target=target,
        live=live,
        outcome=fit.preview(situation),
        facts_at=of.host.seen_at,
        public_name=public_name,
        renames=public_name != of.public_name,
    )


def _facts(of: Deployment) -> HostFacts | None:
    """What its host reported; None when it did not, or an earlier version did in another form."""
    from mmadmin.core.fit.facts import host_facts_from_json

    try:
        return host_facts_from_json(of.host.facts) if of.host.facts else None
    except (TypeError, KeyError):
        return None


def _generation(of: Deployment, number: int) -> Generation | None:
    return of.generations.select_related("deployment").filter(number=number).first()


def _spec(target: Generation) -> Spec | None:
    from mmadmin.core.spec.spec import parse_spec

    try:
        return parse_spec(target.spec_toml)
    except MmError:  # written for a later or an earlier version: the preflight says so
        return None


def _footprints(needs: Any, spec: Spec | None, facts: HostFacts | None) -> Sequence[Footprint]:
    """What it holds on each set of GPUs that it could sit on."""
    from mmadmin.core.fit.placement import everywhere, footprints_from_json

    if not needs:
        return ()
    known = footprints_from_json(needs)
    return known if facts is None or (spec and spec.devices) else everywhere(known, facts)


def _load(target: Generation, of: Deployment, probes: Any) -> Load:
    """Its own measured time; else its size at the speed with which its host loads others."""
    from mmadmin.core.fit.preview import load_time

    measured = (
        GenerationReport.objects.filter(
            kind=ReportKind.PROBES,
            generation__deployment__host=of.host,
            generation__size_bytes__gt=0,
        )
        .order_by("-generation")
        .values_list("generation__size_bytes", "data")[:LOADS_LOOKED_AT]
    )
    speeds = [
        size / took.seconds
        for size, report in measured
        if (took := load_time(report, 0)).measured and took.seconds > 0
    ]
    return load_time(probes, target.size_bytes, _middle(speeds))


def _middle(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _missing(target: Generation, of: Deployment) -> tuple[str, ...] | None:
    """Objects that it needs and the store lacks; None for another host's store."""
    from mmadmin.core.store import Store

    if of.host.name != settings.HOST_NAME:
        return None
    if not target.system:
        return ("its system",)
    lost = Store(settings.HOME.store).lost_reference(target.system)
    return (lost,) if lost is not None else ()
