"""Progress of questions to the hub while a person waits, on stderr.

A person at a screen learns within seconds that the hub is down, instead of waiting half a minute.
Ctrl-C ends the command at any moment; nothing has been written.
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
def reporting(what: str, *, quiet: bool) -> Iterator[Report]:
    """Show what is under way, with a spinner on a terminal; yields a callback for more lines."""
    if quiet:
        yield silent
    elif errors.is_terminal:
        with errors.status(f"{escape(what)} …"):
            yield _report
    else:
        _report(f"{what} …")
        yield _report


def hub_for(on_progress: Report) -> Hub:
    """The configured hub, with the short patience of a person who waits."""
    from mmadmin.host.hub import ASKED_BY_A_PERSON, Hub

    return replace(Hub.from_env(), policy=ASKED_BY_A_PERSON, report=on_progress)


def _report(line: str) -> None:
    errors.print(f"[dim]{escape(line)}[/]")
