"""Callbacks by which long work reports what it does, and the one that ignores the reports."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all); may raise to stop."""

Report = Callable[[str], None]
"""A line for people; may raise to stop."""


def silent(*_reported: object) -> None:
    """Report nothing: the default of every callback."""
