"""Audit log, hosts, people, alarms."""

from __future__ import annotations

from django.db.models import Q
from django.utils import timezone

from deployments.models import (
    Alarm,
    AuditEvent,
    Host,
    Role,
    SecondFactorRule,
    Session,
    User,
    UserToken,
)
from deployments.queries.paging import PER_PAGE, Page, paged, require
from mmadmin.core.errors import NotFound


def audit(
    actor: User, *, search: str = "", verb: str = "", who: str = "", page: int = 1
) -> Page[AuditEvent]:
    """The audit log, newest first. `verb` may be a prefix such as `key.`."""
    require(actor, Role.OPERATOR)
    rows = AuditEvent.objects.select_related("actor")
    for word in search.split():
        rows = rows.filter(Q(summary__icontains=word) | Q(subject__icontains=word))
    if verb:
        rows = rows.filter(verb__startswith=verb)
    if who:
        rows = rows.filter(actor__username=who)
    return paged(rows, page)


ACTIVITY_VERBS = ("deployment.", "generation.", "build.", "activation.")


def activity(actor: User, limit: int = 12) -> list[AuditEvent]:
    """What happened to deployments lately, newest first."""
    require(actor)
    which = Q()
    for verb in ACTIVITY_VERBS:
        which |= Q(verb__startswith=verb)
    return list(AuditEvent.objects.filter(which).select_related("actor")[:limit])


def hosts(actor: User) -> list[Host]:
    """The hosts, by name."""
    require(actor)
    return list(Host.objects.order_by("name"))


def host(actor: User, name: str) -> Host:
    """One host. Raises `NotFound`."""
    require(actor)
    found = Host.objects.filter(name=name).first()
    if found is None:
        raise NotFound(f"there is no host {name}")
    return found


def user(actor: User, username: str) -> User:
    """One of the people. Raises `NotFound`."""
    require(actor, Role.ADMIN)
    found = User.objects.filter(username=username).first()
    if found is None:
        raise NotFound(f"there is no user {username}")
    return found


def users(actor: User, *, search: str = "", page: int = 1) -> Page[User]:
    """The people, by name; `search` looks at name and address."""
    require(actor, Role.ADMIN)
    rows = User.objects.order_by("username")
    for word in search.split():
        rows = rows.filter(Q(username__icontains=word) | Q(email__icontains=word))
    return paged(rows, page)


def second_factor_roles(actor: User) -> list[str]:
    """The roles that need a second factor."""
    require(actor, Role.ADMIN)
    return list(SecondFactorRule.objects.values_list("role", flat=True))


def tokens(actor: User, *, page: int = 1, per_page: int = PER_PAGE) -> Page[UserToken]:
    """One's own API tokens, newest first."""
    require(actor)
    return paged(UserToken.objects.filter(user=actor), page, per_page)


def sessions(actor: User, *, page: int = 1, per_page: int = PER_PAGE) -> Page[Session]:
    """One's own logins that have not ended, newest first."""
    require(actor)
    rows = Session.objects.filter(user_id=actor.pk, expire_date__gt=timezone.now())
    return paged(rows.order_by("-began_at", "-pk"), page, per_page)


def alarms(actor: User, *, name: str = "") -> list[Alarm]:
    """Open alarms, newest first."""
    require(actor)
    rows = Alarm.objects.filter(cleared_at=None).select_related("deployment", "generation")
    return list(rows.filter(deployment__name=name) if name else rows)
