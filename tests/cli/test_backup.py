"""Backup, restore, and the way to PostgreSQL, by the commands and without services."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.home import Home
from tests.with_postgres import postgres

ROOT = Path(__file__).resolve().parents[2]
MM = [sys.executable, "-c", "from mmadmin.cli.entry import main; main()"]
FILL = """
import django; django.setup()
from django.utils import timezone
from deployments.models import *
user, host = User.objects.get(), Host.objects.create(name="local", holder="old@place")
d = Deployment.objects.create(name="smol", public_name="smol", host=host, created_by=user)
g = Generation.objects.create(deployment=d, number=1, author=user, reason="a \\0 b", spec_toml="",
    system="1" * 64 + "-smol", state="live", lock={"n": 1.0, "big": 1e5, "t": "x\\0y", "l": [None]})
d.live = g
d.save()
Replica.objects.create(uid="smol.1.x", generation=g, host=host, state="ready", pid=7)
Build.objects.create(deployment=d, host=host, spec_toml="", state="running", actor=user)
ClientKey.objects.create(key_id="k" * 12, digest="d" * 64, owner="ada", created_by=user)
AuditEvent.objects.create(actor=user, verb="x", subject="y", details={"a": [1, 2.5]})
UsageEvent.objects.bulk_create(UsageEvent(id=f"{n:06}A" if n % 2 else f"{n:06}a",
    at=timezone.now(), key_id="k", deployment="smol", endpoint="chat", status=200, outcome="ok")
    for n in range(300))
"""
COUNT = """
import django; django.setup()
from deployments.models import *
print([m.objects.count() for m in (User, Deployment, Generation, ClientKey, UsageEvent)],
    Generation.objects.get().lock, ClientKey.objects.get().created_by.username)
ClientKey.objects.create(key_id="n" * 12, digest="e" * 64, owner="bob")
"""

INTERRUPTED = """
import django, os; django.setup()
from deployments import copying
from deployments.models import UsageEvent
copying.PART_ROWS, url = 100, os.environ["TARGET"]
copying.open_database("target", url)
copying.prepare_target("target", url)
def step(table, done, total):
    if (table, done) == ("deployments_usageevent", 200):
        raise InterruptedError
try:
    copying.copy_all("default", "target", step)
except InterruptedError:
    print(UsageEvent.objects.using("target").count())
UsageEvent.objects.earliest("id").delete()
"""


def run(home: Path, *argv: str, code: int = 0, **more: str) -> str:
    """A command in a home, by people's environment; what it said."""
    hidden = ("MM_", "DJANGO_", "DATABASE_URL", "REDIS_URL", "PYTEST_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    env |= {"MM_HOME": str(home), "DJANGO_SETTINGS_MODULE": "mmadmin.settings", **more}
    done = subprocess.run(
        argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == code, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout or done.stderr


def mm(home: Path, *words: str, code: int = 0, **more: str) -> str:
    """An `mm` command there."""
    return run(home, *MM, *words, code=code, **more)


def python(home: Path, script: str, **more: str) -> str:
    """A script over the records there."""
    return run(home, sys.executable, "-c", script, **more)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with records, a secret setting and an ordinary one; not to be changed."""
    home = tmp_path_factory.mktemp("filled") / "home"
    mm(home, "init")
    mm(home, "set", "HF_TOKEN=hf_x", "MM_JOBS=3", "REDIS_URL=redis://127.0.0.1:1/0")
    python(home, FILL)
    sources = home / "secrets" / "sources"
    sources.mkdir(mode=0o700)
    (sources / "mirror").write_text('{"for": "https://mirror.example.org:443"}')
    return home


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A PostgreSQL server of the tests' own."""
    with postgres() as url:
        yield url


def tables(path: Path) -> Mapping[str, Any]:
    """Rows by table of an SQLite file."""
    with closing(sqlite3.connect(path)) as connection:
        names = [
            r[0] for r in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        return {n: connection.execute(f'SELECT count(*) FROM "{n}"').fetchone()[0] for n in names}


def test_restored_elsewhere_all_is_there_but_the_place(filled: Path, tmp_path: Path) -> None:
    """Records, secrets, settings; neither the engines' secret, nor their seats, nor running jobs."""
    file, home = tmp_path / "mm.tar", tmp_path / "new"
    with closing(sqlite3.connect(Home(filled).database)) as busy:
        busy.execute("PRAGMA journal_mode=WAL")
        mm(filled, "backup", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "mm rebuild --live" in mm(home, "restore", str(file))
    old, new = Home(filled), Home(home)
    for name in ("key_pepper", "django_secret_key", "hf_token", "sources/mirror"):
        assert (new.secrets / name).read_text() == (old.secrets / name).read_text()
        assert stat.S_IMODE((new.secrets / name).stat().st_mode) == 0o600
    assert (new.secrets / "engine_master").read_text() != (
        old.secrets / "engine_master"
    ).read_text()
    settings = (home / "settings.env").read_text()
    assert "MM_JOBS=3" in settings
    assert "REDIS_URL" not in settings
    assert tables(old.database).keys() == tables(new.database).keys()
    with closing(sqlite3.connect(new.database)) as records:
        one = lambda q: records.execute(q).fetchone()  # noqa: E731
        assert one("SELECT state, pid FROM deployments_replica") == ("stopped", None)
        assert one("SELECT state FROM deployments_build") == ("failed",)
        assert one("SELECT holder FROM deployments_host") == ("",)
        assert one("SELECT count(*) FROM deployments_usageevent") == (300,)
    assert "smol/1" in mm(home, "store", "verify", code=1)
    checks = {c["name"]: c for c in json.loads(mm(home, "doctor", "--json", code=1))["checks"]}
    assert checks["live"]["level"] == "fail"
    assert "mm rebuild --live" in checks["live"]["remedy"]
    assert "not empty" in mm(home, "restore", str(file), code=1)


def test_a_damaged_or_foreign_file_restores_nothing(filled: Path, tmp_path: Path) -> None:
    """With a message; the folder stays empty, so that the next attempt finds it so."""
    file, home = tmp_path / "mm.tar", tmp_path / "new"
    mm(filled, "backup", str(file))
    whole = file.read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2]):
        file.write_bytes(content)
        assert "cannot be read as a backup" in mm(home, "restore", str(file), code=1)
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../outside"))
    assert "not a backup" in mm(home, "restore", str(evil), code=1)
    assert not (tmp_path / "outside").exists()
    assert not home.exists() or not any(home.iterdir())


def test_sqlite_to_postgresql_and_back(filled: Path, tmp_path: Path, server: str) -> None:
    """Resumed, though the source changed; equal by digest; the old file stays; backed up there."""
    home, file = tmp_path / "home", tmp_path / "mm.tar"
    mm(filled, "backup", str(file))
    mm(home, "restore", str(file))
    refused = mm(home, "up", "--no-demo", code=1, DATABASE_URL=server)
    assert "mm migrate" in refused
    assert "mm migrate" in mm(home, "set", f"DATABASE_URL={server}", code=1)
    assert python(home, INTERRUPTED, TARGET=server) == "200\n"
    done = json.loads(mm(home, "migrate", "--json", DATABASE_URL=server))
    assert done["tables"]["deployments_usageevent"]["rows"] == 299
    assert Path(done["kept"]).exists()
    assert not Home(home).database.exists()
    said = python(home, COUNT, DATABASE_URL=server)
    assert said.startswith("[1, 1, 1, 1, 299] {")
    assert "'t': 'x\u2400y'" in said
    assert "already" in mm(home, "migrate", "--to", server, code=1)
    back, copy = tmp_path / "back.tar", tmp_path / "copy"
    mm(home, "backup", str(back))
    mm(copy, "restore", str(back))
    assert "DATABASE_URL" not in (copy / "settings.env").read_text()
    assert tables(Home(copy).database)["deployments_clientkey"] == 2
    assert "holds records" in mm(
        tmp_path / "third", "restore", str(back), code=1, DATABASE_URL=server
    )
