"""Jobs in processes of their own, as a worker's pool processes are: they can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from django.conf import settings
from django.db import connection

PATIENCE_S = 120
"""What anything may take on a machine that does other things too."""


def database_url() -> str:
    """The test database as another process reaches it."""
    of = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{of['NAME']}"
    parts = urlsplit(os.environ["DATABASE_URL"])
    return urlunsplit(parts._replace(path=f"/{of['NAME']}"))


WORKER = """
import os, sys
import django
django.setup()
from django.conf import settings
settings.MACHINE = "tests.deployments.machines.ToyMachine"
from deployments import tasks
from deployments.jobs import gates
gates.QUIET_S = 0
getattr(tasks, sys.argv[1])(int(sys.argv[2]))
"""


def worker(task: str, job_id: int, home: Path) -> subprocess.Popen[bytes]:
    """Another process that does a job, as a worker's pool process would."""
    env = os.environ | {
        "DATABASE_URL": database_url(),
        "MM_HOME": str(home),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "REDIS_URL": settings.REDIS_URL,
    }
    return subprocess.Popen([sys.executable, "-c", WORKER, task, str(job_id)], env=env)


def until(holds: Callable[[], object]) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
