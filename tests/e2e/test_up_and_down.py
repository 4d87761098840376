"""`mm up` and `mm down` at the same moment, twice, or interrupted: one end, and nothing left."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.installation import MM, ROOT, Installation, installation, wait_for
from tests.support.engine import EngineStore
from tests.with_postgres import postgres

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def bare(
    engine_store: EngineStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """An installation that is down at the beginning of each test."""
    yield from installation(tmp_path_factory.mktemp("bare"), engine_store, up=False)


def begin(site: Installation, *words: str) -> subprocess.Popen[str]:
    """Run `mm` beside the test."""
    return subprocess.Popen(
        [*MM, *words],
        cwd=ROOT,
        env=site.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What it said; it must have ended well."""
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def test_down_during_up(bare: Installation) -> None:
    """It waits until the services stand, then ends them: afterwards nothing runs."""
    up = begin(bare, "up", "--no-demo")
    wait_for("the daemon", bare.processes)
    up.send_signal(signal.SIGSTOP)
    down = begin(bare, "down")
    assert down.stdout
    assert "waiting for `mm up`" in down.stdout.readline()
    assert bare.supervisor.running()
    up.send_signal(signal.SIGCONT)
    assert "ready" in ended(up)
    ended(down)
    assert bare.processes() == []


def test_two_downs_at_once(bare: Installation) -> None:
    """Both end well, and neither of them before all is gone."""
    bare.run("up", "--no-demo")
    first, second = begin(bare, "down"), begin(bare, "down")
    said = ended(first) + ended(second)
    assert bare.processes() == []
    assert said.count("nothing was running") == 1
    assert "nothing was running" in bare.run("down")


def test_down_after_an_order_to_end(bare: Installation) -> None:
    """The daemon was told to end (twice), or a first `mm down` was interrupted: it is waited for."""
    bare.run("up", "--no-demo")
    daemon = bare.supervisor.pid_of_daemon()
    assert daemon
    for _ in range(2):
        os.kill(daemon, signal.SIGTERM)
    bare.run("down")
    assert bare.processes() == []
    bare.run("up", "--no-demo")
    interrupted = begin(bare, "down")
    wait_for("the shutdown", lambda: bare.supervisor.state() != "running")
    interrupted.send_signal(signal.SIGINT)
    interrupted.communicate(timeout=240)
    bare.run("down")
    assert bare.processes() == []


def test_down_after_a_killed_up(bare: Installation) -> None:
    """`mm up` was killed as soon as the daemon was there: what it started is found and ended."""
    up = begin(bare, "up", "--no-demo")
    wait_for("the daemon", bare.processes)
    up.kill()
    up.communicate()
    bare.run("down")
    assert bare.processes() == []


def test_up_while_all_ends(bare: Installation) -> None:
    """`mm up` during `mm down`: it waits, then starts everything; all of it runs, once."""
    bare.run("up", "--no-demo")
    old = {process.pid for process in bare.processes()}
    down = begin(bare, "down")
    wait_for("the shutdown", lambda: bare.supervisor.state() != "running")
    bare.run("up", "--no-demo")
    ended(down)
    assert not old & {process.pid for process in bare.processes()}
    assert {s["state"] for s in bare.json("status")["services"]} == {"running"}
    bare.run("down")


def test_a_changed_setting_restarts_who_reads_it(bare: Installation) -> None:
    """The worker gets the hub, its token and none of what was unset; the gate runs on."""
    bare.env["HF_TOKEN"] = "hf_first"
    bare.run("up", "--no-demo")
    del bare.env["HF_TOKEN"]
    before = {name: bare.supervisor.pid(name) for name in ("gate", "panel", "broker")}
    bare.run("set", "HF_ENDPOINT=http://127.0.0.1:1", "HF_TOKEN=hf_second")
    said = bare.run("up", "--no-demo")
    assert "worker: restarted" in said
    assert before == {name: bare.supervisor.pid(name) for name in before}
    (worker,) = [p for p in bare.family("worker") if p.pid == bare.supervisor.pid("worker")]
    assert worker.environ()["HF_ENDPOINT"] == "http://127.0.0.1:1"
    bare.run("unset", "HF_ENDPOINT")
    assert "worker: restarted" in bare.run("up", "--no-demo")
    (worker,) = [p for p in bare.family("worker") if p.pid == bare.supervisor.pid("worker")]
    assert "HF_ENDPOINT" not in worker.environ()
    assert not [p for p in bare.processes() if "HF_TOKEN" in p.environ()]
    assert "restarted" not in bare.run("up", "--no-demo")
    bare.run("down")


def test_records_move_to_postgresql_while_it_runs(bare: Installation) -> None:
    """Gate and broker run on; panel, worker and beat come back on the other database."""
    bare.run("up", "--no-demo")
    bare.key()
    before = {name: bare.supervisor.pid(name) for name in ("gate", "broker", "watchdog")}
    with postgres() as url:
        assert bare.json("migrate", "--to", url)["tables"]["deployments_clientkey"]["rows"] == 1
        assert before == {name: bare.supervisor.pid(name) for name in before}
        assert {s["state"] for s in bare.json("status")["services"]} == {"running"}
        assert len(bare.json("keys", "list")) == 1
        bare.run("down")


def test_down_without_an_installation(bare: Installation, tmp_path: Path) -> None:
    """It says so, and makes no folder for that."""
    elsewhere = Installation(bare.home, {**bare.env, "MM_HOME": str(tmp_path / "none")})
    assert "nothing was running" in elsewhere.run("down")
    assert not (tmp_path / "none").exists()
