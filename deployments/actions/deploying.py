"""New generations: deploy, plan, import, and the builds that make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Max
from django.utils import timezone

from deployments.actions.lookups import locked_deployment
from deployments.actions.permissions import audit, require
from deployments.broker import feed
from deployments.broker.queue import enqueue_on_commit
from deployments.models import (
    Build,
    Deployment,
    Generation,
    GenerationReport,
    Host,
    ReportKind,
    Role,
    Transition,
    User,
)
from deployments.queries.lookups import generation_of
from mmadmin.core.errors import Conflict, InvalidSpec, NotFound
from mmadmin.core.generations.lifecycle import GenerationState, JobState

if TYPE_CHECKING:
    from mmadmin.core.spec.spec import Spec


def deploy(
    actor: User, spec_toml: str, *, reason: str, activate: bool = True, on_host: bool = False
) -> Generation:
    """Record the next generation of the deployment that the spec names, and build it.

    Creates the deployment the first time. With `activate` it goes live once it is built. `on_host`
    says that `mm` asks, as the user that mmadmin runs as. Raises `SourceRefused` for what the
    policy does not let them take; the worker checks it again.
    """
    from mmadmin.core.spec.spec import parse_spec

    require(actor, Role.OPERATOR)
    spec = parse_spec(spec_toml)
    with transaction.atomic():
        deployment = _deployment_for(actor, spec)
        newest = deployment.generations.aggregate(newest=Max("number"))["newest"] or 0
        parent = deployment.live or deployment.generations.order_by("-number").first()
        try:
            with transaction.atomic():
                generation = Generation.objects.create(
                    deployment=deployment,
                    number=newest + 1,
                    parent=parent,
                    spec_toml=spec_toml,
                    author=actor,
                    reason=reason,
                )
        except IntegrityError as error:
            raise Conflict(
                f"{deployment.name} got another generation at the same moment", remedy="try again"
            ) from error
        Transition.objects.create(
            generation=generation, after=GenerationState.PLANNED, actor=actor, reason=reason
        )
        build = _queue_build(actor, generation, activate=activate, on_host=on_host)
        build.access.check_spec(spec)
        audit(
            actor,
            "deployment.deploy",
            f"deployment:{deployment.name}",
            f"generation {generation.number} of {deployment.name}: {reason}",
            generation=generation.number,
            activate=activate,
        )
    return generation


OF_A_MACHINE = frozenset({ReportKind.NEEDS, ReportKind.PROBES})
"""Reports that an import leaves behind: predicted and measured for the machine it came from."""


def import_generation(
    actor: User,
    *,
    spec_toml: str,
    system: str,
    reason: str,
    reports: Mapping[str, Any],
    **recorded: Any,
) -> Generation:
    """Record a generation that was built elsewhere and whose objects are in this host's store.

    `recorded` are fields of `Generation` as they were there: lock, graph, host_facts, size_bytes.
    `reports` may hold more than reports: those of a known kind that say nothing of the machine
    are taken over. Creates the deployment the first time; activates nothing.
    """
    from mmadmin.core.spec.spec import parse_spec

    require(actor, Role.OPERATOR)
    spec = parse_spec(spec_toml)
    with transaction.atomic():
        deployment = _deployment_for(actor, spec)
        newest = deployment.generations.aggregate(newest=Max("number"))["newest"] or 0
        generation = Generation.objects.create(
            deployment=deployment,
            number=newest + 1,
            parent=deployment.live or deployment.generations.order_by("-number").first(),
            spec_toml=spec_toml,
            author=actor,
            reason=reason,
            state=GenerationState.BUILT,
            system=system,
            built_at=timezone.now(),
            **recorded,
        )
        GenerationReport.objects.bulk_create(
            GenerationReport(generation=generation, kind=kind, data=reports[kind], made_by="import")
            for kind in ReportKind
            if kind not in OF_A_MACHINE and reports.get(kind) is not None
        )
        Transition.objects.create(
            generation=generation, after=GenerationState.BUILT, actor=actor, reason=reason
        )
        audit(
            actor,
            "deployment.import",
            f"deployment:{deployment.name}",
            f"generation {generation.number} of {deployment.name}: {reason}",
            generation=generation.number,
            system=system,
        )
    return generation


def _deployment_for(actor: User, spec: Spec) -> Deployment:
    """The spec's deployment, created or brought up to date, its row locked.

    What clients call it changes when the generation goes live; until one has, at once.
    """
    host = _host_for(spec)
    deployment = (
        Deployment.objects.select_for_update(of=("self",))
        .select_related("host", "live")
        .filter(name=spec.name)
        .first()
    )
    taken = Deployment.called(spec.public_name, but=spec.name)
    if taken is not None:
        raise Conflict(
            f"the model name {spec.public_name!r} is taken by the deployment {taken.name}",
            remedy=f"choose another public_name, or stop {taken.name} if nobody needs it",
        )
    if deployment is None:
        try:
            with transaction.atomic():
                return Deployment.objects.create(
                    name=spec.name,
                    public_name=spec.public_name,
                    description=spec.description,
                    host=host,
                    created_by=actor,
                    auto_rollback=spec.activation.auto_rollback,
                    keep_generations=spec.keep.generations,
                    keep_days=spec.keep.days,
                )
        except IntegrityError as error:
            raise Conflict(
                f"the deployment {spec.name} was created by someone else at the same moment",
                remedy="try again",
            ) from error
    if deployment.archived_at is not None:
        raise Conflict(f"{deployment.name} is archived", remedy="take it out of the archive first")
    if spec.host and spec.host != deployment.host.name:
        raise Conflict(
            f"{deployment.name} lives on the host {deployment.host}",
            remedy="deploy it under another name to serve it from another host",
        )
    if not Transition.objects.filter(
        generation__deployment=deployment, after=GenerationState.LIVE
    ).exists():  # no client knows it yet
        deployment.public_name = spec.public_name
        transaction.on_commit(feed.publish_snapshot)
    deployment.description = spec.description
    deployment.auto_rollback = spec.activation.auto_rollback
    deployment.keep_generations = spec.keep.generations
    deployment.keep_days = spec.keep.days
    deployment.save(
        update_fields=[
            "public_name",
            "description",
            "auto_rollback",
            "keep_generations",
            "keep_days",
        ]
    )
    return deployment


def _host_for(spec: Spec) -> Host:
    """The host that the spec names, or the panel's own."""
    if spec.host not in ("", settings.HOST_NAME):
        raise InvalidSpec(
            f'the gate has no address of the host "{spec.host}"; engines run on its own machine',
            remedy=f'leave the field out, or write "{settings.HOST_NAME}"',
            field="host",
        )
    return Host.objects.get_or_create(name=settings.HOST_NAME)[0]


def _queue_build(actor: User, generation: Generation, *, activate: bool, on_host: bool) -> Build:
    """`mm` of another host than the one that builds cannot read that one's files anyway."""
    build = Build.objects.create(
        deployment=generation.deployment,
        generation=generation,
        spec_toml=generation.spec_toml,
        host=generation.deployment.host,
        actor=actor,
        activate_after=activate,
        on_host=on_host and generation.deployment.host.name == settings.HOST_NAME,
    )
    enqueue_on_commit(build)
    feed.announce_job(build)
    return build


def plan(actor: User, spec_toml: str) -> Build:
    """Ask the host's worker what a deploy of this spec would build and fetch; changes nothing."""
    from mmadmin.core.spec.spec import parse_spec

    require(actor, Role.OPERATOR)
    spec = parse_spec(spec_toml)
    with transaction.atomic():
        host = _host_for(spec)
        build = Build.objects.create(
            deployment=Deployment.objects.filter(name=spec.name).first(),
            spec_toml=spec_toml,
            dry_run=True,
            host=host,
            actor=actor,
        )
        build.access.check_spec(spec)
        enqueue_on_commit(build)
        feed.announce_job(build)
        audit(actor, "build.plan", f"deployment:{spec.name}", f"plan of {spec.name}")
    return build


def retry_build(actor: User, build_id: int) -> Build:
    """Build a failed generation again, as a new build: the failed one stays in the history."""
    from mmadmin.core.spec.spec import parse_spec

    require(actor, Role.OPERATOR)
    with transaction.atomic():
        build = _build(build_id)
        if build.generation is None:
            raise Conflict("a dry run is not repeated", remedy="ask for a new plan")
        if build.generation.builds.active().exists():
            raise Conflict(f"{build.generation.uid} is being built already")
        if build.generation.state != GenerationState.FAILED or build.generation.system:
            raise Conflict(
                f"{build.generation.uid} is {build.generation.state}: nothing to build again"
            )
        again = _queue_build(
            actor, build.generation, activate=build.activate_after, on_host=build.on_host
        )
        again.access.check_spec(parse_spec(again.spec_toml))
        audit(
            actor,
            "build.retry",
            f"generation:{build.generation.uid}",
            f"build of {build.generation.uid} again",
            build=again.pk,
        )
    return again


def rebuild(actor: User, name: str, number: int, *, on_host: bool = False) -> Build:
    """Make a generation's objects again from its own record, to the same hashes.

    For one whose objects were let go, or were damaged. Its state does not change. What `mm` on the
    host deployed may be fetched again by everybody who may rebuild: its bytes are pinned.
    """
    from mmadmin.core.spec.spec import parse_spec

    require(actor, Role.OPERATOR)
    with transaction.atomic():
        generation = generation_of(locked_deployment(name), number)
        if not generation.system or generation.graph is None:
            raise Conflict(
                f"{generation.uid} was never built",
                remedy="build it again on its build's page, or deploy its file again",
                command="mm deploy FILE",
            )
        if generation.builds.active().exists():
            raise Conflict(f"{generation.uid} is being built already")
        on_host = on_host or generation.builds.filter(on_host=True).exists()
        build = _queue_build(actor, generation, activate=False, on_host=on_host)
        build.access.check_spec(parse_spec(generation.spec_toml))
        audit(
            actor,
            "build.again",
            f"generation:{generation.uid}",
            f"objects of {generation.uid} again",
            build=build.pk,
        )
    return build


def cancel_build(actor: User, build_id: int) -> Build:
    """Cancel a build: at once when it waits, else its worker ends the whole process group."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        build = _build(build_id)
        if not build.cancel():
            raise Conflict(f"build {build.pk} has ended already ({build.state})")
        if build.state == JobState.CANCELLED and build.generation is not None:
            _fail_unbuilt(actor, build.generation, "the build was cancelled before it began")
        uid = build.generation.uid if build.generation else ""
        audit(actor, "build.cancel", f"generation:{uid}", f"cancel of build {build.pk}")
        feed.announce_job(build)
    return build


def _fail_unbuilt(actor: User, generation: Generation, reason: str) -> None:
    before = generation.state
    changed = Generation.objects.filter(
        pk=generation.pk, state__in=[GenerationState.PLANNED, GenerationState.BUILDING]
    ).update(state=GenerationState.FAILED, state_reason=reason, changed_at=timezone.now())
    if changed:
        Transition.objects.create(
            generation=generation,
            before=before,
            after=GenerationState.FAILED,
            actor=actor,
            reason=reason,
        )


def _build(build_id: int) -> Build:
    build = (
        Build.objects.select_related("generation__deployment__host", "deployment", "host")
        .filter(pk=build_id)
        .first()
    )
    if build is None:
        raise NotFound(f"there is no build {build_id}")
    return build
