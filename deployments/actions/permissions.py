"""Who acts: role checks, the client's address, and the audit log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.db import transaction

from deployments.broker import feed
from deployments.models import (
    AuditEvent,
    Role,
    User,
)
from mmadmin.core.errors import Refused

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


def audit(actor: User, verb: str, subject: str, summary: str, **details: Any) -> None:
    """Write what a person did; part of the action's transaction."""
    event = AuditEvent.objects.create(
        actor=actor,
        verb=verb,
        subject=subject,
        summary=summary,
        details=details,
        address=_address.get(),
    )
    transaction.on_commit(lambda: feed.announce("audit", event.pk))
