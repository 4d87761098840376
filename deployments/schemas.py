"""The API's edge: what goes in and out as JSON. Each row of `queries` is converted here, once."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ninja import Field, Schema
from pydantic import ConfigDict

from deployments import queries
from deployments.models import (
    Activation,
    Alarm,
    AuditEvent,
    Browse,
    Build,
    BuildStep,
    ClientKey,
    Generation,
    Host,
    LogChunk,
    Replica,
    Transition,
    User,
    UserToken,
)
from mmadmin.core.diff import DiffRow

T = TypeVar("T")

MAX_ID = 2**63 - 1
Name = str | None


def _name(user: User | None) -> str | None:
    return user.get_username() if user else None


class ErrorBody(Schema):
    """What went wrong, for people and for programs."""

    code: str = Field(description="Stable: programs may rely on it.")
    message: str
    remedy: str = ""
    details: dict[str, Any] = Field(default_factory=dict)


class ErrorOut(Schema):
    """The one shape of every error."""

    error: ErrorBody


class PageOut(Schema, Generic[T]):
    """One page of a list."""

    rows: list[T]
    page: int
    pages: int
    total: int
    per_page: int


class GenerationOut(Schema):
    """One numbered, immutable state of a deployment."""

    uid: str
    deployment: str
    number: int
    parent: int | None
    state: str
    state_reason: str
    system: str
    author: Name
    reason: str
    mark: str
    pinned: bool
    size_bytes: int
    created_at: datetime
    built_at: datetime | None
    changed_at: datetime

    @classmethod
    def of(cls, row: Generation) -> GenerationOut:
        """A generation with deployment, author and parent selected."""
        return cls(
            uid=row.uid,
            deployment=row.deployment.name,
            number=row.number,
            parent=row.parent.number if row.parent else None,
            state=row.state,
            state_reason=row.state_reason,
            system=row.system,
            author=_name(row.author),
            reason=row.reason,
            mark=row.mark,
            pinned=row.pinned,
            size_bytes=row.size_bytes,
            created_at=row.created_at,
            built_at=row.built_at,
            changed_at=row.changed_at,
        )


class TransitionOut(Schema):
    """One state change."""

    before: str
    after: str
    at: datetime
    actor: Name
    reason: str

    @classmethod
    def of(cls, row: Transition) -> TransitionOut:
        """A transition with its actor selected."""
        return cls(
            before=row.before,
            after=row.after,
            at=row.at,
            actor=_name(row.actor),
            reason=row.reason,
        )


class DiffRowOut(Schema):
    """One difference."""

    section: str
    field: str
    before: str | None
    after: str | None

    @classmethod
    def of(cls, row: DiffRow) -> DiffRowOut:
        """A row of a diff."""
        return cls(section=row.section, field=row.field, before=row.before, after=row.after)


class PhaseOut(Schema):
    """A step of an activation."""

    phase: str
    started: datetime
    ended: datetime | None


class JobOut(Schema):
    """How a job stands."""

    id: int
    state: str
    phase: str
    actor: Name
    attempts: int
    cancel_requested: bool
    error: ErrorBody | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None

    @staticmethod
    def fields_of(row: Build | Activation) -> dict[str, Any]:
        """The fields that builds and activations share."""
        return {
            "id": row.pk,
            "state": row.state,
            "phase": row.phase,
            "actor": _name(row.actor),
            "attempts": row.attempts,
            "cancel_requested": row.cancel_requested_at is not None,
            "error": ErrorBody(**row.error) if row.error else None,
            "created_at": row.created_at,
            "started_at": row.started_at,
            "ended_at": row.ended_at,
        }


class ActivationOut(JobOut):
    """Making a generation live, or taking it down."""

    deployment: str
    kind: str
    mode: str
    target: int | None
    previous: int | None
    reason: str
    phases: list[PhaseOut]

    @classmethod
    def of(cls, row: Activation) -> ActivationOut:
        """An activation with deployment, target, previous and actor selected."""
        return cls(
            **cls.fields_of(row),
            deployment=row.deployment.name,
            kind=row.kind,
            mode=row.mode,
            target=row.target.number if row.target else None,
            previous=row.previous.number if row.previous else None,
            reason=row.reason,
            phases=[PhaseOut(**phase) for phase in row.phases],
        )


class ActivationBrief(Schema):
    """An activation of a generation, in its history."""

    id: int
    kind: str
    mode: str
    state: str
    actor: Name
    reason: str
    created_at: datetime
    ended_at: datetime | None

    @classmethod
    def of(cls, row: Activation) -> ActivationBrief:
        """An activation with its actor selected."""
        return cls(
            id=row.pk,
            kind=row.kind,
            mode=row.mode,
            state=row.state,
            actor=_name(row.actor),
            reason=row.reason,
            created_at=row.created_at,
            ended_at=row.ended_at,
        )


class StepOut(Schema):
    """One derivation of a build."""

    id: int
    position: int
    name: str
    recipe: str
    derivation: str
    inputs: list[str]
    state: str
    why: str
    output: str
    size_bytes: int
    progress_done: int
    progress_total: int
    progress_unit: str
    started_at: datetime | None
    ended_at: datetime | None
    error: ErrorBody | None

    @classmethod
    def of(cls, row: BuildStep) -> StepOut:
        """A build step."""
        return cls(
            id=row.pk,
            position=row.position,
            name=row.name,
            recipe=row.recipe,
            derivation=row.derivation,
            inputs=row.inputs,
            state=row.state,
            why=row.why,
            output=row.output,
            size_bytes=row.size_bytes,
            progress_done=row.progress_done,
            progress_total=row.progress_total,
            progress_unit=row.progress_unit,
            started_at=row.started_at,
            ended_at=row.ended_at,
            error=ErrorBody(**row.error) if row.error else None,
        )


class BuildBrief(JobOut):
    """A build, or a plan."""

    deployment: str | None
    generation: int | None
    dry_run: bool

    @staticmethod
    def brief_of(row: Build) -> dict[str, Any]:
        """The fields without steps."""
        return JobOut.fields_of(row) | {
            "deployment": row.deployment.name if row.deployment else None,
            "generation": row.generation.number if row.generation else None,
            "dry_run": row.dry_run,
        }

    @classmethod
    def of(cls, row: Build) -> BuildBrief:
        """A build with deployment, generation and actor selected."""
        return cls(**cls.brief_of(row))


class BuildOut(BuildBrief):
    """A build with its plan and its steps."""

    plan: dict[str, Any] | None
    steps: list[StepOut]

    @classmethod
    def of(cls, row: Build) -> BuildOut:
        """A build with its steps prefetched."""
        steps = [StepOut.of(step) for step in row.steps.all()]
        return cls(**cls.brief_of(row), plan=row.plan, steps=steps)


class BrowseOut(Schema):
    """A look into a hub repository."""

    id: int
    repo: str
    revision: str
    state: str
    error: ErrorBody | None
    result: dict[str, Any] | None = Field(
        description="Sets of files, and for each model whether it fits on the host."
    )

    @classmethod
    def of(cls, row: Browse) -> BrowseOut:
        """A browse."""
        return cls(
            id=row.pk,
            repo=row.repo,
            revision=row.revision,
            state=row.state,
            error=ErrorBody(**row.error) if row.error else None,
            result=row.result,
        )


class LogOut(Schema):
    """Some lines of a log; ask again with `after` = the last `id`."""

    id: int
    step: int | None
    text: str
    at: datetime

    @classmethod
    def of(cls, row: LogChunk) -> LogOut:
        """A log chunk."""
        return cls(id=row.pk, step=row.step_id, text=row.text, at=row.at)


class ReplicaOut(Schema):
    """A running engine."""

    uid: str
    generation: int
    host: str
    port: int
    slots: int
    context_per_slot: int
    state: str
    pid: int | None

    @classmethod
    def of(cls, row: Replica) -> ReplicaOut:
        """A replica with generation and host selected."""
        return cls(
            uid=row.uid,
            generation=row.generation.number,
            host=row.host.name,
            port=row.port,
            slots=row.slots,
            context_per_slot=row.context_per_slot,
            state=row.state,
            pid=row.pid,
        )


class AlarmOut(Schema):
    """Something that is not as it should be."""

    id: int
    deployment: str
    generation: int | None
    kind: str
    subject: str
    message: str
    raised_at: datetime

    @classmethod
    def of(cls, row: Alarm) -> AlarmOut:
        """An alarm with deployment and generation selected."""
        return cls(
            id=row.pk,
            deployment=row.deployment.name,
            generation=row.generation.number if row.generation else None,
            kind=row.kind,
            subject=row.subject,
            message=row.message,
            raised_at=row.raised_at,
        )


class DeploymentOut(Schema):
    """A deployment, with what is live and what is under way."""

    name: str
    public_name: str
    description: str
    host: str
    state: str
    archived: bool
    auto_rollback: bool
    keep_generations: int
    live_generation: int | None
    live_since: datetime | None
    newest_generation: int | None
    generations: int
    activation: int | None = Field(description="Id of the activation under way.")
    build: int | None = Field(description="Id of the build under way.")
    replicas: list[ReplicaOut]
    alarms: list[AlarmOut]
    requests_1h: int
    failed_1h: int
    tokens_per_s: float | None
    ttft_ms: int | None

    @classmethod
    def of(cls, row: queries.DeploymentRow) -> DeploymentOut:
        """A row of the overview."""
        it = row.deployment
        return cls(
            name=it.name,
            public_name=it.public_name,
            description=it.description,
            host=it.host.name,
            state=row.state,
            archived=it.archived_at is not None,
            auto_rollback=it.auto_rollback,
            keep_generations=it.keep_generations,
            live_generation=row.live.number if row.live else None,
            live_since=row.live_since,
            newest_generation=row.newest.number if row.newest else None,
            generations=row.generations,
            activation=row.activation.pk if row.activation else None,
            build=row.build.pk if row.build else None,
            replicas=[ReplicaOut.of(replica) for replica in row.replicas],
            alarms=[AlarmOut.of(alarm) for alarm in row.alarms],
            requests_1h=row.requests_1h,
            failed_1h=row.failed_1h,
            tokens_per_s=row.tokens_per_s,
            ttft_ms=row.ttft_ms,
        )


class SpanOut(Schema):
    """A time during which a generation was live."""

    since: datetime
    until: datetime | None


class HistoryOut(GenerationOut):
    """A generation with how it came to be and how it went."""

    is_live: bool
    live_spans: list[SpanOut]
    live_s: int
    build: int | None
    build_state: str | None
    activations: list[ActivationBrief]
    changes: list[DiffRowOut]

    @staticmethod
    def history_of(row: queries.HistoryRow) -> dict[str, Any]:
        """The fields of a history row."""
        return GenerationOut.of(row.generation).dict() | {
            "is_live": row.is_live,
            "live_spans": [SpanOut(since=start, until=end) for start, end in row.live_spans],
            "live_s": row.live_s,
            "build": row.build.pk if row.build else None,
            "build_state": row.build.state if row.build else None,
            "activations": [ActivationBrief.of(activation) for activation in row.activations],
            "changes": [DiffRowOut.of(change) for change in row.changes],
        }

    @classmethod
    def of_row(cls, row: queries.HistoryRow) -> HistoryOut:
        """A row of the history."""
        return cls(**cls.history_of(row))


class GenerationDetailOut(HistoryOut):
    """A generation with everything that was recorded of it."""

    spec_toml: str
    lock: dict[str, Any] | None
    probe_report: dict[str, Any] | None
    transitions: list[TransitionOut]

    @classmethod
    def of_row(cls, row: queries.HistoryRow) -> GenerationDetailOut:
        """A generation's page."""
        return cls(
            **cls.history_of(row),
            spec_toml=row.generation.spec_toml,
            lock=row.generation.lock,
            probe_report=row.generation.probe_report,
            transitions=[TransitionOut.of(transition) for transition in row.transitions],
        )


class KeyOut(Schema):
    """A client key, without its text."""

    id: str
    prefix: str
    owner: str
    note: str
    state: str
    deployments: list[str]
    endpoints: list[str]
    rpm: int
    tpm: int
    concurrency: int
    tokens_per_day: int
    tokens_per_month: int
    expires_at: datetime | None
    created_at: datetime
    created_by: Name
    last_used_at: datetime | None
    rotated_from: str | None

    @staticmethod
    def key_of(row: ClientKey) -> dict[str, Any]:
        """The fields of a key."""
        return {
            "id": row.key_id,
            "prefix": str(row),
            "owner": row.owner,
            "note": row.note,
            "state": row.state,
            "deployments": row.deployments,
            "endpoints": row.endpoints,
            "rpm": row.rpm,
            "tpm": row.tpm,
            "concurrency": row.concurrency,
            "tokens_per_day": row.tokens_per_day,
            "tokens_per_month": row.tokens_per_month,
            "expires_at": row.expires_at,
            "created_at": row.created_at,
            "created_by": _name(row.created_by),
            "last_used_at": row.last_used_at,
            "rotated_from": row.rotated_from.key_id if row.rotated_from else None,
        }

    @classmethod
    def of(cls, row: ClientKey) -> KeyOut:
        """A key with its creator selected."""
        return cls(**cls.key_of(row))


class NewKeyOut(KeyOut):
    """A key just made: the only answer that ever holds its text."""

    key: str = Field(description="Shown this once.")

    @classmethod
    def of_new(cls, row: ClientKey, text: str) -> NewKeyOut:
        """A key and its text."""
        return cls(**cls.key_of(row), key=text)


class TokenOut(Schema):
    """A personal API token, without its text."""

    id: str
    note: str
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    created_at: datetime

    @classmethod
    def of(cls, row: UserToken) -> TokenOut:
        """A token."""
        return cls(**cls.token_of(row))

    @staticmethod
    def token_of(row: UserToken) -> dict[str, Any]:
        """The fields of a token."""
        return {
            "id": row.token_id,
            "note": row.note,
            "expires_at": row.expires_at,
            "revoked_at": row.revoked_at,
            "last_used_at": row.last_used_at,
            "created_at": row.created_at,
        }


class NewTokenOut(TokenOut):
    """A token just made."""

    token: str = Field(description="Shown this once.")


class UserOut(Schema):
    """A person."""

    username: str
    role: str
    email: str
    active: bool
    last_login: datetime | None

    @classmethod
    def of(cls, row: User) -> UserOut:
        """A person."""
        return cls(
            username=row.username,
            role=row.role,
            email=row.email,
            active=row.is_active,
            last_login=row.last_login,
        )


class AuditOut(Schema):
    """Who did what."""

    id: int
    at: datetime
    actor: Name
    verb: str
    subject: str
    summary: str
    details: dict[str, Any]
    address: str | None

    @classmethod
    def of(cls, row: AuditEvent) -> AuditOut:
        """An event with its actor selected."""
        return cls(
            id=row.pk,
            at=row.at,
            actor=_name(row.actor),
            verb=row.verb,
            subject=row.subject,
            summary=row.summary,
            details=row.details,
            address=row.address,
        )


class HostOut(Schema):
    """A host, as its worker last reported it."""

    name: str
    facts: dict[str, Any]
    seen_at: datetime | None

    @classmethod
    def of(cls, row: Host) -> HostOut:
        """A host."""
        return cls(name=row.name, facts=row.facts, seen_at=row.seen_at)


class UsageOut(Schema):
    """Sums of a group of the books; only the fields of its grouping are set."""

    hour: datetime | None = None
    day: datetime | None = None
    key_id: str | None = None
    deployment: str | None = None
    generation: int | None = None
    endpoint: str | None = None
    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    ttft_ms: int = Field(description="Sum; divide by `requests`.")
    duration_ms: int = Field(description="Sum; divide by `requests`.")


class RequestOut(Schema):
    """One finished request."""

    id: str
    at: datetime
    key_id: str
    deployment: str
    generation: int
    endpoint: str
    status: int
    outcome: str
    streamed: bool
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    exact: bool
    queue_ms: int
    ttft_ms: int
    duration_ms: int
    tokens_per_s_milli: int


# --- what comes in

SPEC_MAX = 256 * 1024
TEXT_MAX = 2000


class Strict(Schema):
    """A body that refuses fields it does not know."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class SpecIn(Strict):
    """A deployment file."""

    spec_toml: str = Field(max_length=SPEC_MAX)


class BrowseIn(Strict):
    """A hub repository to look into."""

    repo: str = Field(max_length=250)
    revision: str = Field("main", max_length=255)
    options: dict[str, Any] | None = Field(
        None, description="`[serve]` values to judge by; left out: sensible ones."
    )


class DeployIn(SpecIn):
    """A deployment file to build, and to make live."""

    reason: str = Field("", max_length=TEXT_MAX)
    activate: bool = True


class ActivateIn(Strict):
    """Which generation, and why."""

    number: int = Field(ge=1, le=2**31 - 1)
    reason: str = Field("", max_length=TEXT_MAX)


class RollbackIn(Strict):
    """Why, and back to which one."""

    reason: str = Field(max_length=TEXT_MAX)
    to: int | None = Field(None, ge=1, le=2**31 - 1)


class ReasonIn(Strict):
    """Why."""

    reason: str = Field("", max_length=TEXT_MAX)


class SwitchIn(Strict):
    """On or off."""

    on: bool = True


class MarkIn(Strict):
    """A person's word."""

    mark: Literal["good", "bad", ""]


class ConfigureIn(Strict):
    """What is not part of a generation; only what is given changes."""

    auto_rollback: bool | None = None
    keep_generations: int | None = Field(None, ge=1, le=1000)
    description: str | None = Field(None, max_length=TEXT_MAX)


Limit = int


class KeyFields(Strict):
    """What a key may do; 0 = no limit, an empty list = all."""

    note: str = Field("", max_length=255)
    deployments: list[str] = Field(default_factory=list, max_length=1000)
    endpoints: list[str] = Field(default_factory=list, max_length=100)
    rpm: Limit = Field(0, ge=0, le=2**31 - 1)
    tpm: Limit = Field(0, ge=0, le=2**31 - 1)
    concurrency: Limit = Field(0, ge=0, le=2**31 - 1)
    tokens_per_day: Limit = Field(0, ge=0, le=2**31 - 1)
    tokens_per_month: Limit = Field(0, ge=0, le=2**31 - 1)
    expires_at: datetime | None = None


class KeyIn(KeyFields):
    """A new key."""

    owner: str = Field(min_length=1, max_length=128)


class KeyEditIn(KeyFields):
    """Changes to a key; only what is given changes."""

    owner: str = Field("", max_length=128)


class RotateIn(Strict):
    """How long the old key still works."""

    overlap_s: int = Field(86400, ge=0, le=90 * 86400)


class TokenIn(Strict):
    """A new personal token."""

    note: str = Field("", max_length=255)
    expires_at: datetime | None = None


class UserIn(Strict):
    """A new person."""

    username: str = Field(min_length=1, max_length=150)
    password: str = Field(max_length=4096)
    role: Literal["admin", "operator", "viewer"] = "viewer"
    email: str = Field("", max_length=254)


class UserEditIn(Strict):
    """Changes to a person; only what is given changes."""

    role: Literal["admin", "operator", "viewer"] | None = None
    active: bool | None = None
    password: str | None = Field(None, max_length=4096)
