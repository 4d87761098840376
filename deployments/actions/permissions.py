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
    Scope,
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


def address() -> str | None:
    """The network address of whoever acts; None = not known."""
    return _address.get()


SCOPE_OF = {Role.VIEWER: Scope.ADMIN, Role.OPERATOR: Scope.DEPLOY, Role.ADMIN: Scope.ADMIN}
"""The scope that a token needs for what takes a role: what viewers may change is their account."""


def require(actor: User, role: Role, scope: Scope | None = None) -> None:
    """Raise `Refused` unless the person is active and has at least this role.

    A token also needs the scope, by default that of the role.
    """
    if not actor.is_active or not actor.at_least(role):
        raise Refused(
            f"{actor.get_username()} may not do this: it requires the {role.value} role",
            remedy="ask an admin",
            role=role.value,
        )
    scope = scope or SCOPE_OF[role]
    if not actor.in_scope(scope):
        raise Refused(
            f"this token may not do this: it takes the scope {scope.value}",
            remedy="use a token with that scope, or log in to the panel",
            scope=scope.value,
        )


def audit(actor: User | None, verb: str, subject: str, summary: str, **details: Any) -> None:
    """Write what a person (None: somebody unknown) did; part of the action's transaction."""
    event = AuditEvent.objects.create(
        actor=actor,
        verb=verb,
        subject=subject,
        summary=summary,
        details=details,
        address=_address.get(),
    )
    transaction.on_commit(lambda: feed.announce("audit", event.pk))
