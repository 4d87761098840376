"""How long `mm migrate` and `mm backup` take with years of records: `python -m bench.migrate`.

The records of the panel's bench (10,000 generations, 10,000 keys, 1,000,000 usage rows) go from
SQLite into a PostgreSQL server of the bench's own, counts and digests compared.
"""

# ruff: noqa: PLC0415 (Django's models can be imported only once it is set up)

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import panel
from tests.with_postgres import postgres

MM = [sys.executable, "-c", "from mmadmin.cli.entry import main; main()"]


def main() -> int:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--usage", type=int, default=1_000_000)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mm-bench-migrate-") as scratch, postgres() as url:
        home = Path(scratch) / "home"
        with panel.installation(home):
            panel.fill(home, wanted)
            from django.db import connections

            connections.close_all()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DJANGO_", "REDIS_"))}
        env["MM_HOME"] = str(home)
        subprocess.run([*MM, "init"], env=env, check=True, stdout=subprocess.DEVNULL)
        size = (home / "db.sqlite3").stat().st_size
        begun = time.monotonic()
        made = [*MM, "backup", f"{scratch}/mm.tar"]
        subprocess.run(made, env=env, check=True, stdout=subprocess.DEVNULL)
        backup_s, backup_bytes = time.monotonic() - begun, Path(f"{scratch}/mm.tar").stat().st_size
        done = subprocess.run(
            [*MM, "migrate", "--json"],
            env={**env, "DATABASE_URL": url},
            check=True,
            capture_output=True,
            text=True,
        )
        found = json.loads(done.stdout)
        print(
            f"{found['rows']} rows in {len(found['tables'])} tables, SQLite file {size >> 20} MiB\n"
            f"mm backup   {backup_s:.1f} s, {backup_bytes >> 20} MiB\n"
            f"mm migrate  {found['seconds']} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
