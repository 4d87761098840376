"""The way from the command line to the records: Django set up late, and who is acting.

`mm` speaks for a person: by default the first administrator (whoever can run `mm` owns the state
folder anyway), with `--as USER` for another. Permission checks are those of the actions.
"""

from __future__ import annotations

import logging
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, cast

from mmadmin.cli.installation import is_set_up, panel_url
from mmadmin.cli.output import errors, escape
from mmadmin.core.errors import Conflict, NotFound, Unreachable
from mmadmin.core.home import Home, Ports

if TYPE_CHECKING:
    from deployments.models import User

ACTING_AS: ContextVar[str] = ContextVar("acting_as", default="")
"""The user name given with `--as`."""

RECORDS = ("django.contrib.auth", "django.contrib.contenttypes", "deployments")
"""The Django apps that keep records which `mm` reads and writes; pages need more."""

MOST = 2**31 - 1
"""The largest number that a record may have."""


class Unsent(logging.Filter):
    """Explains that the broker did not take a job, which is kept; services log a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Print the explanation instead of the line."""
        from mmadmin.host.supervisor import Supervisor

        kind, number, error = cast("tuple[str, int, Exception]", record.args)
        what = f"{kind} {number}".lower()
        if os.environ.get("REDIS_URL") or Supervisor(Home.from_env()).running():
            errors.print(
                f"[yellow]the broker does not answer[/] ({escape(str(error))}); {what} is kept and "
                "begins once it does. See: mm doctor"
            )
        else:
            errors.print(
                f"[yellow]nothing runs here[/]; {what} is kept and begins then. Start it: mm up"
            )
        return False


UNSENT = Unsent()


def connect() -> None:
    """Load Django; raises `Conflict` where nothing is set up. Idempotent."""
    home = Home.from_env()
    if not is_set_up(home) and not os.environ.get("DATABASE_URL"):
        raise Conflict(f"nothing is set up in {home.root}", remedy="run `make up` or `mm up` first")
    from django.apps import apps

    apps.populate(RECORDS)
    logging.getLogger("deployments.broker.queue").addFilter(UNSENT)


def on_host() -> bool:
    """True for the user that mmadmin runs as, and root: whom no file of ours is kept from."""
    return os.geteuid() in {0, Home.from_env().root.stat().st_uid}


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
        if not name:
            raise NotFound("there is no administrator", remedy="run `mm up`: it makes one")
        raise NotFound(
            f"there is no user `{name}`, or it is deactivated",
            remedy=f"the panel's page People lists them: {panel_url(Ports.from_env())}/people/",
        )
    return person
