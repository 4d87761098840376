"""Whether panel and gate answer: a program can run and serve nobody."""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping
from dataclasses import dataclass

from mmadmin.core.home import DEFAULT_BIND, Ports, own_address
from mmadmin.host.supervisor import ProgramStatus

ANSWER_S = 2.0
START_S = 10
"""A service that has just been started may not answer yet."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A path of a service on this machine that answers 200 while it works."""

    address: str
    port: int

    def passes(self) -> bool:
        """Ask. Blocking, for `ANSWER_S` at most."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=ANSWER_S)
        try:
            connection.request("GET", "/healthz", headers={"Host": "localhost"})
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def health_checks(ports: Ports, env: Mapping[str, str] = os.environ) -> dict[str, HealthCheck]:
    """The checks of panel and gate by the name of the service."""
    return {
        "panel": HealthCheck(own_address(env), ports.panel),
        "gate": HealthCheck(DEFAULT_BIND, ports.metrics),
    }


def silent_services(programs: list[ProgramStatus], ports: Ports) -> list[ProgramStatus]:
    """Services that run and do not answer."""
    checks = health_checks(ports)
    return [
        program
        for program in programs
        if program.state == "RUNNING"
        and program.uptime_s >= START_S
        and (check := checks.get(program.name)) is not None
        and not check.passes()
    ]
