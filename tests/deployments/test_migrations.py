"""What an upgrade makes of rows that an earlier version wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from deployments.models import Replica

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def migrate() -> Iterator[Any]:
    """Migrate to a named state and get its models; afterwards the newest state is back."""

    def to(name: str) -> Any:
        executor = MigrationExecutor(connection)
        return executor.migrate([("deployments", name)]).apps

    yield to
    executor = MigrationExecutor(connection)
    executor.migrate(executor.loader.graph.leaf_nodes("deployments"))


def test_a_process_by_the_clock_becomes_unknown(migrate: Any) -> None:
    """The start by the time of day is dropped, so that no process is mistaken for the engine."""
    old = migrate("0001_initial")
    user = old.get_model("deployments", "User").objects.create(username="a")
    host = old.get_model("deployments", "Host").objects.create(name="h")
    deployment = old.get_model("deployments", "Deployment").objects.create(
        name="d", public_name="d", host=host
    )
    generation = old.get_model("deployments", "Generation").objects.create(
        deployment=deployment, number=1, spec_toml="", author=user, reason=""
    )
    replica = old.get_model("deployments", "Replica").objects.create(
        uid="d.1.x", generation=generation, host=host, port=1, pid=7, pid_started=1764518400.25
    )
    migrate("0002_replica_process")
    assert Replica.objects.values_list("pid", "started", "boot").get(pk=replica.pk) == (7, None, "")
    assert Replica.objects.only("pid", "started", "boot").get(pk=replica.pk).process is None
