"""The door for passwords: every check of one passes here, where attempts are counted.

Checking a password is expensive on purpose. Few are checked at once and few wait; the rest are
refused, so that guessing cannot take the threads and processors of the panel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth import authenticate
from django.contrib.auth.backends import ModelBackend
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.utils import timezone

from deployments.accounts.sessions import BEGAN
from deployments.actions import attempts
from deployments.models import User
from mmadmin.core.errors import InvalidInput, Refused, TooMany

AT_ONCE = 2
WAITING = 4
"""Both together stay far below what `panel.admission` lets in."""
BUSY_S = 2
FRESH = timedelta(minutes=10)
"""Whoever logged in so recently need not enter the password again."""


class Turns:
    """Lets a few in at once and a few more wait; refuses the rest."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._free = threading.BoundedSemaphore(at_once)
        self._room = threading.BoundedSemaphore(at_once + waiting)

    @contextmanager
    def one(self) -> Iterator[None]:
        """A turn. Raises `TooMany` at once when too many wait already."""
        if not self._room.acquire(blocking=False):
            raise TooMany(
                "too many people are logging in at once",
                remedy="try again in a few seconds",
                retry_after_s=BUSY_S,
            )
        try:
            with self._free:
                yield
        finally:
            self._room.release()


turns = Turns(AT_ONCE, WAITING)


class Backend(ModelBackend):
    """Name and password, counted. Raises `TooMany` through `django.contrib.auth.authenticate`."""

    def authenticate(
        self,
        request: HttpRequest | None,
        username: str | None = None,
        password: str | None = None,
        **kwargs: Any,
    ) -> User | None:
        """The person, or None."""
        if username is None or password is None or settings.SSO_ONLY:
            return None
        name = attempts.normalised(username)
        with turns.one():
            attempts.begin_attempt(name)
            user: User | None = super().authenticate(request, name, password, **kwargs)
        if user is None:
            attempts.attempt_failed(name)
            raise PermissionDenied  # no other backend is asked about this password
        attempts.attempt_succeeded(name, done=user.second_factor_at is None)
        return user


def confirm(request: HttpRequest, user: User, password: str) -> None:
    """Make sure that the person is there, not only their open session or their token.

    By their password, or by a login that is not older than `FRESH`. Raises `InvalidInput`,
    `Refused` or `TooMany`.
    """
    if password:
        if authenticate(request, username=user.get_username(), password=password) != user:
            raise InvalidInput("the current password is incorrect", field="current_password")
        attempts.attempt_succeeded(attempts.normalised(user.get_username()))
        return
    began = request.session.get(BEGAN) if user.scopes is None else None
    if began and timezone.now() - datetime.fromisoformat(began) < FRESH:
        return
    if user.has_usable_password():
        raise InvalidInput(
            "this needs your current password",
            remedy="enter it, or log in again",
            field="current_password",
        )
    raise Refused(
        "this needs a fresh login",
        remedy=f"log out, log in again, and do it within {FRESH.seconds // 60} minutes",
    )
