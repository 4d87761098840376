"""The second factor of logins by password: codes of an authenticator app, and recovery codes.

Whoever changes their own has proved before that it is they (`accounts.passwords.confirm`). API
tokens and single sign-on are not affected.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from django.db import transaction
from django.utils import timezone
from django_otp.oath import TOTP  # type: ignore[import-untyped]

from deployments.actions.keys import pepper
from deployments.actions.people import end_sessions_of, locked_user
from deployments.actions.permissions import audit, require
from deployments.models import RecoveryCode, Role, SecondFactorRule, User
from mmadmin.core import access
from mmadmin.core.errors import Conflict, InvalidInput

KEY_BYTES = 20
STEP_S = 30
DIGITS = 6
TOLERANCE = 1
"""Steps that a clock may be off."""
RECOVERY_CODES = 10
RECOVERY_CHARACTERS = 10


def second_factor_key(actor: User) -> str:
    """The hex key to put into an authenticator app; the same until it is confirmed."""
    require(actor, Role.VIEWER)
    with transaction.atomic():
        user = locked_user(actor.get_username())
        if user.second_factor_at is not None:
            raise Conflict("your account has a second factor", remedy="turn it off first")
        if not user.has_usable_password():
            raise Conflict(
                "you log in by single sign-on", remedy="set up a second factor at your provider"
            )
        if not user.second_factor_key:
            user.second_factor_key = secrets.token_hex(KEY_BYTES)
            user.save(update_fields=["second_factor_key"])
    return user.second_factor_key


def enrol_second_factor(actor: User, code: str) -> list[str]:
    """Turn it on with the app's first code; returns the recovery codes, this once."""
    require(actor, Role.VIEWER)
    with transaction.atomic():
        user = locked_user(actor.get_username())
        if user.second_factor_at is not None or not user.second_factor_key:
            raise Conflict("this second factor was set up already", remedy="reload the page")
        if not _code_fits(user, code):
            raise InvalidInput(
                "this code does not fit",
                remedy="enter the newest one; check the clock of your phone",
                field="code",
            )
        user.second_factor_at = timezone.now()
        user.save(update_fields=["second_factor_at"])
        audit(user, "second-factor.enrol", f"user:{user}", f"{user} set up a second factor")
        return _fresh_codes(user)


def renew_recovery_codes(actor: User) -> list[str]:
    """New recovery codes; those from before end."""
    require(actor, Role.VIEWER)
    with transaction.atomic():
        user = locked_user(actor.get_username())
        if user.second_factor_at is None:
            raise Conflict("your account has no second factor")
        audit(user, "second-factor.codes", f"user:{user}", f"new recovery codes of {user}")
        return _fresh_codes(user)


def reset_second_factor(actor: User, username: str, *, on_the_machine: bool = False) -> User:
    """Turn it off: one's own where one's role does not need it, or anyone's by an admin.

    `on_the_machine`: by `mm`, which may do it for the last admin, too.
    """
    own = actor.get_username() == username
    require(actor, Role.VIEWER if own else Role.ADMIN)
    with transaction.atomic():
        user = locked_user(username)
        if own and not on_the_machine and second_factor_required(user):
            raise Conflict(
                f"the role {user.role_now.value} needs a second factor",
                remedy="ask another admin to reset it when your phone is lost",
            )
        user.second_factor_key, user.second_factor_at = "", None
        user.save(update_fields=["second_factor_key", "second_factor_at"])
        user.recovery_codes.all().delete()
        if not own:
            end_sessions_of(user)
        audit(actor, "second-factor.reset", f"user:{user}", f"second factor of {user} turned off")
    return user


def require_second_factor(actor: User, roles: Iterable[str]) -> None:
    """Which roles need one; sessions of their people who have none end."""
    require(actor, Role.ADMIN)
    wanted = {Role(role) for role in roles}
    with transaction.atomic():
        SecondFactorRule.objects.exclude(role__in=wanted).delete()
        before = set(SecondFactorRule.objects.values_list("role", flat=True))
        for role in wanted - before:
            SecondFactorRule.objects.create(role=role)
        lacking = User.objects.filter(second_factor_at=None).exclude(pk=actor.pk)
        for user in lacking:
            if user.role_now in wanted - before and user.has_usable_password():
                end_sessions_of(user)
        names = ", ".join(sorted(wanted)) or "nobody"
        audit(actor, "second-factor.require", "user", f"second factor required for: {names}")


def second_factor_required(user: User) -> bool:
    """True where the person's role needs one."""
    return SecondFactorRule.objects.filter(role=user.role_now).exists()


def second_factor_fits(user: User, code: str) -> bool:
    """Check a code of the app, or use up a recovery code. The caller counts attempts."""
    with transaction.atomic():
        user = locked_user(user.get_username())
        if _code_fits(user, code):
            return True
        used, _ = user.recovery_codes.filter(digest=_digest(code)).delete()
        if used:
            left = user.recovery_codes.count()
            audit(
                user,
                "second-factor.recovery",
                f"user:{user}",
                f"{user} used a recovery code; {left} left",
            )
    return bool(used)


def _code_fits(user: User, code: str) -> bool:
    code = "".join(code.split())
    if not (user.second_factor_key and len(code) == DIGITS and code.isascii() and code.isdigit()):
        return False
    totp = TOTP(bytes.fromhex(user.second_factor_key), step=STEP_S, digits=DIGITS)
    if not totp.verify(int(code), tolerance=TOLERANCE, min_t=user.second_factor_step + 1):
        return False
    user.second_factor_step = totp.t()
    user.save(update_fields=["second_factor_step"])
    return True


def _fresh_codes(user: User) -> list[str]:
    codes = [
        "".join(secrets.choice(access.ALPHABET) for _ in range(RECOVERY_CHARACTERS))
        for _ in range(RECOVERY_CODES)
    ]
    user.recovery_codes.all().delete()
    RecoveryCode.objects.bulk_create(
        RecoveryCode(user=user, digest=_digest(code)) for code in codes
    )
    return [f"{code[:5]}-{code[5:]}" for code in codes]


def _digest(code: str) -> str:
    plain = code.replace("-", "").strip().lower()
    return access.key_digest(f"recovery:{plain}", pepper())
