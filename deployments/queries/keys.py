"""Client keys."""

from __future__ import annotations

from collections.abc import Collection

from django.db.models import Q
from django.utils import timezone

from deployments.models import (
    AuditEvent,
    ClientKey,
    Role,
    User,
)
from deployments.queries.paging import PER_PAGE, Page, paged, require
from mmadmin.core.errors import InvalidInput, NotFound

KEY_STATES = ("", "active", "suspended", "expired", "revoked")


def keys(actor: User, *, search: str = "", state: str = "", page: int = 1) -> Page[ClientKey]:
    """Client keys, newest first; `search` looks at prefix, owner and note."""
    require(actor, Role.OPERATOR)
    if state not in KEY_STATES:
        raise InvalidInput(
            f"{state!r} is not a key state", remedy=f"use {', '.join(KEY_STATES[1:])}"
        )
    now = timezone.now()
    rows = ClientKey.objects.select_related("created_by", "rotated_from")
    for word in search.split():
        rows = rows.filter(
            Q(key_id__startswith=word.removeprefix("sk-mm-"))
            | Q(owner__icontains=word)
            | Q(note__icontains=word)
        )
    expired = Q(expires_at__lte=now)
    if state == "revoked":
        rows = rows.filter(revoked_at__isnull=False)
    elif state == "expired":
        rows = rows.filter(expired, revoked_at=None)
    elif state == "suspended":
        rows = rows.filter(revoked_at=None, suspended_at__isnull=False).exclude(expired)
    elif state == "active":
        rows = rows.filter(revoked_at=None, suspended_at=None).exclude(expired)
    return paged(rows, page)


def key(actor: User, key_id: str) -> ClientKey:
    """One client key. Raises `NotFound`."""
    require(actor, Role.OPERATOR)
    found = (
        ClientKey.objects.select_related("created_by", "rotated_from").filter(key_id=key_id).first()
    )
    if found is None:
        raise NotFound(f"there is no key {key_id}")
    return found


def key_owners(actor: User, key_ids: Collection[str]) -> dict[str, str]:
    """Whose keys these are."""
    require(actor, Role.OPERATOR)
    rows = ClientKey.objects.filter(key_id__in=key_ids)
    return dict(rows.values_list("key_id", "owner"))


def revoked_by(actor: User, key_id: str) -> str | None:
    """The name of the person who ended a key; None where nobody did, or it expired."""
    require(actor, Role.OPERATOR)
    event = (
        AuditEvent.objects.filter(subject=f"key:{key_id}", verb="key.revoke")
        .select_related("actor")
        .first()
    )
    return event.actor.get_username() if event and event.actor else None


def key_events(actor: User, key_id: str) -> list[AuditEvent]:
    """Who did what to a key, newest first."""
    require(actor, Role.OPERATOR)
    return list(
        AuditEvent.objects.filter(subject=f"key:{key_id}").select_related("actor")[:PER_PAGE]
    )
