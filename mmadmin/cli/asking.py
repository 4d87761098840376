"""Asking the network while a person waits: what is asked is said at once, on stderr.

Whoever waits before a screen is told soon that a hub is away, instead of being kept for half a
minute; Ctrl-C ends it at any moment, and nothing has been written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from mmadmin.cli.output import errors, escape
from mmadmin.core.callbacks import Report, silent

if TYPE_CHECKING:
    from mmadmin.host.hub import Hub


@contextmanager
def asking(what: str, *, quiet: bool) -> Iterator[Report]:
    """Say what is under way, with a spinner on a terminal; yields how to say more."""
    if quiet:
        yield silent
    elif errors.is_terminal:
        with errors.status(f"{escape(what)} …"):
            yield _say
    else:
        _say(f"{what} …")
        yield _say


def hub_for(say: Report) -> Hub:
    """The configured hub, asked on behalf of a person who waits."""
    from mmadmin.host.hub import ASKED_BY_A_PERSON, Hub

    return replace(Hub.from_env(), policy=ASKED_BY_A_PERSON, report=say)


def _say(line: str) -> None:
    errors.print(f"[dim]{escape(line)}[/]")
