"""What answers have in common: errors, pages, names."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ninja import Field, Schema

from deployments.models import (
    User,
)

T = TypeVar("T")


MAX_ID = 2**63 - 1


Name = str | None


def name_of(user: User | None) -> str | None:
    """A person's name; None for mmadmin itself."""
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
