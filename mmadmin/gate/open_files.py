"""How many files and connections a server may have open."""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 65536
"""Some systems allow a billion, which costs whoever walks through all of them."""


def raise_limit() -> int:
    """Raise the soft limit of open files as far as the hard one allows; the new limit.

    A login shell's 1024 are taken by as many idle connections, and nobody else gets in.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = ENOUGH if hard == unlimited else min(hard, ENOUGH)
    if soft == unlimited or soft >= wanted:
        return soft
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
