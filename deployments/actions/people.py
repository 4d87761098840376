"""People, their roles and their API tokens."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from deployments.actions.attempts import LOGIN
from deployments.actions.keys import check_key_fields, end_playground_keys, pepper
from deployments.actions.permissions import audit, require
from deployments.broker import feed
from deployments.models import (
    Role,
    Scope,
    SecondFactorRule,
    Session,
    User,
    UserToken,
)
from mmadmin.core import access
from mmadmin.core.errors import Conflict, InvalidInput, NotFound

log = logging.getLogger(__name__)


def create_user(
    actor: User, *, username: str, password: str, role: Role | str = Role.VIEWER, email: str = ""
) -> User:
    """Add a person."""
    require(actor, Role.ADMIN)
    role = _role(role)
    user = User(username=username, role=role, email=email)
    check_password(password, user)
    user.set_password(password)
    try:
        user.full_clean(exclude=["password"])
    except ValidationError as error:
        raise InvalidInput(" ".join(error.messages), field="username") from error
    with transaction.atomic():
        user.save()
        audit(
            actor, "user.create", f"user:{username}", f"{username} is {role.value}", role=role.value
        )
    return user


def _role(role: Role | str) -> Role:
    try:
        return Role(role)
    except ValueError as error:
        raise InvalidInput(
            f"{role!r} is not a role", remedy=f"use {', '.join(Role.values)}", field="role"
        ) from error


def check_password(password: str, user: User) -> None:
    """Refuse a weak password. Raises `InvalidInput`."""
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise InvalidInput(" ".join(error.messages), field="password") from error


def locked_user(username: str) -> User:
    """The row of a person, locked until the transaction ends. Raises `NotFound`."""
    user = User.objects.select_for_update().filter(username=username).first()
    if user is None:
        raise NotFound(f"there is no user {username}")
    return user


def _keep_one_admin(user: User) -> None:
    others = User.objects.filter(is_active=True, role=Role.ADMIN).exclude(pk=user.pk)
    if user.role == Role.ADMIN and not others.exists():
        raise Conflict(f"{user} is the last admin", remedy="make someone else admin first")


def set_role(actor: User, username: str, role: Role | str) -> User:
    """Change a person's role."""
    require(actor, Role.ADMIN)
    role = _role(role)
    with transaction.atomic():
        user = locked_user(username)
        if role != Role.ADMIN:
            _keep_one_admin(user)
        _give_role(actor, user, role)
    return user


def _give_role(actor: User, user: User, role: Role) -> None:
    user.role = role
    user.is_staff = user.is_superuser = role == Role.ADMIN
    user.save(update_fields=["role", "is_staff", "is_superuser"])
    if user.second_factor_at is None and SecondFactorRule.objects.filter(role=role).exists():
        end_sessions_of(user)  # they set one up at the next login
    audit(actor, "user.role", f"user:{user}", f"{user} is {role.value}", role=role.value)


def arrive(subject: str, *, name: str, email: str, role: Role | None) -> User:
    """Somebody whom the identity provider vouches for; new people are viewers.

    Who they are is `subject` alone: an account with the same name or address is another person's.
    `role` is what their groups give, None when roles are given in the panel. The last admin stays
    admin.
    """
    with transaction.atomic():
        user = User.objects.select_for_update().filter(oidc_subject=subject).first()
        if user is None:
            user = User(username=_free_name(name), email=email, oidc_subject=subject)
            user.set_unusable_password()
            user.save()
            audit(user, "user.create", f"user:{user}", f"{user} came by single sign-on")
        if role is not None and role != user.role and user.is_active:
            try:
                if role != Role.ADMIN:
                    _keep_one_admin(user)
            except Conflict as error:
                log.warning("%s keeps the role: %s", user, error)
            else:
                _give_role(user, user, role)
    return user


NAME_CHARACTERS = 140


def _free_name(wanted: str) -> str:
    """A user name like the wanted one that nobody has."""
    name = re.sub(r"[^\w.@+-]+", "-", wanted).strip("-")[:NAME_CHARACTERS] or "person"
    taken = set(User.objects.filter(username__startswith=name).values_list("username", flat=True))
    numbers = itertools.count(2)
    found = name
    while found in taken:
        found = f"{name}-{next(numbers)}"
    return found


def set_user_active(actor: User, username: str, *, on: bool) -> User:
    """Let a person in, or keep them out; their history stays."""
    require(actor, Role.ADMIN)
    with transaction.atomic():
        user = locked_user(username)
        if not on:
            _keep_one_admin(user)
        user.is_active = on
        user.save(update_fields=["is_active"])
        if not on:
            _end_everything(user)
            end_playground_keys(user)
        verb = "enable" if on else "disable"
        audit(actor, f"user.{verb}", f"user:{username}", f"{verb} {username}")
    return user


def _end_everything(user: User) -> None:
    """End a person's logins and tokens: for good, also when the account comes back."""
    end_sessions_of(user)
    UserToken.objects.filter(user=user, revoked_at=None).update(revoked_at=timezone.now())


def end_sessions_of(user: User) -> None:
    """End a person's logins."""
    Session.objects.filter(user_id=user.pk).delete()
    _sessions_changed(user)


def set_password(actor: User, username: str, password: str) -> User:
    """Set a password: one's own, or anyone's by an admin. Ends the person's logins and tokens.

    Whoever sets their own has proved before that it is they (`accounts.passwords.confirm`).
    """
    if actor.get_username() != username:
        require(actor, Role.ADMIN)
    else:
        require(actor, Role.VIEWER)
    with transaction.atomic():
        user = locked_user(username)
        check_password(password, user)
        user.set_password(password)
        user.save(update_fields=["password"])
        _end_everything(user)
        audit(actor, "user.password", f"user:{username}", f"new password of {username}")
    return user


def close_first_steps(actor: User) -> None:
    """Take the list of first steps off the person's overview."""
    require(actor, Role.OPERATOR)
    actor.first_steps_closed_at = timezone.now()
    actor.save(update_fields=["first_steps_closed_at"])


def edit_user(
    actor: User,
    username: str,
    *,
    role: Role | str | None = None,
    active: bool | None = None,
    password: str | None = None,
) -> User:
    """Change several things of a person at once; all of it or nothing."""
    with transaction.atomic():
        if role is not None:
            set_role(actor, username, role)
        if active is not None:
            set_user_active(actor, username, on=active)
        if password is not None:
            set_password(actor, username, password)
        if actor.get_username() != username:
            require(actor, Role.ADMIN)
        return locked_user(username)


def logged_in(user: User) -> None:
    """Record a login."""
    audit(user, LOGIN, f"user:{user}", f"{user} logged in")


def logged_out(user: User) -> None:
    """Record a logout, and tell the open pages of that session."""
    audit(user, "session.logout", f"user:{user}", f"{user} logged out")
    _sessions_changed(user)


def _sessions_changed(user: User) -> None:
    """Let open pages see at once whether their session is still there."""
    transaction.on_commit(lambda: feed.announce(feed.SESSION, user.pk))


def end_session(actor: User, public_id: str) -> None:
    """End one of one's own logins."""
    require(actor, Role.VIEWER)
    with transaction.atomic():
        for session in Session.objects.filter(user_id=actor.pk):
            if session.public_id == public_id:
                session.delete()
                _sessions_changed(actor)
                audit(actor, "session.end", f"user:{actor}", f"a login of {actor} ended")
                return
    raise NotFound("this login has ended already")


def end_other_sessions(actor: User, keep: str) -> int:
    """End all of one's own logins but the one with this key; returns how many."""
    require(actor, Role.VIEWER)
    with transaction.atomic():
        ended, _ = Session.objects.filter(user_id=actor.pk).exclude(session_key=keep).delete()
        _sessions_changed(actor)
        audit(actor, "session.end", f"user:{actor}", f"{ended} other logins of {actor} ended")
    return ended


TOKEN_LASTS = timedelta(days=90)
"""The life of a token whose maker names no end."""

SCOPES_OF: dict[Role, tuple[Scope, ...]] = {
    Role.VIEWER: (Scope.READ,),
    Role.OPERATOR: (Scope.READ, Scope.DEPLOY),
    Role.ADMIN: tuple(Scope),
}
"""What a role may put into a token."""


def scopes_for(user: User) -> tuple[Scope, ...]:
    """The scopes that a person's new token may have: their role's, and no more than who asks."""
    return tuple(scope for scope in SCOPES_OF[user.role_now] if user.in_scope(scope))


def issue_token(
    actor: User,
    *,
    note: str = "",
    scopes: Sequence[str] = (Scope.READ,),
    expires_at: datetime | None = None,
) -> tuple[UserToken, str]:
    """Make a personal token for the REST API; its text is returned this once.

    Whoever makes one has proved before that it is they (`accounts.passwords.confirm`). `expires_at`
    None = it does not end.
    """
    require(actor, Role.VIEWER)
    check_key_fields({"note": note, "expires_at": expires_at})
    allowed = scopes_for(actor)
    if unknown := [scope for scope in scopes if scope not in allowed]:
        raise InvalidInput(
            f"your token cannot have the scope {', '.join(unknown)}",
            remedy=f"use {', '.join(allowed)}",
            field="scopes",
        )
    new = access.new_key(pepper())
    text = TOKEN_PREFIX + new.text.removeprefix("sk-mm-")
    with transaction.atomic():
        token = UserToken.objects.create(
            user=actor,
            token_id=new.key_id,
            digest=access.key_digest(text, pepper()),
            note=note.strip(),
            scopes=[scope.value for scope in allowed if scope in {Scope.READ, *scopes}],
            expires_at=expires_at,
        )
        audit(
            actor,
            "token.issue",
            f"token:{token.token_id}",
            f"token of {actor}: {', '.join(token.scopes)}",
            scopes=token.scopes,
        )
    return token, text


TOKEN_PREFIX = "pat-mm-"  # noqa: S105


TOKEN_SEEN_EVERY = timedelta(minutes=1)


def token_user(text: str) -> User | None:
    """The person whose personal token this is, while both are valid; notes that it was used."""
    if not text.startswith(TOKEN_PREFIX) or not settings.KEY_PEPPER:
        return None
    token_id = access.parse_key("sk-mm-" + text.removeprefix(TOKEN_PREFIX))
    token = UserToken.objects.select_related("user").filter(token_id=token_id).first()
    if token is None or not access.key_matches(text, token.digest, settings.KEY_PEPPER):
        return None
    if token.state != "active" or not token.user.is_active:
        return None
    now = timezone.now()
    if token.last_used_at is None or token.last_used_at < now - TOKEN_SEEN_EVERY:
        UserToken.objects.filter(pk=token.pk).update(last_used_at=now)
    token.user.scopes = frozenset(token.scopes)
    return token.user


def revoke_token(actor: User, token_id: str) -> UserToken:
    """End a personal token: one's own, or anyone's by an admin."""
    require(actor, Role.VIEWER)
    with transaction.atomic():
        token = UserToken.objects.select_for_update().filter(token_id=token_id).first()
        if token is None or (token.user_id != actor.pk and not actor.at_least(Role.ADMIN)):
            raise NotFound(f"there is no token {token_id}")
        if token.revoked_at is None:
            token.revoked_at = timezone.now()
            token.save(update_fields=["revoked_at"])
            audit(actor, "token.revoke", f"token:{token_id}", f"token {token_id} revoked")
    return token
