"""Client keys: issued, changed, ended; each change reaches the gate at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from deployments.actions.permissions import audit, require
from deployments.broker import feed
from deployments.models import (
    ClientKey,
    Deployment,
    Role,
    Scope,
    User,
)
from mmadmin.core import access
from mmadmin.core.errors import Conflict, InvalidInput, NotFound
from mmadmin.core.snapshot import KEY_LIMITS

ROTATION_OVERLAP = timedelta(days=1)


LIMIT_MAX = 2**31 - 1


def issue_key(
    actor: User,
    *,
    owner: str,
    note: str = "",
    deployments: Sequence[str] = (),
    endpoints: Sequence[str] = (),
    rpm: int = 0,
    tpm: int = 0,
    concurrency: int = 0,
    tokens_per_day: int = 0,
    tokens_per_month: int = 0,
    expires_at: datetime | None = None,
) -> tuple[ClientKey, str]:
    """Make a client key; its text is returned this once and kept nowhere."""
    require(actor, Role.ADMIN, Scope.KEYS)
    limits = {
        "rpm": rpm,
        "tpm": tpm,
        "concurrency": concurrency,
        "tokens_per_day": tokens_per_day,
        "tokens_per_month": tokens_per_month,
    }
    check_key_fields(
        {
            "owner": owner,
            "note": note,
            "deployments": deployments,
            "endpoints": endpoints,
            "expires_at": expires_at,
        }
        | limits
    )
    new = access.new_key(pepper())
    with transaction.atomic():
        key = ClientKey.objects.create(
            key_id=new.key_id,
            digest=new.digest,
            owner=owner.strip(),
            note=note.strip(),
            deployments=sorted(set(deployments)),
            endpoints=sorted(set(endpoints)),
            expires_at=expires_at,
            created_by=actor,
            **limits,
        )
        _after_key_change(actor, "key.issue", key, f"key {key} for {key.owner}")
    return key, new.text


def pepper() -> bytes:
    """The installation's pepper for the digests of keys and tokens."""
    pepper: bytes = settings.KEY_PEPPER
    if not pepper:
        raise Conflict("this installation has no key pepper yet", remedy="run `mm up` first")
    return pepper


def check_key_fields(fields: dict[str, Any]) -> None:
    """Refuse, naming the field, what a key or token must not have."""
    if "owner" in fields and not fields["owner"].strip():
        raise InvalidInput("a key needs an owner", remedy="say who will use it", field="owner")
    for field, limit in (("owner", 128), ("note", 255)):
        if len(fields.get(field, "")) > limit:
            raise InvalidInput(f"{field} is longer than {limit} characters", field=field)
    for field in KEY_LIMITS:
        if field in fields and not 0 <= fields[field] <= LIMIT_MAX:
            raise InvalidInput(
                f"{field} is out of range", remedy=f"use 0 (no limit) to {LIMIT_MAX}", field=field
            )
    if unknown := set(fields.get("endpoints") or ()) - set(access.ENDPOINTS):
        raise InvalidInput(
            f"there is no endpoint {', '.join(sorted(unknown))}",
            remedy=f"use {', '.join(access.ENDPOINTS)}",
            field="endpoints",
        )
    names = set(fields.get("deployments") or ())
    unknown = names - set(Deployment.objects.filter(name__in=names).values_list("name", flat=True))
    if unknown:
        raise InvalidInput(
            f"there is no deployment {', '.join(sorted(unknown))}", field="deployments"
        )
    expires_at = fields.get("expires_at")
    if expires_at is not None and timezone.is_naive(expires_at):
        raise InvalidInput(
            "the expiry has no time zone",
            remedy="write for example …T12:00:00Z",
            field="expires_at",
        )
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidInput("the expiry lies in the past", field="expires_at")


def _after_key_change(actor: User, verb: str, key: ClientKey, summary: str, **details: Any) -> None:
    audit(actor, verb, f"key:{key.key_id}", summary, **details)
    transaction.on_commit(feed.publish_snapshot)
    transaction.on_commit(lambda: feed.announce("key", key.pk))


def _locked_key(key_id: str) -> ClientKey:
    key = ClientKey.objects.select_for_update().filter(key_id=key_id).first()
    if key is None:
        raise NotFound(f"there is no key {key_id}")
    return key


def revoke_key(actor: User, key_id: str) -> ClientKey:
    """Revoke a key permanently; the gate refuses it at once and cuts its streams."""
    require(actor, Role.ADMIN, Scope.KEYS)
    with transaction.atomic():
        key = _locked_key(key_id)
        if key.revoked_at is None:
            key.revoked_at = timezone.now()
            key.save(update_fields=["revoked_at"])
            transaction.on_commit(lambda: feed.announce_revoked(key.key_id))
            _after_key_change(actor, "key.revoke", key, f"key {key} of {key.owner} revoked")
    return key


def suspend_key(actor: User, key_id: str, on: bool) -> ClientKey:  # noqa: FBT001
    """Suspend a key, or let it work again."""
    require(actor, Role.ADMIN, Scope.KEYS)
    with transaction.atomic():
        key = _locked_key(key_id)
        _refuse_revoked(key)
        key.suspended_at = timezone.now() if on else None
        key.save(update_fields=["suspended_at"])
        verb = "suspend" if on else "resume"
        _after_key_change(actor, f"key.{verb}", key, f"{verb} key {key} of {key.owner}")
    return key


def _refuse_revoked(key: ClientKey) -> None:
    if key.revoked_at is not None:
        raise Conflict(f"key {key} is permanently revoked", remedy="issue a new one")


def rotate_key(
    actor: User, key_id: str, *, overlap: timedelta = ROTATION_OVERLAP
) -> tuple[ClientKey, str]:
    """Issue a successor with the same rights; the old key ends after `overlap`."""
    require(actor, Role.ADMIN, Scope.KEYS)
    new = access.new_key(pepper())
    with transaction.atomic():
        old = _locked_key(key_id)
        _refuse_revoked(old)
        _refuse_followed(old)
        key = ClientKey.objects.create(
            key_id=new.key_id,
            digest=new.digest,
            owner=old.owner,
            note=old.note,
            deployments=old.deployments,
            endpoints=old.endpoints,
            expires_at=old.expires_at,
            rotated_from=old,
            created_by=actor,
            **{field: getattr(old, field) for field in KEY_LIMITS},
        )
        ends = timezone.now() + overlap
        if old.expires_at is None or old.expires_at > ends:
            old.expires_at = ends
            old.save(update_fields=["expires_at"])
        _after_key_change(
            actor, "key.rotate", key, f"key {key} follows {old} of {old.owner}", old=old.key_id
        )
    return key, new.text


def _refuse_followed(key: ClientKey) -> None:
    now = timezone.now()
    successors = key.rotations.filter(revoked_at=None).exclude(expires_at__lte=now)
    if (successor := successors.first()) is not None:
        raise Conflict(
            f"key {key} was rotated before: {successor} follows it",
            remedy=f"rotate {successor}, or revoke it first if its text is lost",
        )


PLAYGROUND_KEY_LASTS = timedelta(hours=1)


PLAYGROUND_LIMITS = {"concurrency": 4, "rpm": 60, "tpm": 1_000_000}


def playground_key(actor: User) -> tuple[ClientKey, str]:
    """A short-lived key for the person's own playground; it ends the one that they had before."""
    require(actor, Role.VIEWER)
    owner = f"playground: {actor.get_username()}"
    now = timezone.now()
    new = access.new_key(pepper())
    with transaction.atomic():
        ClientKey.objects.filter(
            owner=owner, created_by=actor, revoked_at=None, expires_at__gt=now
        ).update(revoked_at=now)
        key = ClientKey.objects.create(
            key_id=new.key_id,
            digest=new.digest,
            owner=owner,
            note="Playground",
            playground=True,
            **PLAYGROUND_LIMITS,
            expires_at=now + PLAYGROUND_KEY_LASTS,
            created_by=actor,
        )
        _after_key_change(actor, "key.playground", key, f"playground key {key} of {actor}")
    return key, new.text


def end_playground_keys(user: User) -> None:
    """End a person's playground keys; part of the transaction that deactivates them."""
    keys = ClientKey.objects.filter(playground=True, created_by=user, revoked_at=None)
    for key_id in keys.values_list("key_id", flat=True):
        transaction.on_commit(partial(feed.announce_revoked, key_id))
    if keys.update(revoked_at=timezone.now()):
        transaction.on_commit(feed.publish_snapshot)


def edit_key(actor: User, key_id: str, **changes: Any) -> ClientKey:
    """Change owner, note, deployments, endpoints, expires_at or a limit of a key."""
    require(actor, Role.ADMIN, Scope.KEYS)
    editable = {"owner", "note", "deployments", "endpoints", "expires_at", *KEY_LIMITS}
    if unknown := set(changes) - editable:
        raise InvalidInput(f"a key has no editable field {', '.join(sorted(unknown))}")
    check_key_fields(changes)
    with transaction.atomic():
        key = _locked_key(key_id)
        _refuse_revoked(key)
        told: dict[str, list[Any]] = {}
        for field, value in changes.items():
            as_list = field in {"deployments", "endpoints"}
            before, after = getattr(key, field), sorted(set(value)) if as_list else value
            setattr(key, field, after)
            if before != after:
                told[field] = [_told(before), _told(after)]
        key.save(update_fields=list(changes))
        summary = "; ".join(f"{name} {_short(a)} → {_short(b)}" for name, (a, b) in told.items())
        _after_key_change(
            actor, "key.edit", key, f"key {key}: {summary or 'no changes'}", changes=told
        )
    return key


def _told(value: Any) -> Any:
    """A value of a key's field as the audit log keeps it."""
    return value.isoformat() if isinstance(value, datetime) else value


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "all"
    return "none" if value in (None, 0, "") else str(value)
