"""Builds, activations, trials, host tasks and logs: read off their rows, field by field."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ninja import Field, Schema

from deployments.models import Job, LogChunk, Trial
from deployments.schemas.shapes import ErrorBody, Named, Number, Person


class JobOut(Schema):
    """How a job stands."""

    id: int
    state: str
    actor: Person
    attempts: int
    cancel_requested: bool
    error: ErrorBody | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None

    @staticmethod
    def resolve_cancel_requested(row: Job) -> bool:
        """Whether somebody asked for its end."""
        return row.cancel_requested_at is not None


class TaskOut(JobOut):
    """A small piece of work on a host."""

    kind: str
    host: Named
    generation: Named | None
    params: dict[str, Any]
    progress_done: int
    progress_total: int = Field(description="Bytes to be read; 0 = it does not count.")
    result: dict[str, Any] | None


class PhaseOut(Schema):
    """A step of an activation."""

    phase: str
    started: datetime
    ended: datetime | None = None


class ActivationBrief(Schema):
    """An activation of a generation, in its history."""

    id: int
    kind: str
    mode: str
    state: str
    actor: Person
    reason: str
    created_at: datetime
    ended_at: datetime | None
    phases: list[PhaseOut]


class ActivationOut(JobOut):
    """Making a generation live, or taking it down."""

    phase: str
    deployment: Named
    kind: str
    mode: str
    target: Number
    previous: Number
    reason: str
    phases: list[PhaseOut]


class TrialOut(JobOut):
    """A generation that runs beside the live one for a limited time."""

    phase: str
    deployment: Named
    generation: Number
    model: str = Field(description="What a playground's request calls it.")
    status: str = Field(description="waiting, starting, open, ending, ended, failed or cancelled.")
    minutes: int
    reason: str
    opened_at: datetime | None
    ends_at: datetime | None = Field(description="When its time is over; known once it is open.")
    ending: str = Field(description="Why it ends, or ended.")

    @staticmethod
    def resolve_model(row: Trial) -> str:
        """The generation's uid."""
        return row.generation.uid


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


class BuildBrief(JobOut):
    """A build, or a plan."""

    phase: str
    deployment: Named | None
    generation: Number
    dry_run: bool


class BuildRunOut(BuildBrief):
    """A build with its steps."""

    steps: list[StepOut]


class BuildOut(BuildRunOut):
    """A build with its plan and its steps."""

    plan: dict[str, Any] | None


class LogOut(Schema):
    """Some lines of a log; ask again with `after` = the last `id`."""

    id: int
    step: int | None
    text: str
    at: datetime

    @staticmethod
    def resolve_step(row: LogChunk) -> int | None:
        """Its id alone."""
        return row.step_id
