"""Deployments and their history."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from ninja import Field, Schema

from deployments import queries
from deployments.models import GenerationReport, Replica
from deployments.queries.engine_log import EngineLog
from deployments.schemas.jobs import ActivationBrief
from deployments.schemas.shapes import Named, Number, Person
from mmadmin.core.generations.diff import DiffRow


class GenerationOut(Schema):
    """One numbered, immutable state of a deployment."""

    uid: str
    deployment: Named
    number: int
    parent: Number
    state: str
    state_reason: str
    system: str
    author: Person
    reason: str
    mark: str
    pinned: bool
    size_bytes: int
    created_at: datetime
    built_at: datetime | None
    changed_at: datetime


class TransitionOut(Schema):
    """One state change."""

    before: str
    after: str
    at: datetime
    actor: Person
    reason: str


class DiffRowOut(Schema):
    """One difference: as it was recorded, and the same for people, with units."""

    section: str
    field: str
    before: str | None
    after: str | None
    label: str
    was: str | None
    now: str | None

    @classmethod
    def of(cls, row: DiffRow) -> DiffRowOut:
        """A row of a diff."""
        return cls.model_validate(row.as_json())


class ReplicaOut(Schema):
    """A running engine."""

    uid: str
    generation: Number
    host: Named
    slots: int
    context_per_slot: int
    state: str
    pid: int | None
    devices: list[int] | None = Field(
        description="The GPUs that it was given; null = every GPU of its host."
    )
    trial: int | None = Field(description="The trial that it belongs to; null = it serves clients.")
    sandbox: str = Field(
        description="The level of its sandbox: `bubblewrap`, `unshare` or `none`; empty = it was "
        "started before engines had one."
    )

    @staticmethod
    def resolve_devices(row: Replica) -> list[int] | None:
        """By their indices."""
        return row.gpu_indices

    @staticmethod
    def resolve_trial(row: Replica) -> int | None:
        """Its id alone."""
        return row.trial_id


class AlarmOut(Schema):
    """Something that is not as it should be."""

    id: int
    deployment: Named
    generation: Number
    kind: str
    subject: str
    message: str
    raised_at: datetime


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
    keep_days: int
    live_generation: int | None
    live_since: datetime | None
    newest_generation: int | None
    generations: int
    activation: int | None = Field(description="Id of the activation under way.")
    build: int | None = Field(description="Id of the build under way.")
    trial: int | None = Field(description="Id of the trial that waits, is open or ends.")
    replicas: list[ReplicaOut]
    alarms: list[AlarmOut]
    requests_1h: int
    failed_1h: int
    tokens_per_s: float | None
    ttft_ms: int | None

    @staticmethod
    def of(row: queries.DeploymentRow) -> dict[str, Any]:
        """The fields of a row of the overview."""
        it = row.deployment
        return {
            "name": it.name,
            "public_name": it.public_name,
            "description": it.description,
            "host": it.host.name,
            "state": row.state,
            "archived": it.archived_at is not None,
            "auto_rollback": it.auto_rollback,
            "keep_generations": it.keep_generations,
            "keep_days": it.keep_days,
            "live_generation": row.live.number if row.live else None,
            "live_since": row.live_since,
            "newest_generation": row.newest.number if row.newest else None,
            "generations": row.generations,
            "activation": row.activation.pk if row.activation else None,
            "build": row.build.pk if row.build else None,
            "trial": row.trial.pk if row.trial else None,
            "replicas": row.replicas,
            "alarms": row.alarms,
            "requests_1h": row.requests_1h,
            "failed_1h": row.failed_1h,
            "tokens_per_s": row.tokens_per_s,
            "ttft_ms": row.ttft_ms,
        }


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
        return GenerationOut.from_orm(row.generation).dict() | {
            "is_live": row.is_live,
            "live_spans": [SpanOut(since=start, until=end) for start, end in row.live_spans],
            "live_s": row.live_s,
            "build": row.build.pk if row.build else None,
            "build_state": row.build.state if row.build else None,
            "activations": [ActivationBrief.from_orm(it) for it in row.activations],
            "changes": [DiffRowOut.of(change) for change in row.changes],
        }

    @classmethod
    def of_row(cls, row: queries.HistoryRow) -> HistoryOut:
        """A row of the history."""
        return cls(**cls.history_of(row))


class ReportBrief(Schema):
    """What was found out about a generation, without its data."""

    kind: str
    format: int = Field(description="Of the data; raised when their shape changes.")
    made_by: str
    at: datetime


class ReportOut(ReportBrief):
    """What was found out about a generation."""

    data: Any = Field(description="Null where it is large and lies in another host's store.")

    @staticmethod
    def resolve_data(row: GenerationReport) -> Any:
        """From the row, or from the store."""
        return row.content


class GenerationDetailOut(HistoryOut):
    """A generation with everything that was recorded of it."""

    spec_toml: str
    lock: dict[str, Any] | None
    reports: list[ReportBrief] = Field(description="What is known of it; each has its own address.")
    transitions: list[TransitionOut]

    @classmethod
    def of_detail(
        cls, row: queries.HistoryRow, reports: Iterable[GenerationReport]
    ) -> GenerationDetailOut:
        """A generation with its reports."""
        return cls(
            **cls.history_of(row),
            spec_toml=row.generation.spec_toml,
            lock=row.generation.lock,
            reports=[ReportBrief.from_orm(report) for report in reports],
            transitions=[TransitionOut.from_orm(it) for it in row.transitions],
        )


class PreviewOut(Schema):
    """What making a generation live would do, by what its host last reported."""

    target: int
    live: int | None
    outlook: str = Field(description="overlap, swap, refused or unknown.")
    message: str
    waits_ms: int | None = Field(
        description="How long new requests wait; 0 = not at all, null = it cannot be told."
    )
    drain_s: int = Field(description="How long running requests may still go on.")
    load_ms: int
    load_measured: bool = Field(description="False = estimated from the size.")
    ends: list[str] = Field(description="Generations whose engines end by it.")
    devices: list[int] | None = Field(
        description="The GPUs that it would sit on; null = it cannot be told."
    )
    stop_first: list[str] = Field(description="Deployments to stop first, so that there is room.")
    build_first: list[str] | None = Field(
        description="Objects that are gone from the store; null = another host's store."
    )
    facts_at: datetime | None
    public_name: str = Field(description="What clients call it afterwards.")
    renames: bool = Field(description="They call the deployment something else now.")

    @classmethod
    def of(cls, found: queries.ActivationPreview) -> PreviewOut:
        """A preview."""
        outcome: dict[str, Any] = found.outcome.as_json()
        return cls(
            **outcome,
            target=found.target.number,
            live=found.live.number if found.live else None,
            facts_at=found.facts_at,
            public_name=found.public_name,
            renames=found.renames,
        )


class EngineLogOut(Schema):
    """What an engine said last."""

    engine: str
    host: str
    state: str
    here: bool
    """False: it is on another host, and `text` is empty."""
    text: str

    @classmethod
    def of(cls, found: EngineLog) -> EngineLogOut:
        """The end of a log."""
        return cls(
            engine=found.replica.uid,
            host=found.replica.host.name,
            state=found.replica.state,
            here=found.here,
            text=found.text,
        )


class MeasuredOut(Schema):
    """What was measured of a generation; null = it was not."""

    number: int
    mark: str
    is_live: bool
    answer_tokens_per_s_milli: int | None
    prompt_tokens_per_s_milli: int | None
    ttft_ms: int | None
    load_ms: int | None
    memory_bytes: int | None
    requests_90d: int
    failed_90d: int
    mean_ttft_ms_90d: int | None

    @classmethod
    def of(cls, row: queries.MeasuredRow) -> MeasuredOut:
        """A row of the comparison."""
        return cls(
            number=row.generation.number,
            mark=row.generation.mark,
            is_live=row.is_live,
            answer_tokens_per_s_milli=row.answer_tokens_per_s_milli,
            prompt_tokens_per_s_milli=row.prompt_tokens_per_s_milli,
            ttft_ms=row.ttft_ms,
            load_ms=row.load_ms,
            memory_bytes=row.memory_bytes,
            requests_90d=row.requests,
            failed_90d=row.failed,
            mean_ttft_ms_90d=row.used_ttft_ms,
        )
