"""What comes in; unknown fields are refused."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Literal

from ninja import Field, Schema
from pydantic import ConfigDict, StrictInt

from mmadmin.core.generations.trial import MINUTES, MOST_MINUTES

SPEC_MAX = 256 * 1024


TEXT_MAX = 2000


class Strict(Schema):
    """A body that refuses fields it does not know."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class SpecIn(Strict):
    """A deployment file."""

    spec_toml: str = Field(max_length=SPEC_MAX)


class TaskIn(Strict):
    """A small piece of work for a host's worker."""

    kind: str = Field(
        max_length=32,
        description="hub-search (which models a repository has, and whether they fit), "
        "store-preview (what a collection would free), store-collect, store-verify (by what the "
        "disk says of each path), store-verify-contents (by reading all of it), doctor, "
        "describe (the reports of a built generation, made again).",
    )
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="For hub-search: repo, revision, and options (`[serve]` values to judge by).",
    )
    generation: str = Field("", max_length=80, description="For describe: NAME/NUMBER.")


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


class TrialIn(Strict):
    """For how long, and why."""

    minutes: int = Field(MINUTES, ge=1, le=MOST_MINUTES, description="Then it ends.")
    reason: str = Field("", max_length=TEXT_MAX)


class ReasonIn(Strict):
    """Why."""

    reason: str = Field("", max_length=TEXT_MAX)


class SwitchIn(Strict):
    """On or off."""

    on: bool = True


class PinIn(SwitchIn):
    """Kept whatever its age or not, and why."""

    reason: str = Field("", max_length=TEXT_MAX)


class MarkIn(Strict):
    """A person's word."""

    mark: Literal["good", "bad", ""]
    reason: str = Field("", max_length=TEXT_MAX)


class ConfigureIn(Strict):
    """What is not part of a generation; only what is given changes."""

    auto_rollback: bool | None = None
    keep_generations: int | None = Field(None, ge=1, le=1000)
    keep_days: int | None = Field(None, ge=0, le=3650)
    description: str | None = Field(None, max_length=TEXT_MAX)


Limit = StrictInt


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
    scopes: list[Literal["read", "deploy", "keys", "admin"]] = Field(
        ["read"], description="What it may do, never more than your role: each includes read."
    )
    expires_at: datetime | None = Field(
        default=None, description="Left out: in 90 days. Null: it does not end."
    )
    current_password: str = Field("", max_length=4096)


class RuleNameIn(Strict):
    """Which rule."""

    kind: Literal["hub", "index", "address", "folder", "digest"]
    pattern: str = Field(min_length=1, max_length=255)


class RuleIn(RuleNameIn):
    """A rule of the policy; replaces the one with its kind and pattern."""

    allow: bool
    reason: str = Field("", max_length=1000)


class ExceptionIn(RuleNameIn):
    """What the admins are asked to allow, and why."""

    reason: str = Field(min_length=1, max_length=1000)


class AnswerIn(Strict):
    """The answer to a request; a refusal needs a reason."""

    grant: bool
    reason: str = Field("", max_length=1000)


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
    current_password: str = Field(
        "", max_length=4096, description="Yours, to change your own password."
    )
