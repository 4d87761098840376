"""Sessions in the database, each with whose it is and where it began (`SESSION_ENGINE`).

So that people see their own logins and can end them. The facts are put into the session at the
login, and copied into the row's columns whenever it is written.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.auth import SESSION_KEY, user_logged_in, user_logged_out
from django.contrib.sessions.backends.db import SessionStore as DatabaseStore
from django.http import HttpRequest
from django.utils import timezone

from deployments import actions
from deployments.accounts.middleware import client_address

if TYPE_CHECKING:
    from deployments.models import User

ADDRESS, AGENT, BEGAN = "mm_address", "mm_agent", "mm_began"
AGENT_CHARACTERS = 255
NOTED_EVERY = timedelta(seconds=20)
"""A session's row is written at most so often because of a request."""


class SessionStore(DatabaseStore):
    """Django's own store with a few columns more."""

    @classmethod
    def get_model_class(cls) -> Any:
        """The table."""
        from deployments.models import Session  # noqa: PLC0415 (models are not loaded yet above)

        return Session

    def create_model_instance(self, data: dict[str, Any]) -> Any:
        """The row of the session as it is."""
        return _with_facts(super().create_model_instance(data), data)

    async def acreate_model_instance(self, data: dict[str, Any]) -> Any:
        """The same, for asynchronous views."""
        return _with_facts(await super().acreate_model_instance(data), data)

    def _get_session_from_db(self) -> Any:
        """The row; a request postpones its end."""
        row = super()._get_session_from_db()  # type: ignore[misc]
        if row is not None and (later := _later_end(row)):
            type(row).objects.filter(pk=row.pk).update(expire_date=later)
        return row

    async def _aget_session_from_db(self) -> Any:
        """The same, for asynchronous views."""
        row = await super()._aget_session_from_db()  # type: ignore[misc]
        if row is not None and (later := _later_end(row)):
            await type(row).objects.filter(pk=row.pk).aupdate(expire_date=later)
        return row


def _with_facts(row: Any, data: dict[str, Any]) -> Any:
    row.user_id = int(data[SESSION_KEY]) if SESSION_KEY in data else None
    row.address = data.get(ADDRESS)
    row.agent = data.get(AGENT, "")
    row.began_at = datetime.fromisoformat(data[BEGAN]) if BEGAN in data else timezone.now()
    row.expire_date = _end(row)
    return row


def _end(row: Any) -> datetime:
    """When it ends without another request."""
    idle = timezone.now() + timedelta(seconds=settings.SESSION_IDLE_S)
    longest: datetime = row.began_at + timedelta(seconds=settings.SESSION_COOKIE_AGE)
    return min(idle, longest)


def _later_end(row: Any) -> datetime | None:
    """A new end, where it is enough later to be worth a write."""
    end = _end(row)
    return end if end - row.expire_date > NOTED_EVERY else None


def note_login(request: HttpRequest, user: User, **_: object) -> None:
    """Remember where the login came from, and record it (on `user_logged_in`)."""
    request.session[ADDRESS] = client_address(request)
    request.session[AGENT] = request.headers.get("User-Agent", "")[:AGENT_CHARACTERS]
    request.session[BEGAN] = timezone.now().isoformat()
    actions.logged_in(user)


def note_logout(user: User | None, **_: object) -> None:
    """Record it (on `user_logged_out`); somebody whose session had ended already is nobody."""
    if user is not None:
        actions.logged_out(user)


user_logged_in.connect(note_login)
user_logged_out.connect(note_logout)
