"""The tests where the database matters, against PostgreSQL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.with_postgres import postgres

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif("DATABASE_URL" in os.environ, reason="this run has its own database")
@pytest.mark.timeout(1800)
def test_the_same_on_postgres() -> None:
    """Compare-and-set, constraints, locks, kills: the marked tests pass there too."""
    with postgres() as url:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "database", "tests"]
        env = os.environ | {"DATABASE_URL": url}
        env.pop("MM_HOME", None)
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout[-8000:]
