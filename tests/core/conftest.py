"""Tests of the core do not wait for the disk: a killed process loses nothing that it wrote.

Flushing protects from power cuts, which no test makes; that it happens, and in which order, has
tests of its own (`tests/core/store/test_flush.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mmadmin.core.store import index


@pytest.fixture(autouse=True, scope="session")
def no_flushing() -> Iterator[pytest.MonkeyPatch]:
    """Neither files nor the index are flushed."""
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda fd: None)
    patch.setattr(index, "SYNCHRONOUS", "OFF")
    yield patch
    patch.undo()
