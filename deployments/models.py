"""The records. The store on disk is the truth about bytes; these rows are about intent and history.

State changes go by compare-and-set (see `deployments.jobs`), never by `save()` of a stale row.
Rows of history (transitions, audit events, log chunks, usage) are written once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.contrib.sessions.base_session import AbstractBaseSession
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.module_loading import import_string

from mmadmin.core.generations.activation import Position, may_cancel, resumed
from mmadmin.core.generations.lifecycle import (
    ACTIVE_JOB,
    GenerationState,
    JobState,
    may_become,
    waiting_message,
)
from mmadmin.core.generations.trial import END, MINUTES, Phase, TrialStatus, status_of
from mmadmin.core.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from mmadmin.core.fit.placement import Footprint
    from mmadmin.core.source_policy import Access, Rule, SourcePolicy


class Role(models.TextChoices):
    """What a person may do: viewers look, operators change what is served, admins all."""

    ADMIN = "admin"
    OPERATOR = "operator"
    VIEWER = "viewer"


class User(AbstractUser):
    """A person of the panel."""

    role = models.CharField(max_length=16, choices=Role.choices, default=Role.VIEWER)
    oidc_subject = models.CharField(max_length=512, unique=True, null=True, editable=False)  # noqa: DJ001 (null = has a password)
    """Who they are at the identity provider: `issuer#subject`."""

    second_factor_key = models.CharField(max_length=64, blank=True, editable=False)
    """Hex key of the person's authenticator app (TOTP, RFC 6238)."""
    second_factor_at = models.DateTimeField(null=True, editable=False)
    """Since when logins by password ask for a code; null = they do not."""
    second_factor_step = models.BigIntegerField(default=0, editable=False)
    """The time step of the last code that was used: no code works twice."""
    first_steps_closed_at = models.DateTimeField(null=True, editable=False)
    """Since when the overview no longer lists what a new installation needs; null = it does."""
    scopes: frozenset[str] | None = None
    """Those of the token that asks; None = the person does. Never stored."""

    def at_least(self, role: Role) -> bool:
        """True when this person's role includes `role`."""
        order = [Role.VIEWER, Role.OPERATOR, Role.ADMIN]
        return order.index(self.role_now) >= order.index(role)

    @property
    def role_now(self) -> Role:
        """The role that counts."""
        return Role.ADMIN if self.is_superuser else Role(self.role)

    def in_scope(self, scope: Scope) -> bool:
        """True unless a token asks that was not made for this."""
        if self.scopes is None:
            return True
        return bool(self.scopes & {scope, Scope.ADMIN}) or scope == Scope.READ


AWAY_AFTER = timedelta(minutes=3)
"""A worker reports every minute."""


class Host(models.Model):
    """A machine with a store, a supervisor and its own Celery worker."""

    name = models.SlugField(max_length=63, unique=True)
    facts = models.JSONField(default=dict, blank=True)
    """What the host's worker last reported: CPU, memory, GPUs, toolchain, disk."""
    seen_at = models.DateTimeField(null=True, blank=True)
    """When its worker reported last."""
    holder = models.CharField(max_length=128, blank=True)
    """Which machine and `MM_HOME` works under this name; empty = nobody does."""
    holder_place = models.CharField(max_length=255, blank=True)
    """The same for people: machine and folder."""
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    def __str__(self) -> str:
        return self.name

    @property
    def is_away(self) -> bool:
        """True when its worker has not reported for a while; one that never did is new."""
        return self.seen_at is not None and timezone.now() - self.seen_at > AWAY_AFTER

    @property
    def queue(self) -> str:
        """The Celery queue that this host's worker reads."""
        return f"host.{self.name}"


class Deployment(models.Model):
    """Something that is served under a public name; its generations are its history."""

    name = models.CharField(max_length=63, unique=True)
    public_name = models.CharField(max_length=128)
    """The model name that clients send: that of the generation which went live last, or, until one
    has, of the newest. It belongs to whoever is live: no two of those have the same."""
    description = models.TextField(blank=True)
    host = models.ForeignKey(Host, on_delete=models.PROTECT, related_name="deployments")
    live = models.ForeignKey(
        "Generation", on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    """The generation that the gate routes to."""
    hold_until = models.DateTimeField(null=True, blank=True)
    """The gate holds new requests until then (a swap is under way)."""
    auto_rollback = models.BooleanField(default=True)
    keep_generations = models.PositiveIntegerField(default=5)
    keep_days = models.PositiveIntegerField(default=30)
    """A generation that was live within this time stays in the store too."""
    archived_at = models.DateTimeField(null=True, blank=True)
    created_by = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar[list[str]] = ["name"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(
                fields=["public_name"],
                condition=Q(live__isnull=False),
                name="one_live_deployment_a_model_name",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @classmethod
    def called(cls, public_name: str, *, but: str) -> Deployment | None:
        """The live deployment that clients call so, if it is another one than `but`."""
        named = cls.objects.filter(public_name=public_name, live__isnull=False)
        return named.exclude(name=but).first()

    def rollback_target(self) -> Generation | None:
        """What a roll-back without a number brings back: the last that was live and is not bad.

        One that failed to start since then is tried again where there is no other.
        """
        once_live = self.generations.filter(transitions__after=GenerationState.LIVE).exclude(
            mark=Mark.BAD
        )
        if self.live is not None:
            once_live = once_live.filter(number__lt=self.live.number)
        newest = once_live.order_by("-number")
        return (
            newest.filter(state=GenerationState.RETIRED).first()
            or newest.filter(state=GenerationState.FAILED).first()
        )


class Mark(models.TextChoices):
    """A person's word on a generation."""

    NONE = ""
    GOOD = "good"
    BAD = "bad"


class Generation(models.Model):
    """One numbered, immutable state of a deployment: spec + lock + system + author + reason."""

    deployment = models.ForeignKey(Deployment, on_delete=models.PROTECT, related_name="generations")
    number = models.PositiveIntegerField()
    parent = models.ForeignKey(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    spec_toml = models.TextField()
    lock = models.JSONField(null=True, blank=True)
    graph = models.JSONField(null=True, blank=True)
    """The derivations of its closure, as data (`mmadmin.core.build.derivation.graph_to_json`)."""
    system = models.CharField(max_length=255, blank=True)
    """Name of the system object in the host's store, once built."""
    state = models.CharField(
        max_length=16,
        choices=[(s.value, s.value) for s in GenerationState],
        default=GenerationState.PLANNED,
    )
    state_reason = models.TextField(blank=True)
    """Why it failed, with a remedy."""
    author = models.ForeignKey(User, on_delete=models.PROTECT, related_name="+")
    reason = models.TextField(blank=True)
    pinned = models.BooleanField(default=False)
    mark = models.CharField(max_length=8, choices=Mark.choices, blank=True, default=Mark.NONE)
    host_facts = models.JSONField(null=True, blank=True)
    """The host's facts when it was built."""
    size_bytes = models.BigIntegerField(default=0)
    """Of its closure: every object that it needs at run time."""
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    changed_at = models.DateTimeField(default=timezone.now)
    built_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-number"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(fields=["deployment", "number"], name="generation_number"),
        ]

    def __str__(self) -> str:
        return self.uid

    @property
    def uid(self) -> str:
        """`<deployment>/<number>`: the `x-mm-generation` header."""
        return f"{self.deployment.name}/{self.number}"

    def report(self, kind: ReportKind) -> Any:
        """The data of its report of that kind; None = it was not made."""
        found = self.reports.filter(kind=kind).first()
        return None if found is None else found.content

    @property
    def public_name(self) -> str:
        """The model name that clients send while it is live. Raises `InvalidSpec`."""
        from mmadmin.core.spec.spec import parse_spec

        return parse_spec(self.spec_toml).public_name


class ReportKind(models.TextChoices):
    """What is reported of a generation; also its name in exported histories and bundles."""

    COMMAND = "command"
    """The engine's argv in a seat that says nothing, for comparing generations."""
    TEMPLATE = "template"
    """The text of the chat template that it is served with; empty = the model has none."""
    RENDERING = "rendering"
    """What its patches change: `rendering.json` of the patched template."""
    RENDERS = "renders"
    """What its template makes of each conversation of the matrix, in the sandbox:
    `{name: {"output"} | {"error"}}`."""
    MODEL = "model_report"
    """What the model says about itself: the report of its format."""
    NEEDS = "needs"
    """The memory that its engine was predicted to hold (`core.fit.placement.Footprint`)."""
    PROBES = "probe_report"
    """What its engine showed when it was started (`mmadmin.host.probe`)."""


REPORT_FILE = "report.json"
"""The file of a store object that holds a large report."""


class GenerationReport(models.Model):
    """Something that was found out about a generation, newest of its kind."""

    generation = models.ForeignKey(Generation, on_delete=models.CASCADE, related_name="reports")
    kind = models.CharField(max_length=32, choices=ReportKind.choices)
    format = models.PositiveSmallIntegerField(default=1)
    """Of the data; raised when a kind's data change their shape."""
    data = models.JSONField(null=True, blank=True)
    """Null where it is large: then the store has it."""
    object_name = models.CharField(max_length=255, blank=True)
    """Of the object in the store of the deployment's host that holds large data."""
    made_by = models.CharField(max_length=64)
    """`build 7`, `activation 3`, `import`, …"""
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(fields=["generation", "kind"], name="one_report_a_kind"),
        ]

    @property
    def content(self) -> Any:
        """Its data; None where they lie in the store of another host, or are gone from it."""
        if not self.object_name:
            return self.data
        from mmadmin.core.store import Store

        path = Store(settings.HOME.store).object_path(self.object_name) / REPORT_FILE
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None


class Transition(models.Model):
    """One state change of a generation, with who and why: history, never edited."""

    generation = models.ForeignKey(Generation, on_delete=models.CASCADE, related_name="transitions")
    before = models.CharField(max_length=16, blank=True)
    after = models.CharField(max_length=16)
    actor = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    reason = models.TextField(blank=True)
    at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar[list[str]] = ["at", "id"]


@dataclass(frozen=True, slots=True)
class Follows:
    """What becomes of a generation whose job did not succeed."""

    generation_id: int
    after: GenerationState
    only_from: tuple[GenerationState, ...]
    actor_id: int | None = None


AnyRow = TypeVar("AnyRow", bound=models.Model)


class JobRows(models.QuerySet[AnyRow], Generic[AnyRow]):
    """Jobs, whose states change by compare-and-set over one table of legal moves."""

    def active(self) -> JobRows[AnyRow]:
        """Those that have not ended."""
        return self.filter(state__in=ACTIVE_JOB)

    def move(self, after: JobState, **values: Any) -> int:
        """Move those of the rows that may become `after`; returns how many did."""
        return self.filter(state__in=may_become(after)).update(state=after, **values)


class Job(models.Model):
    """Work that a host's worker does once: lease + fencing token, capped attempts, cancel.

    A worker claims by compare-and-set, extends `lease_expires_at` while it works, and guards each
    write with its `fence`. A sweeper enqueues again what nobody holds.

    What differs between the kinds of jobs are the attributes and methods below, so that lease,
    recorder, queue and sweeper treat all of them alike.
    """

    noun: ClassVar[str]
    """What people, pages and the task queue call it."""
    has_log: ClassVar[bool] = True
    """Its lines are kept (`LogChunk.<noun>`); else they go to the worker's log."""

    state = models.CharField(
        max_length=16, choices=[(s.value, s.value) for s in JobState], default=JobState.QUEUED
    )
    host = models.ForeignKey(Host, on_delete=models.PROTECT, related_name="+")
    actor = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    """Who asked; null = mmadmin itself (auto-rollback)."""
    fence = models.PositiveIntegerField(default=0)
    holder = models.CharField(max_length=128, blank=True)
    """`<machine>:<pid>:<start time>` of the process that holds the lease."""
    lease_expires_at = models.DateTimeField(null=True, blank=True)
    attempts = models.PositiveIntegerField(default=0)
    max_attempts = models.PositiveIntegerField(default=3)
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    error = models.JSONField(null=True, blank=True)
    """`MmError.as_json()` of how it ended, when it failed."""
    enqueued_at = models.DateTimeField(null=True, blank=True)
    """When the broker last took it; null = it never did, so the sweeper will try."""
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    objects = JobRows.as_manager()

    class Meta:
        abstract = True

    @property
    def active(self) -> bool:
        """True while it waits or works."""
        return self.state in ACTIVE_JOB

    @property
    def waits(self) -> bool:
        """True while it should not be claimed although nobody holds it."""
        return False

    @property
    def deployment_name(self) -> str:
        """The deployment that it is about; empty = none."""
        return ""

    def cancel(self) -> bool:
        """Ask for its end: one that waits ends now, one that runs at its worker's next step.

        By compare-and-set; False when it had ended already.
        """
        now = timezone.now()
        row = type(self).objects.filter(pk=self.pk)
        waiting = row.filter(state=JobState.QUEUED)
        asked = waiting.move(JobState.CANCELLED, cancel_requested_at=now, ended_at=now) or (
            row.filter(state=JobState.RUNNING).update(cancel_requested_at=now)
        )
        self.refresh_from_db()
        return bool(asked)

    def note_progress(self, step_id: int, done: int, total: int, unit: str) -> None:
        """Write how far a step of it is; part of the worker's fenced transaction."""
        raise NotImplementedError

    def fell_asleep(self) -> None:
        """It rests now, queued: a request to end it that came in this moment must wake it."""

    def broke_off(self, error: dict[str, Any] | None) -> Sequence[Follows]:  # noqa: ARG002
        """It ended without success: end the rows that depend on it, say what else follows."""
        return ()


class Build(Job):
    """Locks, plans and realises a generation's system; or only plans (`dry_run`)."""

    noun = "build"

    deployment = models.ForeignKey(
        Deployment, on_delete=models.CASCADE, null=True, blank=True, related_name="builds"
    )
    generation = models.ForeignKey(
        Generation, on_delete=models.CASCADE, null=True, blank=True, related_name="builds"
    )
    """None for a dry run."""
    spec_toml = models.TextField()
    dry_run = models.BooleanField(default=False)
    plan = models.JSONField(null=True, blank=True)
    """`Plan.as_json()`: steps with state and reason, bytes to fetch."""
    activate_after = models.BooleanField(default=False)
    on_host = models.BooleanField(default=False)
    """Asked by `mm` on the host that builds, as the user that mmadmin runs as."""
    phase = models.CharField(max_length=16, blank=True)
    """locking, planning, building, waiting (another build makes a step of it): what it does now."""

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["state", "lease_expires_at"], name="build_due"),
        ]

    @property
    def waits(self) -> bool:
        """True while other builds take all the places of its host."""
        return self.crowded_out_by() > 0

    @property
    def deployment_name(self) -> str:
        """The deployment that it is about; empty for a plan of one that does not exist yet."""
        return self.deployment.name if self.deployment else ""

    @property
    def access(self) -> Access:
        """What it may take from where: by the policy as it is now, and by who asked."""
        from mmadmin.core.source_policy import Access

        by_admin = self.actor is not None and self.actor.at_least(Role.ADMIN)
        return Access(PolicyRule.policy(), on_host=self.on_host, by_admin=by_admin)

    def note_progress(self, step_id: int, done: int, total: int, unit: str) -> None:
        """Write how far a step is."""
        BuildStep.objects.filter(pk=step_id, build=self.pk).update(
            progress_done=done, progress_total=total, progress_unit=unit[:32]
        )

    def broke_off(self, error: dict[str, Any] | None) -> Sequence[Follows]:
        """Its open steps end, and so does the making of its generation."""
        cancelled = self.state == JobState.CANCELLED
        begun = Q(state=StepState.RUNNING) | ~Q(waits_for="")
        BuildStep.objects.filter(begun, build=self).update(
            state=StepState.CANCELLED if cancelled else StepState.FAILED,
            waits_for="",
            error=error,
            ended_at=timezone.now(),
        )
        if self.generation_id is None:
            return ()
        unbuilt = (GenerationState.PLANNED, GenerationState.BUILDING)
        actor_id = self.actor_id if cancelled else None
        return [Follows(self.generation_id, GenerationState.FAILED, unbuilt, actor_id)]

    def crowded_out_by(self) -> int:
        """How many builds take all the places of its host; 0 = one is free for it.

        A plan takes none and needs none.
        """
        if self.dry_run:
            return 0
        others = Build.objects.filter(
            host=self.host_id,
            dry_run=False,
            state=JobState.RUNNING,
            lease_expires_at__gt=timezone.now(),
        ).exclude(pk=self.pk)
        many = others.count()
        return many if many >= settings.BUILDS_AT_ONCE else 0


class TaskKind(models.TextChoices):
    """What a host's worker does when it is asked to (`deployments.jobs.host_tasks`)."""

    HUB_SEARCH = "hub-search"
    """Which models a repository of the hub has, and whether they fit here."""
    STORE_PREVIEW = "store-preview"
    """What a collection of the store would free; frees nothing."""
    STORE_COLLECT = "store-collect"
    STORE_VERIFY = "store-verify"
    """Every path of every object is as it was sealed."""
    STORE_VERIFY_CONTENTS = "store-verify-contents"
    """And every file has its digest: reads all of the store."""
    DOCTOR = "doctor"
    DESCRIBE = "describe"
    """The reports of a built generation are made again."""


class HostTask(Job):
    """A small piece of work on a host: what its kind says, with `params`, leaving a `result`."""

    noun = "task"

    kind = models.CharField(max_length=32, choices=TaskKind.choices)
    generation = models.ForeignKey(
        "Generation", on_delete=models.CASCADE, null=True, blank=True, related_name="tasks"
    )
    """What it is about; null = the host itself."""
    params = models.JSONField(default=dict, blank=True)
    progress_done = models.BigIntegerField(default=0)
    progress_total = models.BigIntegerField(default=0)
    """Bytes read and to be read; 0 = it does not count."""
    result = models.JSONField(null=True, blank=True)
    max_attempts = models.PositiveIntegerField(default=2)

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["host", "kind", "-id"], name="host_task_newest"),
        ]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(
                fields=["host", "kind"],
                condition=Q(state__in=ACTIVE_JOB, generation__isnull=True)
                & ~Q(kind=TaskKind.HUB_SEARCH),
                name="one_host_task_of_a_kind",
            ),
        ]

    @property
    def deployment_name(self) -> str:
        """The deployment that it is about; empty = the host itself."""
        return self.generation.deployment.name if self.generation else ""

    def note_progress(self, step_id: int, done: int, total: int, unit: str) -> None:  # noqa: ARG002
        """Write how far it is: it has one step, which counts bytes."""
        HostTask.objects.filter(pk=self.pk).update(progress_done=done, progress_total=total)


class StepState(models.TextChoices):
    """Where a build step is."""

    WAITING = "waiting"
    CACHED = "cached"
    SUBSTITUTED = "substituted"
    RUNNING = "running"
    BUILT = "built"
    FAILED = "failed"
    CANCELLED = "cancelled"


class BuildStep(models.Model):
    """One derivation of a build."""

    build = models.ForeignKey(Build, on_delete=models.CASCADE, related_name="steps")
    position = models.PositiveIntegerField()
    derivation = models.CharField(max_length=64)
    """Digest."""
    name = models.CharField(max_length=255)
    recipe = models.CharField(max_length=64)
    inputs = models.JSONField(default=list)
    """Digests of the derivations that it needs."""
    state = models.CharField(max_length=16, choices=StepState.choices, default=StepState.WAITING)
    why = models.TextField(blank=True)
    """Why it is cached or must be built."""
    waits_for = models.CharField(max_length=200, blank=True)
    """Who makes the same step now; its result will be taken. Empty = it does not wait."""
    output = models.CharField(max_length=255, blank=True)
    """Object name."""
    size_bytes = models.BigIntegerField(default=0)
    progress_done = models.BigIntegerField(default=0)
    progress_total = models.BigIntegerField(default=0)
    progress_unit = models.CharField(max_length=32, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    error = models.JSONField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["position"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(fields=["build", "derivation"], name="step_once_a_build"),
        ]

    @property
    def message(self) -> str:
        """Whom it waits for, else why it is cached or must be built."""
        return waiting_message(self.waits_for) if self.waits_for else self.why


class LogChunk(models.Model):
    """Some lines of the log of a build, a step, an activation or a host task, in order of `id`."""

    build = models.ForeignKey(Build, on_delete=models.CASCADE, null=True, related_name="log")
    """Set for its steps' lines too."""
    step = models.ForeignKey(BuildStep, on_delete=models.CASCADE, null=True, related_name="log")
    activation = models.ForeignKey(
        "Activation", on_delete=models.CASCADE, null=True, related_name="log"
    )
    task = models.ForeignKey(HostTask, on_delete=models.CASCADE, null=True, related_name="log")
    text = models.TextField()
    at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar[list[str]] = ["id"]


class ActivationKind(models.TextChoices):
    """Forward to a new generation, back to an earlier one, or down."""

    ACTIVATE = "activate"
    ROLLBACK = "rollback"
    STOP = "stop"


class Activation(Job):
    """Makes a generation live: preflight → start → probe → flip → drain → retire."""

    noun = "activation"

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="activations")
    target = models.ForeignKey(
        Generation, on_delete=models.CASCADE, null=True, blank=True, related_name="activations"
    )
    """None for a stop."""
    previous = models.ForeignKey(
        Generation, on_delete=models.SET_NULL, null=True, blank=True, related_name="+"
    )
    """What was live when it began."""
    kind = models.CharField(max_length=16, choices=ActivationKind.choices)
    mode = models.CharField(max_length=16, blank=True)
    """overlap or swap, once known."""
    phase = models.CharField(max_length=32, blank=True)
    """The step that it is in; a resumed activation goes on there."""
    undoing = models.BooleanField(default=False)
    """True once it failed and only puts back what was: `error` says why."""
    max_attempts = models.PositiveIntegerField(default=10)
    """Of the attempts, only the first few go forward; the others may still put things back."""
    snapshot_version = models.BigIntegerField(default=0)
    """The snapshot with which it last changed the route: drains wait for it."""
    phases = models.JSONField(default=list)
    """`[{"phase", "started", "ended"}]`: durations for the history."""
    reason = models.TextField(blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(
                fields=["deployment"],
                condition=Q(state__in=ACTIVE_JOB),
                name="one_activation_a_deployment",
            ),
        ]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["deployment", "-id"], name="activation_newest"),
        ]

    @property
    def deployment_name(self) -> str:
        """The deployment that it is about."""
        return self.deployment.name

    def broke_off(self, error: dict[str, Any] | None) -> Sequence[Follows]:  # noqa: ARG002
        """No generation stays half-way; the watch ends engines that nobody wants."""
        follows = []
        if self.target_id is not None:
            begun = (GenerationState.STARTING, GenerationState.PROBING)
            follows.append(Follows(self.target_id, GenerationState.FAILED, begun))
        live = Deployment.objects.values_list("live", flat=True).get(pk=self.deployment_id)
        if self.previous_id is not None and self.previous_id != live:
            draining = (GenerationState.DRAINING,)
            follows.append(Follows(self.previous_id, GenerationState.RETIRED, draining))
        return follows

    def position(self, live: int | None) -> Position:
        """Where it is on its way, with `live` the deployment's live generation now."""
        return resumed(
            self.kind,
            has_previous=self.previous_id is not None,
            phase=self.phase,
            mode=self.mode,
            undoing=self.undoing,
            flipped=live == self.target_id and bool(self.phase),
        )

    @property
    def may_be_cancelled(self) -> bool:
        """True while a cancel is of use."""
        if self.state != JobState.RUNNING:
            return self.state == JobState.QUEUED
        return may_cancel(self.position(self.deployment.live_id))


class Trial(Job):
    """A kept generation that runs beside the live one for a limited time, for the playground.

    The generation's own state does not change: what runs is a replica that belongs to the trial.
    """

    noun = "trial"
    has_log = False

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="trials")
    generation = models.ForeignKey(Generation, on_delete=models.CASCADE, related_name="trials")
    minutes = models.PositiveIntegerField(default=MINUTES)
    """How long it stays open."""
    reason = models.TextField(blank=True)
    phase = models.CharField(max_length=16, blank=True)
    """The step of `mmadmin.core.generations.trial` that it is in; empty = it has not begun."""
    opened_at = models.DateTimeField(null=True, blank=True)
    """When every gate knew it."""
    ends_at = models.DateTimeField(null=True, blank=True)
    """Set once it is open: until then it sleeps, queued and held by nobody."""
    ending = models.TextField(blank=True)
    """Why it ends, or ended."""
    snapshot_version = models.BigIntegerField(default=0)
    """The snapshot with which it last changed the route: drains wait for it."""
    max_attempts = models.PositiveIntegerField(default=6)
    """Of the attempts, only the first few go forward; the others may still end its engine."""

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(
                fields=["deployment"],
                condition=Q(state__in=ACTIVE_JOB),
                name="one_trial_a_deployment",
            ),
        ]

    def __str__(self) -> str:
        return self.generation.uid

    @property
    def status(self) -> TrialStatus:
        """Where it is, for people."""
        phase = Phase(self.phase) if self.phase else None
        return status_of(JobState(self.state), phase, told=self.opened_at is not None)

    @property
    def deployment_name(self) -> str:
        """The deployment that it is about."""
        return self.deployment.name

    @property
    def waits(self) -> bool:
        """True while it is open and its time is not over."""
        return self.asleep

    def fell_asleep(self) -> None:
        """One that a person ended in this moment wakes at once."""
        ended = Trial.objects.filter(
            pk=self.pk, state=JobState.QUEUED, cancel_requested_at__isnull=False
        )
        ended.update(ends_at=timezone.now())

    @property
    def asleep(self) -> bool:
        """True while it is open, its time is not over, and nobody works on it."""
        if self.state != JobState.QUEUED or self.ends_at is None:
            return False
        return self.ends_at > timezone.now()

    def end_soon(self, why: str) -> bool:
        """Let it end, whoever works on it: by compare-and-set, in the caller's transaction.

        One that has not begun ends here, one that sleeps wakes, a worker that starts it is told.
        False when it has ended, or is to end already.
        """
        now = timezone.now()
        row = Trial.objects.filter(pk=self.pk, cancel_requested_at=None)
        asked: dict[str, Any] = {"cancel_requested_at": now, "ending": why}
        not_begun = row.filter(state=JobState.QUEUED, phase="")
        if not_begun.move(JobState.CANCELLED, ended_at=now, **asked):
            told = True
        else:
            told = bool(row.active().exclude(phase__in=END).update(**asked))
            self.fell_asleep()
        self.refresh_from_db()
        return told


JOBS: tuple[type[Job], ...] = (Activation, Build, Trial, HostTask)
"""Every kind of job."""


class ReplicaState(models.TextChoices):
    """Where an engine process is."""

    STARTING = "starting"
    PROBING = "probing"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Replica(models.Model):
    """A running engine process of a generation on a host."""

    uid = models.CharField(max_length=96, unique=True)
    """Also the supervisor's program name, and what its secret is derived from."""
    generation = models.ForeignKey(Generation, on_delete=models.CASCADE, related_name="replicas")
    host = models.ForeignKey(Host, on_delete=models.PROTECT, related_name="replicas")
    slots = models.PositiveIntegerField(default=1)
    context_per_slot = models.PositiveIntegerField(default=0)
    state = models.CharField(
        max_length=16, choices=ReplicaState.choices, default=ReplicaState.STARTING
    )
    pid = models.PositiveIntegerField(null=True, blank=True)
    started = models.BigIntegerField(null=True, blank=True)
    """Start of the process, clock ticks since boot, so that a reused pid is not mistaken for it."""
    boot = models.CharField(max_length=36, blank=True)
    """The boot of the machine in which it started; empty = not known."""
    activation = models.ForeignKey(
        Activation, on_delete=models.SET_NULL, null=True, blank=True, related_name="replicas"
    )
    """The activation that started it: a resumed activation finds its own replica again."""
    trial = models.ForeignKey(
        Trial, on_delete=models.SET_NULL, null=True, blank=True, related_name="replicas"
    )
    """The trial that it belongs to; null = it serves the live generation, or is to."""
    devices = models.JSONField(null=True, blank=True)
    """The GPUs of its seat, each `{"index", "uuid"}`; null = placement chose none for it."""
    launch = models.JSONField(default=dict)
    """argv and environment without secrets."""
    sandbox = models.CharField(max_length=16, blank=True)
    """The level of the sandbox that it was last started in; empty = before there was one."""
    checked_at = models.DateTimeField(null=True, blank=True)
    """When the watch last asked it for a tiny completion."""
    failures = models.PositiveIntegerField(default=0)
    """Checks that failed in a row."""
    work = models.CharField(max_length=64, blank=True)
    """A mark of how far its requests were when the watch last looked; empty = none was in work."""
    worked_at = models.DateTimeField(null=True, blank=True)
    """When the watch last saw that mark change."""
    restarts = models.PositiveIntegerField(default=0)
    restarted_at = models.DateTimeField(null=True, blank=True)
    """By the watch, because it was not alive."""
    falls = models.PositiveIntegerField(default=0)
    """How often its process ended unasked, each time soon after the time before."""
    fell_at = models.DateTimeField(null=True, blank=True)
    """When the watch saw the last one."""
    error = models.TextField(blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    stopped_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]

    @property
    def gpu_indices(self) -> list[int] | None:
        """The GPUs of its seat; None = every GPU that its host has."""
        return None if self.devices is None else [gpu["index"] for gpu in self.devices]

    @property
    def footprint(self) -> Footprint | None:
        """The memory that it was predicted to hold on its GPUs; None = it was not."""
        return self.footprint_by(self.generation.report(ReportKind.NEEDS))

    def footprint_by(self, needs: Any) -> Footprint | None:
        """The same, by its generation's report of its needs."""
        from mmadmin.core.fit.placement import footprint_on, footprints_from_json

        return footprint_on(footprints_from_json(needs), self.gpu_indices) if needs else None

    @property
    def process(self) -> ProcessIdentity | None:
        """Its process, as last seen; None = not known."""
        if self.pid is None or self.started is None:
            return None
        return ProcessIdentity(self.pid, self.started, self.boot)


class ClientKey(models.Model):
    """A key for the gate. Its text is shown once; only the HMAC stays."""

    key_id = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    owner = models.CharField(max_length=128)
    note = models.CharField(max_length=255, blank=True)
    deployments = models.JSONField(default=list, blank=True)
    """Names that it may use; empty = all."""
    endpoints = models.JSONField(default=list, blank=True)
    """Endpoints that it may use; empty = all."""
    rpm = models.PositiveIntegerField(default=0)
    tpm = models.PositiveIntegerField(default=0)
    concurrency = models.PositiveIntegerField(default=0)
    tokens_per_day = models.PositiveBigIntegerField(default=0)
    tokens_per_month = models.PositiveBigIntegerField(default=0)
    """Limits; 0 = none."""
    playground = models.BooleanField(default=False, editable=False)
    """Made by the panel for somebody's playground: it may ask generations on trial."""
    expires_at = models.DateTimeField(null=True, blank=True)
    suspended_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    rotated_from = models.ForeignKey(
        "self", on_delete=models.SET_NULL, null=True, blank=True, related_name="rotations"
    )
    created_by = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]

    def __str__(self) -> str:
        return f"sk-mm-{self.key_id}"

    @property
    def state(self) -> str:
        """active, suspended, expired or revoked."""
        if self.revoked_at:
            return "revoked"
        if self.expires_at and self.expires_at <= timezone.now():
            return "expired"
        return "suspended" if self.suspended_at else "active"


class Scope(models.TextChoices):
    """What a personal token is for. Its person's role at the moment of use limits it further."""

    READ = "read", "Read: see what you see"
    DEPLOY = "deploy", "Deploy: build, activate, roll back, stop, maintain"
    KEYS = "keys", "Keys: create, change and revoke client keys"
    ADMIN = "admin", "Admin: people, and everything above"


class UserToken(models.Model):
    """A personal token for the REST API. Its text is shown once; only the HMAC stays."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="tokens")
    token_id = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    note = models.CharField(max_length=255, blank=True)
    scopes = models.JSONField(default=list)
    """Of `Scope`; each includes reading."""
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]

    @property
    def state(self) -> str:
        """active, expired or revoked."""
        if self.revoked_at:
            return "revoked"
        expired = self.expires_at is not None and self.expires_at <= timezone.now()
        return "expired" if expired else "active"


class RecoveryCode(models.Model):
    """A code that replaces one of the authenticator app, once. Only its HMAC stays."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="recovery_codes")
    digest = models.CharField(max_length=64)


class SecondFactorRule(models.Model):
    """A role whose people need a second factor when they log in by password."""

    role = models.CharField(max_length=16, choices=Role.choices, unique=True)


class LoginAttempts(models.Model):
    """Passwords tried for one name or from one address within a window of time."""

    subject = models.CharField(max_length=96, unique=True)
    count = models.PositiveIntegerField(default=0)
    until = models.DateTimeField(db_index=True)
    """The count is forgotten then."""


class Session(AbstractBaseSession):
    """Somebody's login in one browser: Django's session, found by whose it is."""

    user_id = models.BigIntegerField(null=True, db_index=True)
    address = models.GenericIPAddressField(null=True)
    agent = models.CharField(max_length=255, blank=True)
    """What the browser says about itself."""
    began_at = models.DateTimeField(default=timezone.now)

    @classmethod
    def get_session_store_class(cls) -> Any:
        """Where such rows are read and written."""
        return import_string(f"{settings.SESSION_ENGINE}.SessionStore")

    @property
    def public_id(self) -> str:
        """What names it on a page: the key itself would let in who reads it."""
        return hashlib.sha256(self.session_key.encode()).hexdigest()[:16]


class Publication(models.Model):
    """The newest version of what the gate was told; one row, locked while a snapshot is made."""

    version = models.BigIntegerField(default=0)
    digest = models.CharField(max_length=64, blank=True)
    """Of the content without its version: nothing is published twice for nothing."""


class GateSpool(models.Model):
    """How far one gate worker's usage spool is in the usage records without a gap."""

    gate = models.CharField(max_length=64, unique=True)
    acked_seq = models.BigIntegerField(default=0)
    updated_at = models.DateTimeField(default=timezone.now)


class AlarmKind(models.TextChoices):
    """What a watch found."""

    UNHEALTHY = "unhealthy"
    DRIFT = "drift"
    BYTES = "bytes"
    """Objects that its live generation needs are not in the host's store."""
    HOST = "host"
    """Its host's worker is away."""
    SANDBOX = "sandbox"
    """Its engine runs without a sandbox."""


class Alarm(models.Model):
    """Something that is not as it should be, from when until when."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="alarms")
    generation = models.ForeignKey(
        Generation, on_delete=models.CASCADE, null=True, related_name="+"
    )
    kind = models.CharField(max_length=16, choices=AlarmKind.choices)
    subject = models.CharField(max_length=255)
    """What differs: `binary`, `argv`, a file's path, …"""
    message = models.TextField()
    raised_at = models.DateTimeField(default=timezone.now, editable=False)
    cleared_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(
                fields=["deployment", "kind", "subject"],
                condition=Q(cleared_at__isnull=True),
                name="one_open_alarm_a_subject",
            ),
        ]


class UsageEvent(models.Model):
    """One finished request, as the gate recorded it."""

    id = models.CharField(max_length=64, primary_key=True)
    """The request id."""
    at = models.DateTimeField(db_index=True)
    key_id = models.CharField(max_length=16, db_index=True)
    deployment = models.CharField(max_length=63, db_index=True)
    generation = models.PositiveIntegerField(default=0)
    endpoint = models.CharField(max_length=32)
    status = models.PositiveSmallIntegerField()
    outcome = models.CharField(max_length=16)
    streamed = models.BooleanField(default=False)
    prompt_tokens = models.PositiveIntegerField(default=0)
    completion_tokens = models.PositiveIntegerField(default=0)
    cached_tokens = models.PositiveIntegerField(default=0)
    reasoning_tokens = models.PositiveIntegerField(default=0)
    exact = models.BooleanField(default=True)
    queue_ms = models.PositiveIntegerField(default=0)
    ttft_ms = models.PositiveIntegerField(default=0)
    duration_ms = models.PositiveIntegerField(default=0)
    tokens_per_s_milli = models.PositiveIntegerField(default=0)

    class Meta:
        ordering: ClassVar[list[str]] = ["-at"]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["deployment", "at"], name="usage_of_deployment"),
        ]


TOKENS_AND_TIMES = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "ttft_ms",
    "duration_ms",
)
"""What a request adds to a row of sums by its own figures."""
SUMS = ("requests", "failed", *TOKENS_AND_TIMES, "refused", "cancelled")
"""The fields of `UsageSums`."""


class UsageSums(models.Model):
    """A row of the usage records that adds up requests."""

    requests = models.PositiveIntegerField(default=0)
    """Without the refused ones."""
    failed = models.PositiveIntegerField(default=0)
    refused = models.PositiveIntegerField(default=0)
    cancelled = models.PositiveIntegerField(default=0)
    """The client left, or its key was revoked."""
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    reasoning_tokens = models.PositiveBigIntegerField(default=0)
    ttft_ms = models.PositiveBigIntegerField(default=0)
    """Sum; divide by `requests`."""
    duration_ms = models.PositiveBigIntegerField(default=0)

    class Meta:
        abstract = True


class UsageBucket(UsageSums):
    """Usage of one hour, key, deployment, generation and endpoint: sums of the events."""

    hour = models.DateTimeField()
    key_id = models.CharField(max_length=16)
    deployment = models.CharField(max_length=63)
    generation = models.PositiveIntegerField(default=0)
    endpoint = models.CharField(max_length=32)

    class Meta:
        ordering: ClassVar[list[str]] = ["-hour"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(
                fields=["hour", "key_id", "deployment", "generation", "endpoint"],
                name="one_bucket_an_hour",
            ),
        ]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["key_id", "hour"], name="bucket_of_key"),
            models.Index(fields=["deployment", "hour"], name="bucket_of_deployment"),
        ]


class UsageDay(UsageSums):
    """Usage of one day (UTC) and one thing: sums of the buckets, so that months add up quickly.

    Each request is counted in four rows: of all, of its deployment, of its generation, of its key.
    """

    day = models.DateTimeField()
    """Its midnight."""
    of = models.CharField(max_length=16)
    """all, deployment, generation or key: the fields below that this names are set."""
    deployment = models.CharField(max_length=63, blank=True)
    generation = models.PositiveIntegerField(default=0)
    key_id = models.CharField(max_length=16, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-day"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(
                fields=["of", "day", "deployment", "generation", "key_id"], name="one_row_a_day"
            ),
        ]


class AuditEvent(models.Model):
    """Who did what to which thing: written once, never edited."""

    at = models.DateTimeField(default=timezone.now, editable=False, db_index=True)
    actor = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    verb = models.CharField(max_length=64)
    """`key.issue`, `deployment.rollback`, …"""
    subject = models.CharField(max_length=128, blank=True, db_index=True)
    """`key:<id>`, `deployment:<name>`, `generation:<name>/<n>`."""
    summary = models.TextField(blank=True)
    details = models.JSONField(default=dict, blank=True)
    address = models.GenericIPAddressField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]


class PolicyRule(models.Model):
    """What an admin allows or denies to be taken from where (`mmadmin.core.source_policy`)."""

    kind = models.CharField(max_length=16)
    pattern = models.CharField(max_length=255)
    allow = models.BooleanField()
    reason = models.TextField(blank=True)
    by = models.ForeignKey(User, on_delete=models.PROTECT, related_name="+")
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar[list[str]] = ["kind", "pattern"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(fields=["kind", "pattern"], name="one_rule_a_pattern"),
        ]

    def __str__(self) -> str:
        return str(self.rule)

    @property
    def rule(self) -> Rule:
        """What it says."""
        from mmadmin.core.source_policy import Rule

        return Rule(self.kind, self.pattern, allow=self.allow, reason=self.reason)

    @classmethod
    def policy(cls) -> SourcePolicy:
        """The rules as they are now, and whom to ask about them."""
        from mmadmin.core.source_policy import SourcePolicy

        admins = User.objects.filter(role=Role.ADMIN, is_active=True).order_by("id")
        names = admins.values_list("username", flat=True)[:3]
        return SourcePolicy(tuple(row.rule for row in cls.objects.all()), tuple(names))


class RequestState(models.TextChoices):
    """Where a request for an exception is."""

    WAITING = "waiting"
    GRANTED = "granted"
    REFUSED = "refused"


class PolicyRequest(models.Model):
    """Somebody asks the admins to allow what the policy refuses; the answer stays on record."""

    kind = models.CharField(max_length=16)
    pattern = models.CharField(max_length=255)
    reason = models.TextField()
    by = models.ForeignKey(User, on_delete=models.PROTECT, related_name="+")
    at = models.DateTimeField(default=timezone.now, editable=False)
    state = models.CharField(
        max_length=16, choices=RequestState.choices, default=RequestState.WAITING
    )
    answer = models.TextField(blank=True)
    answered_by = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    answered_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[Any]] = [
            models.UniqueConstraint(
                fields=["kind", "pattern"],
                condition=Q(state="waiting"),
                name="one_waiting_request_a_pattern",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.pattern}"
