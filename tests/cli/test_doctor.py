"""`mm doctor` from the command line: what it finds, how it ends. The checks have their own tests."""

import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
PORTS = dict(zip(("PANEL", "GATE", "METRICS"), free_ports(3), strict=True))


def mm(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `mm` in a home of its own, as a shell would; no hub is reachable."""
    return subprocess.run(
        [sys.executable, "-c", "from mmadmin.cli.entry import main; main()", *words],
        cwd=ROOT,
        env={
            "MM_HOME": str(home),
            "PATH": "/usr/bin:/bin",
            "HF_ENDPOINT": "http://127.0.0.1:9",
            **{f"MM_{name}_PORT": str(port) for name, port in PORTS.items()},
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_is_set_up(tmp_path: Path) -> None:
    """Ends with 1; what failed has a remedy; nothing was made."""
    done = mm(tmp_path / "none", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert found["level"] == "fail"
    assert checks["database"] == {
        "name": "database",
        "level": "fail",
        "fact": "there is none yet",
        "remedy": "run `mm up`",
    }
    assert all(c["remedy"] for c in found["checks"] if c["level"] == "fail")
    assert not (tmp_path / "none").exists()


def test_a_loose_secret_is_found_and_mended(tmp_path: Path) -> None:
    """Set up and whole: no failure (0). A secret that others can read: named, with the remedy."""
    assert mm(tmp_path, "init").returncode == 0
    well = mm(tmp_path, "doctor")
    assert well.returncode == 0, well.stdout
    assert "schema is current" in well.stdout
    assert "1 active" in well.stdout
    (tmp_path / "secrets" / "key_pepper").chmod(0o644)
    ill = mm(tmp_path, "doctor", "--json")
    assert ill.returncode == 1
    (failed,) = [c for c in json.loads(ill.stdout)["checks"] if c["level"] == "fail"]
    assert failed["name"] == "permissions"
    assert "key_pepper" in failed["fact"]
    assert mm(tmp_path, "init").returncode == 0
    assert mm(tmp_path, "doctor").returncode == 0


def test_a_database_of_before_is_said_in_words(tmp_path: Path) -> None:
    """Code that is newer than the database: what to do, instead of a traceback.

    A database that is current and still lacks something is a mistake of ours, and stays one.
    """
    assert mm(tmp_path, "init").returncode == 0
    with closing(sqlite3.connect(tmp_path / "db.sqlite3")) as database:
        database.execute("ALTER TABLE deployments_clientkey RENAME COLUMN note TO note_of_before")
        database.commit()
        ours = mm(tmp_path, "keys", "list")
        assert "Traceback" in ours.stderr
        database.execute("DELETE FROM django_migrations WHERE app = 'deployments'")
        database.commit()
    theirs = mm(tmp_path, "keys", "list")
    assert theirs.returncode == 1
    assert "Traceback" not in theirs.stderr
    assert re.search(r"the database cannot be used: SQLite lacks \d+ migrations?", theirs.stderr)
    assert "remedy: run `mm up`" in theirs.stderr


def test_status_says_what_it_knows_without_its_database(tmp_path: Path) -> None:
    """Addresses and services do not need it; what it would tell is named with the remedy."""
    assert mm(tmp_path, "init").returncode == 0
    with closing(sqlite3.connect(tmp_path / "db.sqlite3")) as database:
        database.execute("ALTER TABLE deployments_deployment RENAME COLUMN public_name TO gone")
        database.execute("DELETE FROM django_migrations WHERE app = 'deployments'")
        database.commit()
    said = mm(tmp_path, "status")
    assert said.returncode == 1
    assert said.stdout.startswith("panel  http://127.0.0.1:")
    assert "nothing runs; start it with: mm up" in said.stdout
    words = r"the database cannot be used: SQLite lacks \d+ migrations?"
    assert re.search(words, said.stderr)
    assert "remedy: run `mm up`" in said.stderr
    told = mm(tmp_path, "status", "--json")
    assert told.returncode == 1
    document = json.loads(told.stdout)
    assert re.fullmatch(words, document["database"]["message"])
    assert (document["deployments"], document["services"]) == ([], [])


def test_a_database_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    """Everything refuses then; the check says why."""
    assert mm(tmp_path, "init").returncode == 0
    script = (
        "from mmadmin.cli import doctor; from django.db import connection; import django;"
        "django.setup(); connection.ensure_connection();"
        "connection.connection.execute('PRAGMA query_only=1');"
        "r = doctor.database(); print(r.level, r.fact)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={
            "MM_HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
            "DJANGO_SETTINGS_MODULE": "mmadmin.settings",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("fail SQLite cannot be written")
