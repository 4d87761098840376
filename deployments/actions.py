"""What people ask for: every write of the panel, the API and `mm`.

Each action checks the person's role, writes its rows and one `AuditEvent` in one transaction, and
after the commit hands jobs to the workers, tells the gate, and tells open pages. Every refusal is
an `MmError` in words. Permission checks live here (and in `queries`), so that page, API and
command line cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, Literal

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Max
from django.utils import timezone

from deployments import feed
from deployments.models import (
    Activation,
    ActivationKind,
    AuditEvent,
    Browse,
    Build,
    ClientKey,
    Deployment,
    Generation,
    Host,
    Mark,
    Role,
    Transition,
    User,
    UserToken,
)
from deployments.queue import enqueue_on_commit
from mmadmin.core import access
from mmadmin.core.errors import Conflict, InvalidInput, InvalidSpec, NotFound, Refused
from mmadmin.core.lifecycle import GenerationState, JobState
from mmadmin.core.spec import Spec, parse_spec

ACTIVE_JOB = (JobState.QUEUED, JobState.RUNNING)
MAY_START = (GenerationState.BUILT, GenerationState.RETIRED, GenerationState.FAILED)
ROTATION_OVERLAP = timedelta(days=1)

_address: ContextVar[str | None] = ContextVar("address", default=None)


@contextmanager
def acting_from(address: str | None) -> Iterator[None]:
    """Audit events written inside name this network address."""
    token = _address.set(address or None)
    try:
        yield
    finally:
        _address.reset(token)


def require(actor: User, role: Role) -> None:
    """Raise `Refused` unless the person is active and has at least this role."""
    if not actor.is_active or not actor.at_least(role):
        raise Refused(
            f"{actor.get_username()} may not do this: it takes the role {role.value}",
            remedy="ask an admin",
            role=role.value,
        )


def _audit(actor: User, verb: str, subject: str, summary: str, **details: Any) -> None:
    event = AuditEvent.objects.create(
        actor=actor,
        verb=verb,
        subject=subject,
        summary=summary,
        details=details,
        address=_address.get(),
    )
    transaction.on_commit(lambda: feed.announce("audit", event.pk))


# --- deployments -----------------------------------------------------------------------------


def deploy(actor: User, spec_toml: str, *, reason: str, activate: bool = True) -> Generation:
    """Record the next generation of the deployment that the spec names, and build it.

    Creates the deployment the first time. With `activate` it goes live once it is built.
    """
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
        _queue_build(actor, generation, activate=activate)
        _audit(
            actor,
            "deployment.deploy",
            f"deployment:{deployment.name}",
            f"generation {generation.number} of {deployment.name}: {reason}",
            generation=generation.number,
            activate=activate,
        )
    return generation


def import_generation(
    actor: User, *, spec_toml: str, system: str, reason: str, **recorded: Any
) -> Generation:
    """Record a generation that was built elsewhere and whose objects are in this host's store.

    `recorded` are fields of `Generation` as they were there: lock, graph, host_facts, command,
    template, size_bytes. Creates the deployment the first time; activates nothing.
    """
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
        Transition.objects.create(
            generation=generation, after=GenerationState.BUILT, actor=actor, reason=reason
        )
        _audit(
            actor,
            "deployment.import",
            f"deployment:{deployment.name}",
            f"generation {generation.number} of {deployment.name}: {reason}",
            generation=generation.number,
            system=system,
        )
    return generation


def _deployment_for(actor: User, spec: Spec) -> Deployment:
    """The spec's deployment, created or brought up to date, its row locked."""
    host = _host_for(spec)
    deployment = (
        Deployment.objects.select_for_update(of=("self",))
        .select_related("host", "live")
        .filter(name=spec.name)
        .first()
    )
    taken = Deployment.objects.filter(public_name=spec.public_name).exclude(name=spec.name).first()
    if taken is not None:
        raise Conflict(
            f"the model name {spec.public_name!r} is taken by the deployment {taken.name}",
            remedy="choose another public_name",
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
    deployment.public_name = spec.public_name
    deployment.description = spec.description
    deployment.auto_rollback = spec.activation.auto_rollback
    deployment.keep_generations = spec.keep.generations
    deployment.save(
        update_fields=["public_name", "description", "auto_rollback", "keep_generations"]
    )
    transaction.on_commit(feed.publish_snapshot)
    return deployment


def _host_for(spec: Spec) -> Host:
    """The host that the spec names, or the panel's own."""
    if spec.host in ("", settings.HOST_NAME):
        return Host.objects.get_or_create(name=settings.HOST_NAME)[0]
    host = Host.objects.filter(name=spec.host).first()
    if host is None:
        raise InvalidSpec(
            f'there is no host "{spec.host}"',
            remedy="start its worker once, or leave the field out",
            field="host",
        )
    return host


def _queue_build(actor: User, generation: Generation, *, activate: bool) -> Build:
    build = Build.objects.create(
        deployment=generation.deployment,
        generation=generation,
        spec_toml=generation.spec_toml,
        host=generation.deployment.host,
        actor=actor,
        activate_after=activate,
    )
    enqueue_on_commit(build)
    _announce_build(build)
    return build


def _announce_build(build: Build) -> None:
    name = build.deployment.name if build.deployment else ""
    transaction.on_commit(lambda: feed.announce("build", build.pk, deployment=name, build=build.pk))


def plan(actor: User, spec_toml: str) -> Build:
    """Ask the host's worker what a deploy of this spec would build and fetch; changes nothing."""
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
        enqueue_on_commit(build)
        _announce_build(build)
        _audit(actor, "build.plan", f"deployment:{spec.name}", f"plan of {spec.name}")
    return build


REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REVISION = re.compile(r"[\w./-]{1,255}")


def browse(
    actor: User, repo: str, *, revision: str = "main", options: dict[str, Any] | None = None
) -> Browse:
    """Ask the host's worker what a hub repository offers, and whether it fits."""
    require(actor, Role.OPERATOR)
    repo = repo.strip().removeprefix("https://huggingface.co/").strip("/")
    if not REPO.fullmatch(repo) or len(repo) > 200:  # noqa: PLR2004
        raise InvalidInput(f"{repo!r} is not a repository", remedy="write owner/name", field="repo")
    if not REVISION.fullmatch(revision):
        raise InvalidInput(
            f"{revision!r} is not a revision",
            remedy="write a branch, a tag or a commit",
            field="revision",
        )
    with transaction.atomic():
        host = Host.objects.get_or_create(name=settings.HOST_NAME)[0]
        job = Browse.objects.create(
            repo=repo, revision=revision, options=options, host=host, actor=actor
        )
        enqueue_on_commit(job)
    return job


def retry_build(actor: User, build_id: int) -> Build:
    """Build a failed generation again, as a new build: the failed one stays in the history."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        build = _build(build_id)
        if build.generation is None:
            raise Conflict("a dry run is not repeated", remedy="ask for a new plan")
        if build.generation.builds.filter(state__in=ACTIVE_JOB).exists():
            raise Conflict(f"{build.generation.uid} is being built already")
        if build.generation.state != GenerationState.FAILED or build.generation.system:
            raise Conflict(
                f"{build.generation.uid} is {build.generation.state}: nothing to build again"
            )
        again = _queue_build(actor, build.generation, activate=build.activate_after)
        _audit(
            actor,
            "build.retry",
            f"generation:{build.generation.uid}",
            f"build of {build.generation.uid} again",
            build=again.pk,
        )
    return again


def cancel_build(actor: User, build_id: int) -> Build:
    """Cancel a build: at once when it waits, else its worker ends the whole process group."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        build = _build(build_id)
        now = timezone.now()
        waiting = Build.objects.filter(pk=build.pk, state=JobState.QUEUED).update(
            state=JobState.CANCELLED, cancel_requested_at=now, ended_at=now
        )
        if waiting and build.generation is not None:
            _fail_unbuilt(actor, build.generation, "the build was cancelled before it began")
        elif not waiting and not Build.objects.filter(pk=build.pk, state=JobState.RUNNING).update(
            cancel_requested_at=now
        ):
            raise Conflict(f"build {build.pk} has ended already ({build.state})")
        uid = build.generation.uid if build.generation else ""
        _audit(actor, "build.cancel", f"generation:{uid}", f"cancel of build {build.pk}")
        _announce_build(build)
    build.refresh_from_db()
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


def activate(actor: User, name: str, number: int, *, reason: str = "") -> Activation:
    """Make a built generation live."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        deployment = _locked_deployment(name)
        target = _generation(deployment, number)
        return _queue_activation(actor, deployment, target, ActivationKind.ACTIVATE, reason)


def rollback(actor: User, name: str, *, to: int | None = None, reason: str) -> Activation:
    """Bring an earlier generation back; without `to`, the last one that was live before."""
    require(actor, Role.OPERATOR)
    if not reason.strip():
        raise InvalidInput("a roll-back needs a reason", remedy="say why, for the history")
    with transaction.atomic():
        deployment = _locked_deployment(name)
        target = _generation(deployment, to) if to is not None else rollback_target(deployment)
        if target is None:
            raise Conflict(
                f"{name} has no earlier generation that was live", remedy="name one with --to"
            )
        return _queue_activation(actor, deployment, target, ActivationKind.ROLLBACK, reason)


def rollback_target(deployment: Deployment) -> Generation | None:
    """The generation that a roll-back without a number would bring back."""
    once_live = deployment.generations.filter(
        transitions__after=GenerationState.LIVE, state=GenerationState.RETIRED
    ).exclude(mark=Mark.BAD)
    if deployment.live is not None:
        once_live = once_live.filter(number__lt=deployment.live.number)
    return once_live.order_by("-number").first()


def stop(actor: User, name: str, *, reason: str = "") -> Activation:
    """Take the deployment's live generation down."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        deployment = _locked_deployment(name)
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
        if not target.system or target.state not in MAY_START:
            raise Conflict(
                f"{target.uid} cannot go live: it is {target.state}",
                remedy="wait for its build" if not target.system else "",
            )
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
    _announce_activation(activation)
    what = target.uid if target else deployment.name
    _audit(
        actor,
        f"deployment.{kind.value}",
        f"deployment:{deployment.name}",
        f"{kind.value} {what}: {reason}" if reason else f"{kind.value} {what}",
        generation=target.number if target else None,
        activation=activation.pk,
    )
    return activation


def _announce_activation(activation: Activation) -> None:
    name = activation.deployment.name
    transaction.on_commit(
        lambda: feed.announce(
            "activation", activation.pk, deployment=name, activation=activation.pk
        )
    )


def cancel_activation(actor: User, activation_id: int) -> Activation:
    """Cancel an activation; what was live before stays or comes back."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        activation = (
            Activation.objects.select_related("deployment", "target")
            .filter(pk=activation_id)
            .first()
        )
        if activation is None:
            raise NotFound(f"there is no activation {activation_id}")
        now = timezone.now()
        if not Activation.objects.filter(pk=activation.pk, state=JobState.QUEUED).update(
            state=JobState.CANCELLED, cancel_requested_at=now, ended_at=now
        ) and not Activation.objects.filter(pk=activation.pk, state=JobState.RUNNING).update(
            cancel_requested_at=now
        ):
            raise Conflict(f"activation {activation.pk} has ended already ({activation.state})")
        name = activation.deployment.name
        _audit(
            actor,
            "activation.cancel",
            f"deployment:{name}",
            f"cancel of activation {activation.pk} of {name}",
        )
        _announce_activation(activation)
    activation.refresh_from_db()
    return activation


def pin(actor: User, name: str, number: int, on: bool) -> Generation:  # noqa: FBT001
    """Keep a generation's objects whatever its age (or no longer)."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        generation = _generation(_deployment(name), number)
        Generation.objects.filter(pk=generation.pk).update(pinned=on)
        verb = "pin" if on else "unpin"
        _audit(
            actor, f"generation.{verb}", f"generation:{generation.uid}", f"{verb} {generation.uid}"
        )
        _announce_generation(generation)
    generation.pinned = on
    return generation


def mark(actor: User, name: str, number: int, mark: Literal["good", "bad", ""]) -> Generation:
    """Put a person's word on a generation: good, bad or none."""
    require(actor, Role.OPERATOR)
    if mark not in Mark.values:
        raise InvalidInput(f"{mark!r} is not a mark", remedy='use "good", "bad" or ""')
    with transaction.atomic():
        generation = _generation(_deployment(name), number)
        Generation.objects.filter(pk=generation.pk).update(mark=mark)
        _audit(
            actor,
            "generation.mark",
            f"generation:{generation.uid}",
            f"{generation.uid} is {mark or 'unmarked'}",
            mark=mark,
        )
        _announce_generation(generation)
    generation.mark = mark
    return generation


def _announce_generation(generation: Generation) -> None:
    name = generation.deployment.name
    transaction.on_commit(lambda: feed.announce("generation", generation.pk, deployment=name))


def archive(actor: User, name: str, *, on: bool = True) -> Deployment:
    """Put a deployment that serves nothing out of sight (or take it back)."""
    require(actor, Role.OPERATOR)
    with transaction.atomic():
        deployment = _locked_deployment(name)
        busy = (
            deployment.live_id is not None
            or deployment.activations.filter(state__in=ACTIVE_JOB).exists()
            or deployment.builds.filter(state__in=ACTIVE_JOB).exists()
        )
        if on and busy:
            raise Conflict(f"{name} is in use", remedy="stop it and let its jobs end first")
        deployment.archived_at = timezone.now() if on else None
        deployment.save(update_fields=["archived_at"])
        verb = "archive" if on else "unarchive"
        _audit(actor, f"deployment.{verb}", f"deployment:{name}", f"{verb} {name}")
        transaction.on_commit(feed.publish_snapshot)
        transaction.on_commit(lambda: feed.announce("deployment", deployment.pk, deployment=name))
    return deployment


def configure(
    actor: User,
    name: str,
    *,
    auto_rollback: bool | None = None,
    keep_generations: int | None = None,
    description: str | None = None,
) -> Deployment:
    """Change what is not part of a generation: auto-rollback, how many to keep, description."""
    require(actor, Role.OPERATOR)
    if keep_generations is not None and not 1 <= keep_generations <= 1000:  # noqa: PLR2004
        raise InvalidInput("keep_generations is out of range", remedy="use 1 to 1000")
    changes = {
        field: value
        for field, value in {
            "auto_rollback": auto_rollback,
            "keep_generations": keep_generations,
            "description": description,
        }.items()
        if value is not None
    }
    with transaction.atomic():
        deployment = _locked_deployment(name)
        for field, value in changes.items():
            setattr(deployment, field, value)
        if changes:
            deployment.save(update_fields=list(changes))
            _audit(
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


def _deployment(name: str) -> Deployment:
    deployment = Deployment.objects.select_related("host", "live").filter(name=name).first()
    if deployment is None:
        raise NotFound(f"there is no deployment {name}", remedy="see the list of deployments")
    return deployment


def _locked_deployment(name: str) -> Deployment:
    deployment = (
        Deployment.objects.select_for_update(of=("self",))
        .select_related("host", "live")
        .filter(name=name)
        .first()
    )
    if deployment is None:
        raise NotFound(f"there is no deployment {name}", remedy="see the list of deployments")
    return deployment


def _generation(deployment: Deployment, number: int) -> Generation:
    generation = deployment.generations.select_related("deployment").filter(number=number).first()
    if generation is None:
        raise NotFound(f"{deployment.name} has no generation {number}")
    return generation


def _build(build_id: int) -> Build:
    build = (
        Build.objects.select_related("generation__deployment__host", "deployment", "host")
        .filter(pk=build_id)
        .first()
    )
    if build is None:
        raise NotFound(f"there is no build {build_id}")
    return build


# --- client keys -----------------------------------------------------------------------------

LIMITS = ("rpm", "tpm", "concurrency", "tokens_per_day", "tokens_per_month")
LIMIT_MAX = 2**31 - 1


def issue_key(
    actor: User,
    *,
    owner: str,
    note: str = "",
    deployments: Sequence[str] = (),
    endpoints: Sequence[str] = (),
    rpm: int = 0,
    tpm: int = 0,
    concurrency: int = 0,
    tokens_per_day: int = 0,
    tokens_per_month: int = 0,
    expires_at: datetime | None = None,
) -> tuple[ClientKey, str]:
    """Make a client key; its text is returned this once and kept nowhere."""
    require(actor, Role.ADMIN)
    limits = {
        "rpm": rpm,
        "tpm": tpm,
        "concurrency": concurrency,
        "tokens_per_day": tokens_per_day,
        "tokens_per_month": tokens_per_month,
    }
    _check_key_fields(
        {"owner": owner, "note": note, "deployments": deployments, "expires_at": expires_at}
        | limits
    )
    new = access.new_key(_pepper())
    with transaction.atomic():
        key = ClientKey.objects.create(
            key_id=new.key_id,
            digest=new.digest,
            owner=owner.strip(),
            note=note.strip(),
            deployments=sorted(set(deployments)),
            endpoints=sorted(set(endpoints)),
            expires_at=expires_at,
            created_by=actor,
            **limits,
        )
        _after_key_change(actor, "key.issue", key, f"key {key} for {key.owner}")
    return key, new.text


def _pepper() -> bytes:
    pepper: bytes = settings.KEY_PEPPER
    if not pepper:
        raise Conflict("this installation has no key pepper yet", remedy="run `mm up` first")
    return pepper


def _check_key_fields(fields: dict[str, Any]) -> None:
    if "owner" in fields and not fields["owner"].strip():
        raise InvalidInput("a key needs an owner", remedy="say who will use it", field="owner")
    for field, limit in (("owner", 128), ("note", 255)):
        if len(fields.get(field, "")) > limit:
            raise InvalidInput(f"{field} is longer than {limit} characters", field=field)
    for field in LIMITS:
        if field in fields and not 0 <= fields[field] <= LIMIT_MAX:
            raise InvalidInput(
                f"{field} is out of range", remedy=f"use 0 (no limit) to {LIMIT_MAX}", field=field
            )
    names = set(fields.get("deployments") or ())
    unknown = names - set(Deployment.objects.filter(name__in=names).values_list("name", flat=True))
    if unknown:
        raise InvalidInput(
            f"there is no deployment {', '.join(sorted(unknown))}", field="deployments"
        )
    expires_at = fields.get("expires_at")
    if expires_at is not None and timezone.is_naive(expires_at):
        raise InvalidInput(
            "the expiry has no time zone",
            remedy="write for example …T12:00:00Z",
            field="expires_at",
        )
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidInput("the expiry lies in the past", field="expires_at")


def _after_key_change(actor: User, verb: str, key: ClientKey, summary: str, **details: Any) -> None:
    _audit(actor, verb, f"key:{key.key_id}", summary, **details)
    transaction.on_commit(feed.publish_snapshot)
    transaction.on_commit(lambda: feed.announce("key", key.pk))


def _locked_key(key_id: str) -> ClientKey:
    key = ClientKey.objects.select_for_update().filter(key_id=key_id).first()
    if key is None:
        raise NotFound(f"there is no key {key_id}")
    return key


def revoke_key(actor: User, key_id: str) -> ClientKey:
    """End a key for ever; the gate refuses it at once and cuts its streams."""
    require(actor, Role.ADMIN)
    with transaction.atomic():
        key = _locked_key(key_id)
        if key.revoked_at is None:
            key.revoked_at = timezone.now()
            key.save(update_fields=["revoked_at"])
            _after_key_change(actor, "key.revoke", key, f"key {key} of {key.owner} revoked")
    return key


def suspend_key(actor: User, key_id: str, on: bool) -> ClientKey:  # noqa: FBT001
    """Suspend a key, or let it work again."""
    require(actor, Role.ADMIN)
    with transaction.atomic():
        key = _locked_key(key_id)
        _refuse_revoked(key)
        key.suspended_at = timezone.now() if on else None
        key.save(update_fields=["suspended_at"])
        verb = "suspend" if on else "resume"
        _after_key_change(actor, f"key.{verb}", key, f"{verb} key {key} of {key.owner}")
    return key


def _refuse_revoked(key: ClientKey) -> None:
    if key.revoked_at is not None:
        raise Conflict(f"key {key} is revoked for ever", remedy="issue a new one")


def rotate_key(
    actor: User, key_id: str, *, overlap: timedelta = ROTATION_OVERLAP
) -> tuple[ClientKey, str]:
    """Issue a successor with the same rights; the old key ends after `overlap`."""
    require(actor, Role.ADMIN)
    new = access.new_key(_pepper())
    with transaction.atomic():
        old = _locked_key(key_id)
        _refuse_revoked(old)
        key = ClientKey.objects.create(
            key_id=new.key_id,
            digest=new.digest,
            owner=old.owner,
            note=old.note,
            deployments=old.deployments,
            endpoints=old.endpoints,
            expires_at=old.expires_at,
            rotated_from=old,
            created_by=actor,
            **{field: getattr(old, field) for field in LIMITS},
        )
        ends = timezone.now() + overlap
        if old.expires_at is None or old.expires_at > ends:
            old.expires_at = ends
            old.save(update_fields=["expires_at"])
        _after_key_change(
            actor, "key.rotate", key, f"key {key} follows {old} of {old.owner}", old=old.key_id
        )
    return key, new.text


PLAYGROUND_KEY_LASTS = timedelta(hours=1)
PLAYGROUND_CONCURRENCY = 4


def playground_key(actor: User) -> tuple[ClientKey, str]:
    """A short-lived key for the person's own playground; it ends the one that they had before."""
    require(actor, Role.VIEWER)
    owner = f"playground: {actor.get_username()}"
    now = timezone.now()
    new = access.new_key(_pepper())
    with transaction.atomic():
        ClientKey.objects.filter(
            owner=owner, created_by=actor, revoked_at=None, expires_at__gt=now
        ).update(revoked_at=now)
        key = ClientKey.objects.create(
            key_id=new.key_id,
            digest=new.digest,
            owner=owner,
            note="Playground",
            concurrency=PLAYGROUND_CONCURRENCY,
            expires_at=now + PLAYGROUND_KEY_LASTS,
            created_by=actor,
        )
        _after_key_change(actor, "key.playground", key, f"playground key {key} of {actor}")
    return key, new.text


def edit_key(actor: User, key_id: str, **changes: Any) -> ClientKey:
    """Change owner, note, deployments, endpoints, expires_at or a limit of a key."""
    require(actor, Role.ADMIN)
    editable = {"owner", "note", "deployments", "endpoints", "expires_at", *LIMITS}
    if unknown := set(changes) - editable:
        raise InvalidInput(f"a key has no editable field {', '.join(sorted(unknown))}")
    _check_key_fields(changes)
    with transaction.atomic():
        key = _locked_key(key_id)
        _refuse_revoked(key)
        for field, value in changes.items():
            as_list = field in {"deployments", "endpoints"}
            setattr(key, field, sorted(set(value)) if as_list else value)
        key.save(update_fields=list(changes))
        _after_key_change(
            actor, "key.edit", key, f"key {key}: {', '.join(changes)}", fields=sorted(changes)
        )
    return key


# --- people ----------------------------------------------------------------------------------


def create_user(
    actor: User, *, username: str, password: str, role: Role | str = Role.VIEWER, email: str = ""
) -> User:
    """Add a person."""
    require(actor, Role.ADMIN)
    role = _role(role)
    user = User(username=username, role=role, email=email)
    _check_password(password, user)
    user.set_password(password)
    try:
        user.full_clean(exclude=["password"])
    except ValidationError as error:
        raise InvalidInput(" ".join(error.messages), field="username") from error
    with transaction.atomic():
        user.save()
        _audit(
            actor, "user.create", f"user:{username}", f"{username} is {role.value}", role=role.value
        )
    return user


def _role(role: Role | str) -> Role:
    try:
        return Role(role)
    except ValueError as error:
        raise InvalidInput(
            f"{role!r} is not a role", remedy=f"use {', '.join(Role.values)}", field="role"
        ) from error


def _check_password(password: str, user: User) -> None:
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise InvalidInput(" ".join(error.messages), field="password") from error


def _locked_user(username: str) -> User:
    user = User.objects.select_for_update().filter(username=username).first()
    if user is None:
        raise NotFound(f"there is no user {username}")
    return user


def _keep_one_admin(user: User) -> None:
    others = User.objects.filter(is_active=True, role=Role.ADMIN).exclude(pk=user.pk)
    if user.role == Role.ADMIN and not others.exists():
        raise Conflict(f"{user} is the last admin", remedy="make someone else admin first")


def set_role(actor: User, username: str, role: Role | str) -> User:
    """Change a person's role."""
    require(actor, Role.ADMIN)
    role = _role(role)
    with transaction.atomic():
        user = _locked_user(username)
        if role != Role.ADMIN:
            _keep_one_admin(user)
        user.role = role
        user.is_staff = user.is_superuser = role == Role.ADMIN
        user.save(update_fields=["role", "is_staff", "is_superuser"])
        _audit(
            actor, "user.role", f"user:{username}", f"{username} is {role.value}", role=role.value
        )
    return user


def set_user_active(actor: User, username: str, *, on: bool) -> User:
    """Let a person in, or keep them out; their history stays."""
    require(actor, Role.ADMIN)
    with transaction.atomic():
        user = _locked_user(username)
        if not on:
            _keep_one_admin(user)
        user.is_active = on
        user.save(update_fields=["is_active"])
        verb = "enable" if on else "disable"
        _audit(actor, f"user.{verb}", f"user:{username}", f"{verb} {username}")
    return user


def set_password(actor: User, username: str, password: str) -> User:
    """Set a password: one's own, or anyone's by an admin."""
    if actor.get_username() != username:
        require(actor, Role.ADMIN)
    else:
        require(actor, Role.VIEWER)
    with transaction.atomic():
        user = _locked_user(username)
        _check_password(password, user)
        user.set_password(password)
        user.save(update_fields=["password"])
        _audit(actor, "user.password", f"user:{username}", f"new password of {username}")
    return user


def edit_user(
    actor: User,
    username: str,
    *,
    role: Role | str | None = None,
    active: bool | None = None,
    password: str | None = None,
) -> User:
    """Change several things of a person at once; all of it or nothing."""
    with transaction.atomic():
        if role is not None:
            set_role(actor, username, role)
        if active is not None:
            set_user_active(actor, username, on=active)
        if password is not None:
            set_password(actor, username, password)
        if actor.get_username() != username:
            require(actor, Role.ADMIN)
        return _locked_user(username)


def issue_token(
    actor: User, *, note: str = "", expires_at: datetime | None = None
) -> tuple[UserToken, str]:
    """Make a personal token for the REST API; its text is returned this once."""
    require(actor, Role.VIEWER)
    _check_key_fields({"note": note, "expires_at": expires_at})
    new = access.new_key(_pepper())
    text = TOKEN_PREFIX + new.text.removeprefix("sk-mm-")
    with transaction.atomic():
        token = UserToken.objects.create(
            user=actor,
            token_id=new.key_id,
            digest=access.key_digest(text, _pepper()),
            note=note.strip(),
            expires_at=expires_at,
        )
        _audit(actor, "token.issue", f"token:{token.token_id}", f"token of {actor}")
    return token, text


TOKEN_PREFIX = "pat-mm-"  # noqa: S105
TOKEN_SEEN_EVERY = timedelta(minutes=1)


def token_user(text: str) -> User | None:
    """The person whose personal token this is, while both are valid; notes that it was used."""
    if not text.startswith(TOKEN_PREFIX) or not settings.KEY_PEPPER:
        return None
    token_id = access.parse_key("sk-mm-" + text.removeprefix(TOKEN_PREFIX))
    token = UserToken.objects.select_related("user").filter(token_id=token_id).first()
    if token is None or not access.key_matches(text, token.digest, settings.KEY_PEPPER):
        return None
    now = timezone.now()
    expired = token.expires_at is not None and token.expires_at <= now
    if expired or token.revoked_at is not None or not token.user.is_active:
        return None
    if token.last_used_at is None or token.last_used_at < now - TOKEN_SEEN_EVERY:
        UserToken.objects.filter(pk=token.pk).update(last_used_at=now)
    return token.user


def revoke_token(actor: User, token_id: str) -> UserToken:
    """End a personal token: one's own, or anyone's by an admin."""
    require(actor, Role.VIEWER)
    with transaction.atomic():
        token = UserToken.objects.select_for_update().filter(token_id=token_id).first()
        if token is None or (token.user_id != actor.pk and not actor.at_least(Role.ADMIN)):
            raise NotFound(f"there is no token {token_id}")
        if token.revoked_at is None:
            token.revoked_at = timezone.now()
            token.save(update_fields=["revoked_at"])
            _audit(actor, "token.revoke", f"token:{token_id}", f"token {token_id} revoked")
    return token
