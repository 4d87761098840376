"""An installation in another place: restored from its backup beside itself, and moved."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mmadmin.core.home import Home
from tests.e2e.installation import CATALOG, Installation, installation, wait_for
from tests.support.engine import EngineStore
from tests.support.ports import free_ports

NAME = "smollm2-135m"
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def served(engine_store: EngineStore, tmp_path: Path) -> Iterator[Installation]:
    """An installation that serves the small model."""
    for made in installation(tmp_path / "home", engine_store):
        made.run("deploy", str(CATALOG / f"{NAME}.toml"), "--reason", "to be moved")
        yield made


def elsewhere(site: Installation, folder: Path) -> Installation:
    """The way into another folder, with ports of its own."""
    names = ("MM_PANEL_PORT", "MM_GATE_PORT", "MM_METRICS_PORT")
    ports = dict(zip(names, map(str, free_ports(3)), strict=True))
    return Installation(Home(folder), {**site.env, **ports, "MM_HOME": str(folder)})


def test_restored_without_the_store_and_moved(
    served: Installation, engine_store: EngineStore, tmp_path: Path
) -> None:
    """Bytes missing and no request to the old engines; rebuilt it serves, with the same key.

    The old installation moves: after `mm up` it serves again, without an alarm.
    """
    key, file = served.key(), tmp_path / "mm.tar"
    served.answered(key, NAME)
    served.run("backup", str(file))
    restored = elsewhere(served, tmp_path / "restored")
    restored.run("restore", str(file))
    try:
        restored.run("up", "--no-demo")
        wait_for("the alarm", lambda: restored.deployment(NAME)["alarms"])
        assert restored.deployment(NAME)["state"] == "bytes missing"
        assert restored.ask(key, NAME).status_code == 503
        engine_store.seed(restored.store())
        restored.run("rebuild", "--live")
        assert restored.answered(key, NAME) == f"{NAME}/1"
        wait_for("no alarm", lambda: not restored.deployment(NAME)["alarms"])
    finally:
        restored.run("down")
    served.run("down")
    moved = tmp_path / "moved"
    served.home.root.rename(moved)
    served.home, served.env["MM_HOME"] = Home(moved), str(moved)
    served.run("up", "--no-demo")
    assert served.answered(key, NAME) == f"{NAME}/1"
    assert served.deployment(NAME)["alarms"] == []
