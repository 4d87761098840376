"""Brings a killed supervisord back: `python -m mmadmin.host.keeper <MM_HOME>`, one of its programs.

supervisord starts its programs again when they die; this one starts supervisord again when that
dies, by `SIGKILL` or for lack of memory. It then ends what was left running, because supervisord
cannot adopt processes, and starts the daemon with all that it had: services and engines. So each
of the two brings the other back; a reboot, or both killed at once, is left to the machine's own
init (docs/running.md). An ordinary end (`mm down`, SIGTERM to supervisord) stops the keeper first.

Meanwhile it keeps the record of the programs' processes fresh: one that hides its environment can
be found by that alone once its parent is dead.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from mmadmin.core.errors import MmError, Unreachable
from mmadmin.core.home import Home
from mmadmin.host.supervisor import ProgramSpec, Supervisor

NAME = "keeper"
PRIORITY = 999
"""Last to start and first to stop: an ordinary shutdown must not look like a death."""
POLL_S = 0.5
RECORD_EVERY = 4
"""Looks at the daemon between two looks at its programs."""
PAUSE_S = 1.0
"""After a failed attempt, doubled with each one."""
PAUSE_MAX_S = 60.0
log = logging.getLogger("mmadmin.keeper")


def program(home: Home) -> ProgramSpec:
    """The keeper as the supervisor runs it."""
    return ProgramSpec(
        name=NAME,
        argv=[sys.executable, "-m", "mmadmin.host.keeper", str(home.root)],
        cwd=Path(__file__).resolve().parents[2],
        log=home.logs / f"{NAME}.log",
        startsecs=1,
        startretries=5,
        stopwaitsecs=10,
        priority=PRIORITY,
    )


def keep(home: Home) -> None:
    """Wait for the supervisor's death, then bring it back."""
    daemon = _daemon_pid(home)
    looks = 0
    while os.getppid() == daemon:
        if looks % RECORD_EVERY == 0:
            with suppress(Unreachable):  # it is ending, in one way or the other
                Supervisor(home).status()
        looks += 1
        time.sleep(POLL_S)
    logging.basicConfig(
        filename=home.logs / f"{NAME}.log",
        format="%(asctime)s %(message)s",
        level=logging.INFO,
    )
    pause_s = PAUSE_S
    while not _brought_back(home):
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, PAUSE_MAX_S)


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
        with supervisor.alone("the keeper"):
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
    keep(Home(Path(sys.argv[1])))
