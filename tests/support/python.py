"""What an engine that is written in Python reads to run in its sandbox."""

from __future__ import annotations

import sys

PYTHON = [sys.prefix]
"""The environment that runs the tests; its interpreter is shown to every engine."""
