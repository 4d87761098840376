"""Ctrl-C is heard at whatever moment it comes.

Python raises `KeyboardInterrupt` wherever the main thread is. Where that is a finalizer that the
garbage collector has called, the exception is reported as ignored, and the command goes on as if
nothing had been pressed (importing Celery leaves thousands of finalizers behind). Here such an
interrupt is given again, a moment later.
"""

from __future__ import annotations

import signal
import sys
import threading

AGAIN_S = 0.05
"""Long enough for the finalizer, and whoever called it, to be left."""


def hear_every_interrupt() -> None:
    """Have interrupts that fell into a finalizer delivered again."""
    sys.unraisablehook = _again


def _again(ignored: sys.UnraisableHookArgs) -> None:
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    main = threading.main_thread().ident
    timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))
    timer.daemon = True
    timer.start()
