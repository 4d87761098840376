"""Secrets on their way to the one page that shows them.

A form that creates a secret redirects to a page that shows it, so that reloading that page does not
create another one. Until then the secret is kept in this process's memory, never on disk.
"""

from __future__ import annotations

import threading
import time

from deployments.models import User

KEPT_S = 300.0

_secrets: dict[tuple[int, str], tuple[float, str]] = {}
_guard = threading.Lock()


def keep(owner: User, subject: str, text: str) -> None:
    """Keep a secret for the person who created it."""
    with _guard:
        now = time.monotonic()
        for old in [known for known, (until, _) in _secrets.items() if until < now]:
            del _secrets[old]
        _secrets[owner.pk, subject] = (now + KEPT_S, text)


def take(owner: User, subject: str) -> str | None:
    """The secret, the first time it is asked for; None afterwards."""
    with _guard:
        until, text = _secrets.pop((owner.pk, subject), (0.0, ""))
    return text if until > time.monotonic() else None
