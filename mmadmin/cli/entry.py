"""Where `mm` begins, and where Ctrl-C ends it: quietly, with 130, whenever it comes.

Python raises `KeyboardInterrupt` wherever the main thread is. While the command is still being
loaded, nothing else could catch it. In a finalizer that the garbage collector called, Python only
reports it as ignored and the command goes on: such an interrupt is sent again a moment later.
"""

from __future__ import annotations

import sys

AGAIN_S = 0.05
"""Long enough to leave the finalizer and its caller."""


def main() -> None:
    """Load `mm` and run it."""
    sys.unraisablehook = _send_interrupt_again
    try:
        from mmadmin.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _send_interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    import signal
    import threading

    main_thread = threading.main_thread().ident
    timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main_thread, signal.SIGINT))
    timer.daemon = True
    timer.start()
