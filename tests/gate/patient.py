"""The gate as tests run it: `python -m tests.gate.patient`, patient with a busy machine.

Two things in the real gate depend on time. It gives a silent broker up after half a second or two,
which a processor with much else to do is late for as well. And it looks by a timer, once a second,
for what a nudge should have reported: a test that wants to see the nudge has to be quicker, or to
switch the timer off with `TEST_GATE_TIMERS=off`.
"""

from __future__ import annotations

import os
import sys

from mmadmin import gateway
from mmadmin.gate import directory, heartbeat, limits, upstream, worker

PATIENCE_S = 60.0
NEVER_S = 3600.0


def patient() -> None:
    """Wait for a broker that is slow; use timers only where the test asks for them."""
    limits.ASK_TIMEOUT_S = PATIENCE_S
    worker.PEER_TIMEOUT_S = upstream.CONNECT_TIMEOUT_S = PATIENCE_S
    directory.ANSWER_S = directory.CONNECT_S = PATIENCE_S
    heartbeat.PRESENCE_EXPIRES_S = int(PATIENCE_S)
    if os.environ.get("TEST_GATE_TIMERS") == "off":
        directory.TIMER_S = heartbeat.PUBLISH_EVERY_S = NEVER_S


if __name__ == "__main__":
    patient()
    gateway.COMMAND = (sys.executable, "-m", "tests.gate.patient")
    sys.exit(gateway.main(sys.argv[1:]))
