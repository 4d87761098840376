"""What answers have in common: errors, pages, names."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from ninja import Field, Schema
from pydantic import BeforeValidator

from deployments.models import Generation, User

T = TypeVar("T")


MAX_ID = 2**63 - 1


def _name_of(person: Any) -> Any:
    return person.get_username() if isinstance(person, User) else person


def _number_of(generation: Any) -> Any:
    return generation.number if isinstance(generation, Generation) else generation


Person = Annotated[str | None, BeforeValidator(_name_of)]
"""A person's name; null for mmadmin itself."""
Named = Annotated[str, BeforeValidator(str)]
"""A host's or a deployment's name; a generation's uid."""
Number = Annotated[int | None, BeforeValidator(_number_of)]
"""The number of a generation; null for none."""


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
