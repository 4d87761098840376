"""Keys, people, hosts, audit log, usage."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ninja import Field, Schema

from deployments.models import (
    ClientKey,
    Session,
    User,
    UserToken,
)
from deployments.queries.storage import Shelves
from deployments.queries.usage_records import By
from deployments.schemas.shapes import Person
from mmadmin.core.source_policy import Rule


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
    created_by: Person
    last_used_at: datetime | None
    rotated_from: str | None
    used_today: int = Field(description="Tokens since midnight, UTC; counted against the day.")
    used_this_month: int = Field(description="Tokens since the first of the month, UTC.")

    @staticmethod
    def key_of(row: ClientKey, spent: tuple[int, int]) -> dict[str, Any]:
        """The fields of a key; `spent` are the tokens of this day and month."""
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
            "created_by": row.created_by,
            "last_used_at": row.last_used_at,
            "rotated_from": row.rotated_from.key_id if row.rotated_from else None,
            "used_today": spent[0],
            "used_this_month": spent[1],
        }

    @classmethod
    def of(cls, row: ClientKey, spent: tuple[int, int]) -> KeyOut:
        """A key with its creator selected."""
        return cls(**cls.key_of(row, spent))


class NewKeyOut(KeyOut):
    """A key just made: the only answer that ever holds its text."""

    key: str = Field(description="Shown this once.")
    old_key_expires_at: datetime | None = Field(description="When the key that it follows ends.")

    @classmethod
    def of_new(cls, row: ClientKey, text: str) -> NewKeyOut:
        """A key and its text."""
        old = row.rotated_from
        return cls(
            **cls.key_of(row, (0, 0)), key=text, old_key_expires_at=old.expires_at if old else None
        )


class TokenOut(Schema):
    """A personal API token, without its text."""

    id: str
    note: str
    scopes: list[str]
    state: str = Field(description="active, expired or revoked.")
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
            "scopes": row.scopes,
            "state": row.state,
            "expires_at": row.expires_at,
            "revoked_at": row.revoked_at,
            "last_used_at": row.last_used_at,
            "created_at": row.created_at,
        }


class NewTokenOut(TokenOut):
    """A token just made."""

    token: str = Field(description="Shown this once.")

    @classmethod
    def of_new(cls, row: UserToken, text: str) -> NewTokenOut:
        """A token and its text."""
        return cls(**cls.token_of(row), token=text)


class SessionOut(Schema):
    """A login in a browser, without its key."""

    id: str
    address: str | None = Field(description="Where it began.")
    agent: str = Field(description="What the browser says about itself.")
    began_at: datetime
    expires_at: datetime
    present: bool = Field(description="True of the login that asks.")

    @classmethod
    def of(cls, row: Session, *, present: str) -> SessionOut:
        """A login; `present` is the key of the one that asks."""
        return cls(
            id=row.public_id,
            address=row.address,
            agent=row.agent,
            began_at=row.began_at,
            expires_at=row.expire_date,
            present=row.session_key == present,
        )


class EndedOut(Schema):
    """How many logins ended."""

    ended: int


class UserOut(Schema):
    """A person."""

    username: str
    role: str
    email: str
    active: bool
    second_factor: bool
    last_login: datetime | None

    @classmethod
    def of(cls, row: User) -> UserOut:
        """A person."""
        return cls(
            username=row.username,
            role=row.role,
            email=row.email,
            active=row.is_active,
            second_factor=row.second_factor_at is not None,
            last_login=row.last_login,
        )


class AuditOut(Schema):
    """Who did what."""

    id: int
    at: datetime
    actor: Person
    verb: str
    subject: str
    summary: str
    details: dict[str, Any]
    address: str | None


class RuleOut(Schema):
    """A rule of the policy that holds."""

    kind: str
    pattern: str
    allow: bool
    reason: str
    default: bool = Field(description="It holds because no admin said otherwise.")

    @classmethod
    def of(cls, rule: Rule) -> RuleOut:
        """A rule as data."""
        return cls(
            kind=rule.kind,
            pattern=rule.pattern,
            allow=rule.allow,
            reason=rule.reason,
            default=rule.default,
        )


class ExceptionOut(Schema):
    """A request to allow what the policy refuses, and its answer."""

    id: int
    kind: str
    pattern: str
    reason: str
    by: Person
    at: datetime
    state: str = Field(description="waiting, granted or refused.")
    answer: str
    answered_by: Person
    answered_at: datetime | None


class HostOut(Schema):
    """A host, as its worker last reported it."""

    name: str
    facts: dict[str, Any]
    seen_at: datetime | None


class UsageIn(Schema):
    """Which usage records are summed up, and by what."""

    since: datetime | None = None
    until: datetime | None = None
    deployment: str = ""
    key_id: str = ""
    generation: int | None = Field(None, ge=0, le=2**31 - 1)
    by: By = "hour"


class UsageOut(Schema):
    """Sums of a group of usage records; only the fields of its grouping are set."""

    hour: datetime | None = None
    day: datetime | None = None
    key_id: str | None = None
    owner: str | None = None
    deployment: str | None = None
    generation: int | None = None
    endpoint: str | None = None
    requests: int = Field(description="Without the refused ones.")
    failed: int
    refused: int
    cancelled: int = Field(description="The client left, or its key was revoked.")
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


class CatalogOut(Schema):
    """A deployment file that comes with mmadmin."""

    name: str = Field(description="Of the file, without `.toml`.")
    title: str
    about: str
    spec_toml: str


class ObjectOut(Schema):
    """One object of the store."""

    name: str
    size_bytes: int
    own_bytes: int = Field(description="Of files that no other object has.")
    sealed_at: datetime
    keepers: list[str] = Field(description="What needs it; empty = a collection would free it.")


class StoreOut(Schema):
    """The store of the panel's own host."""

    path: str
    total_bytes: int = Field(description="Of distinct files.")
    free_bytes: int = Field(description="On its file system.")
    freeable_bytes: int = Field(description="At least so much a collection would free.")
    objects: list[ObjectOut] = Field(description="Largest first.")

    @classmethod
    def of(cls, found: Shelves) -> StoreOut:
        """A look at the store."""
        return cls(
            path=found.path,
            total_bytes=found.total_bytes,
            free_bytes=found.free_bytes,
            freeable_bytes=found.freeable_bytes,
            objects=[
                ObjectOut(
                    name=shelf.name,
                    size_bytes=shelf.size_bytes,
                    own_bytes=shelf.own_bytes,
                    sealed_at=datetime.fromtimestamp(shelf.sealed_at, UTC),
                    keepers=list(shelf.keepers),
                )
                for shelf in found.shelves
            ],
        )
