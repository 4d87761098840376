"""Builds, activations, browses and logs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ninja import Field, Schema

from deployments.models import (
    Activation,
    Browse,
    Build,
    BuildStep,
    Care,
    LogChunk,
    Trial,
)
from deployments.schemas.shapes import ErrorBody, Name, name_of


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
    def fields_of(row: Build | Activation | Trial) -> dict[str, Any]:
        """The fields that builds, activations and trials share."""
        return {
            "id": row.pk,
            "state": row.state,
            "phase": row.phase,
            "actor": name_of(row.actor),
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
            actor=name_of(row.actor),
            reason=row.reason,
            created_at=row.created_at,
            ended_at=row.ended_at,
        )


class TrialOut(JobOut):
    """A generation that runs beside the live one for a limited time."""

    deployment: str
    generation: int
    model: str = Field(description="What a playground's request calls it.")
    standing: str = Field(
        description="waiting, starting, open, ending, ended, failed or cancelled."
    )
    minutes: int
    reason: str
    opened_at: datetime | None
    ends_at: datetime | None = Field(description="When it ends by itself; known once it is open.")
    ending: str = Field(description="Why it ends, or ended.")

    @classmethod
    def of(cls, row: Trial) -> TrialOut:
        """A trial with deployment, generation and actor selected."""
        return cls(
            **cls.fields_of(row),
            deployment=row.deployment.name,
            generation=row.generation.number,
            model=row.generation.uid,
            standing=row.standing,
            minutes=row.minutes,
            reason=row.reason,
            opened_at=row.opened_at,
            ends_at=row.ends_at,
            ending=row.ending,
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
    waits_for: str = Field(
        description="Who makes the same step now, whose result will be taken; else empty."
    )
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
            waits_for=row.waits_for,
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


class CareOut(Schema):
    """Care for a host."""

    id: int
    kind: str
    host: str
    state: str
    actor: Name
    error: ErrorBody | None
    progress_done: int
    progress_total: int = Field(description="Bytes to be read; 0 = it does not count.")
    result: dict[str, Any] | None
    created_at: datetime
    ended_at: datetime | None

    @classmethod
    def of(cls, row: Care) -> CareOut:
        """Care with its host and actor selected."""
        return cls(
            id=row.pk,
            kind=row.kind,
            host=row.host.name,
            state=row.state,
            actor=name_of(row.actor),
            error=ErrorBody(**row.error) if row.error else None,
            progress_done=row.progress_done,
            progress_total=row.progress_total,
            result=row.result,
            created_at=row.created_at,
            ended_at=row.ended_at,
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
