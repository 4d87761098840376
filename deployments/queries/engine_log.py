"""The end of an engine's own log, where the panel runs on the engine's host.

A read of this host's disk: other hosts' logs are read on their own machines (`mm logs NAME/N`).
What an engine prints is for operators: it holds no key and, at the levels that are used, no prompt.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from django.conf import settings

from deployments.models import Replica, Role, User
from deployments.queries import require
from mmadmin.core.errors import NotFound

MOST_BYTES = 128 * 1024
MOST_LINES = 1000


@dataclass(frozen=True, slots=True)
class EngineLog:
    """What a generation's newest engine said last."""

    replica: Replica
    here: bool
    """False when it runs on another host, whose disk is not read from here."""
    text: str


def engine_log(actor: User, name: str, number: int, *, lines: int = 300) -> EngineLog:
    """The last lines of a generation's engine. Raises `NotFound` where it never had one."""
    require(actor, Role.OPERATOR)
    replica = (
        Replica.objects.filter(generation__deployment__name=name, generation__number=number)
        .select_related("host")
        .order_by("-pk")
        .first()
    )
    if replica is None:
        raise NotFound(
            f"{name}/{number} has never run an engine",
            remedy="its builds and activations have logs of their own",
        )
    here = replica.host.name == settings.HOST_NAME
    return EngineLog(replica, here, _tail(replica.uid, min(lines, MOST_LINES)) if here else "")


def _tail(uid: str, lines: int) -> str:
    """Whole lines from the end of the file; empty when there is none yet."""
    path = settings.HOME.engine_log(uid)
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_BYTES))
            found = file.read().decode(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return ""
    if size > MOST_BYTES:
        found = found[1:]
    return "".join(found[-lines:])
