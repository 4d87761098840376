"""The supervisor's watchdog: `python -m mmadmin.host.watchdog <MM_HOME>`, one of its programs.

supervisord restarts its programs when they die; the watchdog restarts supervisord when that dies,
by `SIGKILL` or for lack of memory. It first ends what was left running, because supervisord cannot
adopt processes, and then starts the daemon with all its services and engines. Each of the two
brings the other back; a reboot, or the death of both at once, is left to the machine's own init
(docs/running.md). An ordinary end (`mm down`, SIGTERM to supervisord) stops the watchdog first.

It also keeps the record of the programs' processes fresh (without it, a program that hides its
environment could not be found once its parent is dead), and restarts services that supervisord has
given up, for example because a port was taken or the disk was full. A panel or gate that runs and
answers nothing for a minute is killed, and so started again. Engines are left to the watch.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mmadmin.core.errors import MmError, Unreachable
from mmadmin.core.home import Home, Ports
from mmadmin.host.process_tree import members
from mmadmin.host.service_health import START_S, silent_services
from mmadmin.host.supervisor import ProgramSpec, ProgramStatus, Supervisor
from mmadmin.host.termination import end_processes

NAME = "watchdog"
PRIORITY = 999
"""Last to start and first to stop: an ordinary shutdown must not look like a death."""
POLL_S = 0.5
LOOK_S = 2.0
"""Between two looks at the programs."""
RETRY_S = 30.0
"""Between two attempts at services that were given up."""
HUNG_S = 60.0
"""A service that runs and does not answer for this long hangs."""
HUNG_PATIENCE_S = 5.0
"""What it gets to end after SIGTERM; then it is killed and the supervisor starts it again."""
PAUSE_S = 1.0
"""After a failed attempt, doubled with each one."""
PAUSE_MAX_S = 60.0
log = logging.getLogger("mmadmin.watchdog")


def program(home: Home, env: Mapping[str, str]) -> ProgramSpec:
    """The watchdog as the supervisor runs it."""
    return ProgramSpec(
        name=NAME,
        argv=[sys.executable, "-m", "mmadmin.host.watchdog", str(home.root)],
        env=env,
        cwd=Path(__file__).resolve().parents[2],
        log=home.logs / f"{NAME}.log",
        startsecs=1,
        startretries=5,
        stopwaitsecs=10,
        priority=PRIORITY,
    )


def watch(home: Home) -> None:
    """Wait for the supervisor's death, then bring it back."""
    logging.basicConfig(
        filename=home.logs / f"{NAME}.log", format="%(asctime)s %(message)s", level=logging.INFO
    )
    daemon = _daemon_pid(home)
    services = Services(Supervisor(home), Ports.from_env())
    look_at = time.monotonic()
    while os.getppid() == daemon:
        if time.monotonic() >= look_at:
            with suppress(Unreachable):  # it is ending
                services.look()
            look_at = time.monotonic() + LOOK_S
        time.sleep(POLL_S)
    pause_s = PAUSE_S
    while not _brought_back(home):
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, PAUSE_MAX_S)


class Services:
    """The services that the watchdog looks after, and when it did something about them."""

    def __init__(self, supervisor: Supervisor, ports: Ports) -> None:
        self._supervisor = supervisor
        self._home = supervisor.home
        self._ports = ports
        self._retry_at = time.monotonic()
        self._silent_since: dict[int, float] = {}
        """Pid → the time of the first look without an answer."""

    def look(self) -> None:
        """Record the programs' processes; restart what was given up, end what hangs."""
        programs = self._supervisor.status()
        given_up = [program.name for program in programs if program.state == "FATAL"]
        self._start_again([name for name in given_up if self._supervisor.is_service(name)])
        self._end_hung(silent_services(programs, self._ports))
        self._name_broker_again(programs)

    def _start_again(self, names: list[str]) -> None:
        if not names or time.monotonic() < self._retry_at:
            return
        for name in names:
            log.info("the supervisor gave up %s: starting it again", name)
            self._supervisor.start_again(name)
        self._retry_at = time.monotonic() + RETRY_S

    def _name_broker_again(self, programs: list[ProgramStatus]) -> None:
        """Restart a broker whose socket somebody removed; it keeps its data, clients come back."""
        for program in programs:
            runs = program.state == "RUNNING" and program.uptime_s >= START_S
            if program.name == "broker" and runs and not self._home.broker_socket.exists():
                log.warning("the broker's socket was removed: restarting it")
                self._supervisor.restart_program(program.name)

    def _end_hung(self, silent: list[ProgramStatus]) -> None:
        now = time.monotonic()
        found = {program.pid: program.name for program in silent if program.pid is not None}
        self._silent_since = {pid: self._silent_since.get(pid, now) for pid in found}
        for pid, since in self._silent_since.items():
            if now - since >= HUNG_S:
                log.warning("%s has not answered for %.0f s: ending it", found[pid], now - since)
                end_processes(members(pid), patience_s=HUNG_PATIENCE_S)


def _daemon_pid(home: Home) -> int:
    """What supervisord wrote before it started any program; 0 = it could not."""
    try:
        return int((home.run_dir / "supervisord.pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _brought_back(home: Home) -> bool:
    """One attempt; True when the supervisor runs, whoever started it."""
    supervisor = Supervisor(home)
    try:
        with supervisor.alone("the watchdog"):
            if supervisor.state() != "absent":
                return True
            log.info("the supervisor is gone: starting it again")
            for ended in supervisor.revive():
                log.info("ended what it left: %s", ended)
            log.info("the supervisor runs again")
    except (MmError, OSError) as error:
        log.warning("the supervisor did not come back: %s", error)
        return False
    return True


if __name__ == "__main__":
    watch(Home(Path(sys.argv[1])))
