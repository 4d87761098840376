"""Ctrl-C at an awkward moment."""

from __future__ import annotations

import subprocess
import sys

PATIENCE_S = 120
RUNS = """
import signal, sys, types
from mmadmin.cli import entry

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests ignores
sys.modules["mmadmin.cli.main"] = types.SimpleNamespace(main=lambda: command())
"""
FALLS_INTO_A_FINALIZER = """
import time

class Finalized:
    def __del__(self):
        raise KeyboardInterrupt  # as the signal's handler does when it comes in here

def command():
    Finalized()
    print("goes on", flush=True)
    time.sleep(600)

entry.main()
"""
OTHERS = """
class Broken:
    def __del__(self):
        raise ValueError("a fault of its own")

def command():
    Broken()

entry.main()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A process of its own."""
    return subprocess.run(
        [sys.executable, "-c", RUNS + program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_an_interrupt_that_fell_into_a_finalizer_comes_again() -> None:
    """Otherwise the command would go on, and the key would have to be pressed again."""
    done = run(FALLS_INTO_A_FINALIZER)
    assert done.stdout == "goes on\n"
    assert done.returncode == 130
    assert "ignored" not in done.stderr


def test_other_faults_of_finalizers_are_told_as_ever() -> None:
    """Nothing else is swallowed."""
    done = run(OTHERS)
    assert done.returncode == 0
    assert "a fault of its own" in done.stderr
