"""Runs inside supervisord: its socket is made again when somebody removed it.

A socket that has lost its name cannot be reached any more, and supervisord makes its own only when
it starts. Programs that clean up /tmp remove such files; engines must not be restarted for that.
supervisord loads this as an extension of its interface (`supervisord.conf`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from supervisor import events

KEPT = "_mmadmin_keeps_socket"
"""Marks a supervisord that is looked after already: a new server makes its extensions again."""


class Extension:
    """An interface without methods."""


def keep(supervisord: Any) -> Extension:
    """Look every few seconds whether the socket is there."""
    if not getattr(supervisord, KEPT, False):
        setattr(supervisord, KEPT, True)
        events.subscribe(events.Tick5Event, lambda _event: _look(supervisord))
    return Extension()


def _look(supervisord: Any) -> None:
    options = supervisord.options
    paths = [Path(config["file"]) for config, _ in options.httpservers if "file" in config]
    if all(path.exists() for path in paths):
        return
    options.logger.info("the socket was removed: making it again")
    try:
        for path in paths:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _, server in options.httpservers:
            if (number := server.socket.fileno()) >= 0:
                options.poller.unregister_readable(number)
                server.close()
        options.httpservers = options.make_http_servers(supervisord)
    except Exception as error:  # noqa: BLE001 (it would end supervisord and every engine)
        options.logger.critical("the socket could not be made: %(error)s", error=error)
