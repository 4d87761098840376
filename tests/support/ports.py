"""TCP ports for servers that tests start: nobody else is given them while the tests run.

A port that the kernel handed out and that was let go again is anybody's until the server binds it:
the kernel may give it to a connection, or to another server. So these lie below the kernel's own
range, and each is claimed once on this machine, by a name in the abstract socket namespace that is
gone with the process that holds it.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from pathlib import Path

FIRST, END = 10_000, 32_000
FEWEST = 1_000
"""Where the kernel's own range leaves less below it, all ports are taken alike."""
_claims: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on and that nobody else will be given; they follow each other."""
    for first in _turns:
        run = range(first, first + count)
        if run.stop > _END:
            continue
        claimed: list[socket.socket] = []
        for port in run:
            claim = _claimed(port)
            if claim is None:
                break
            claimed.append(claim)
        else:
            _claims.extend(claimed)
            return list(run)
        for claim in claimed:
            claim.close()
    raise RuntimeError("every port is taken")


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def _claimed(port: int) -> socket.socket | None:
    """The claim on a port; None when somebody else has it, or listens there."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0mmadmin-test-port-{port}")
        with socket.socket() as listener:
            listener.bind(("", port))
    except OSError:
        claim.close()
        return None
    return claim


def _bounds() -> tuple[int, int]:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return (FIRST, min(END, lowest)) if lowest >= FIRST + FEWEST else (FIRST, END)


@atexit.register
def _let_go() -> None:
    for claim in _claims:
        claim.close()


_START, _END = _bounds()
_turns = itertools.chain(
    range(_START + os.getpid() * 64 % (_END - _START), _END), range(_START, _END)
)
"""Each run begins elsewhere, so that runs beside each other seldom ask for the same."""
