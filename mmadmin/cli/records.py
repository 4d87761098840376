"""The way from the command line to the records: Django set up late, and who is acting.

`mm` speaks for a person: by default the first administrator (whoever can run `mm` owns the state
folder anyway), with `--as USER` for another. Permission checks are those of the actions.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import TYPE_CHECKING

from mmadmin.cli.installation import is_set_up
from mmadmin.core.errors import Conflict, NotFound, Unreachable
from mmadmin.core.home import Home

if TYPE_CHECKING:
    from deployments.models import User

ACTING_AS: ContextVar[str] = ContextVar("acting_as", default="")
"""The user name given with `--as`."""


def connect() -> None:
    """Load Django; raises `Conflict` where nothing is set up. Idempotent."""
    home = Home.from_env()
    if not is_set_up(home) and not os.environ.get("DATABASE_URL"):
        raise Conflict(f"nothing is set up in {home.root}", remedy="run `make up` or `mm up` first")
    import django

    django.setup()


def actor() -> User:
    """The person for whom `mm` acts."""
    connect()
    from django.db import DatabaseError

    from deployments.models import Role, User

    name = ACTING_AS.get()
    people = User.objects.filter(is_active=True)
    try:
        if name:
            person = people.filter(username=name).first()
        else:
            person = people.filter(role=Role.ADMIN).order_by("id").first()
    except DatabaseError as error:
        raise Unreachable(
            f"the database does not answer: {error}", remedy="run `mm up`, or check DATABASE_URL"
        ) from error
    if person is None:
        raise NotFound(
            f"there is no user `{name}`" if name else "there is no administrator",
            remedy="look at the people of the panel" if name else "run `mm up`: it makes one",
        )
    return person
