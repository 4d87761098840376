"""What is installed needs no network: planning, realising and starting it again make no call."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mmadmin.core.build.builder import UNOBSERVED, realise
from mmadmin.core.build.planner import plan
from mmadmin.core.engines.llama_server.engine import ENGINE
from mmadmin.core.engines.protocol import SOMEWHERE
from mmadmin.core.engines.system import read_system
from mmadmin.core.errors import SourceUnavailable
from mmadmin.core.store import Store
from mmadmin.host.index import find
from tests.support.engine import EngineStore, toolbox_for


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every attempt to connect or to look a name up fails, and is noted."""
    attempts: list[object] = []

    def refuse(*arguments: object, **_options: object) -> None:
        attempts.append(arguments[-1])
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


@pytest.mark.engine
def test_an_installed_system_is_realised_without_a_single_call(
    engine_store: EngineStore, tmp_path: Path, no_network: list[object]
) -> None:
    """Plan, realise, manifest, launch: all from the store."""
    store = Store(tmp_path / "store")
    engine_store.seed(store)
    found = plan(engine_store.goal, store)
    assert {step.action for step in found.steps} == {"cached"}
    record = realise(engine_store.goal, store, toolbox_for(store), UNOBSERVED)
    system = read_system(store.object_path(record.object))
    launch = ENGINE.launch(system, SOMEWHERE)
    assert Path(launch.argv[0]).is_file()
    assert system.parts["model"].is_file()
    assert no_network == []


def test_the_fixture_really_refuses(no_network: list[object]) -> None:
    """Something that needs the network notices."""
    with pytest.raises(SourceUnavailable):
        find("anything", "1.0")
    assert no_network
