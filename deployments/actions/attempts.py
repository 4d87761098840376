"""The one place that counts passwords that were tried, whichever door they came through.

An attempt is counted before its password is looked at, so that many at once count as many. It is
counted for the name at the address, for the address, and for the name at all addresses. A right
password takes its attempt back.
"""

from __future__ import annotations

import hashlib
import ipaddress
import unicodedata
from collections.abc import Iterator
from datetime import timedelta

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from deployments.actions.permissions import address, audit
from deployments.models import AuditEvent, LoginAttempts, User
from mmadmin.core.errors import TooMany

TRIES = 8
"""For one name from one address."""
TRIES_OF_ADDRESS = 40
"""From one address, whatever the names."""
TRIES_OF_NAME = 50
"""For one name from all addresses; who logged in from an address before is let in from there."""
FORGOTTEN_AFTER = timedelta(minutes=15)
ADDRESS_KNOWN_FOR = timedelta(days=30)
IPV6_PREFIX = 64
"""Whoever has one IPv6 address usually has a whole network of this size."""

LOGIN = "session.login"


def normalised(username: str) -> str:
    """A user name in the form in which it is looked up."""
    return unicodedata.normalize("NFKC", username).strip()


def begin_attempt(username: str) -> None:
    """Count an attempt for a normalised name. Raises `TooMany`, and counts nothing then."""
    now = timezone.now()
    LoginAttempts.objects.filter(until__lte=now).delete()
    with transaction.atomic():
        for subject, most in _counts(username):
            row, _ = LoginAttempts.objects.get_or_create(
                subject=subject, defaults={"until": now + FORGOTTEN_AFTER}
            )
            below = LoginAttempts.objects.filter(pk=row.pk, count__lt=most)
            if not below.update(count=F("count") + 1) and not _known_here(username, subject):
                wait_s = max(1, int((row.until - now).total_seconds()) + 1)
                raise TooMany(
                    "too many failed attempts",
                    remedy=f"try again in {-(-wait_s // 60)} minutes, or ask an admin to reset "
                    "your password",
                    retry_after_s=wait_s,
                )


def attempt_succeeded(username: str, *, done: bool = True) -> None:
    """Take the attempt back, and forget what was wrong for this name from here.

    Not `done`: a code is still to come, and entering the password again must not give it more
    tries.
    """
    (here, _), *others = _counts(username)
    with transaction.atomic():
        if done:
            LoginAttempts.objects.filter(subject=here).delete()
        for subject, _ in others:
            LoginAttempts.objects.filter(subject=subject, count__gt=0).update(count=F("count") - 1)


def attempt_failed(username: str) -> None:
    """Record a failed attempt, and a lock-out when it was the last that is allowed."""
    # what is typed into the wrong field may be a password: only names that exist are kept
    user = User.objects.filter(username=username).first()
    subject = f"user:{user}" if user else "user"
    who = str(user) if user else "an unknown user"
    with transaction.atomic():
        audit(user, "session.failed", subject, f"failed login of {who}")
        limits = dict(_counts(username))
        rows = LoginAttempts.objects.filter(subject__in=limits)
        if any(row.count == limits[row.subject] for row in rows):
            audit(user, "session.lockout", subject, f"{who}: locked out after failed logins")


def _counts(username: str) -> Iterator[tuple[str, int]]:
    """The counters that an attempt belongs to, each with its limit."""
    where = _network()
    both = hashlib.sha256(f"{username}\0{where}".encode()).hexdigest()
    name = hashlib.sha256(username.encode()).hexdigest()
    yield f"both:{both}", TRIES
    yield f"address:{where}", TRIES_OF_ADDRESS
    yield f"name:{name}", TRIES_OF_NAME


def _network() -> str:
    """The client's address; of IPv6 its network."""
    text = address()
    if text is None:
        return "local"
    found = ipaddress.ip_address(text)
    if found.version == 6:  # noqa: PLR2004 (the protocol's number)
        return str(ipaddress.ip_network((found, IPV6_PREFIX), strict=False))
    return text


def _known_here(username: str, subject: str) -> bool:
    """True when only other addresses used the name's attempts up, and its person was here."""
    return (
        subject.startswith("name:")
        and AuditEvent.objects.filter(
            verb=LOGIN,
            subject=f"user:{username}",
            address=address(),
            at__gt=timezone.now() - ADDRESS_KNOWN_FOR,
        ).exists()
    )
