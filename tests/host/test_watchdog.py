"""supervisord dies and comes back; ordinary ends stay ends, whatever else happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import psutil
import pytest

from mmadmin.core.home import Home, Ports
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.host import doctor, watchdog
from mmadmin.host.doctor import Patient
from mmadmin.host.facts import host_facts
from mmadmin.host.hub import Hub
from mmadmin.host.service_health import HealthCheck, health_checks, silent_services
from mmadmin.host.supervisor import ProgramSpec, Supervisor
from tests.support.ports import free_port

PATIENCE_S = 60


def wait_for(what: str, look: Callable[[], object]) -> None:
    """Return once `look` gives something true."""
    give_up = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < give_up, what
        time.sleep(0.05)


def marked(home: Home) -> dict[str, list[int]]:
    """Every process that carries this home's supervisor in its environment, by program."""
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter():
        try:
            env = process.environ()
            zombie = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if env.get("SUPERVISOR_SERVER_URL") == f"unix://{home.supervisor_socket}" and not zombie:
            found.setdefault(env["SUPERVISOR_PROCESS_NAME"], []).append(process.pid)
    return found


def services(home: Home) -> list[ProgramSpec]:
    """A service that ends when it is told to, and the watchdog."""
    return [
        ProgramSpec("service", ["/bin/sleep", "600"], home.logs / "service.log"),
        watchdog.program(home, {}),
    ]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Supervisor]:
    """An empty installation; nothing of it is left behind."""
    supervisor = Supervisor(Home(tmp_path))
    yield supervisor
    supervisor.shutdown(20, lambda _line: None)
    left = marked(supervisor.home)
    for pids in left.values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert left == {}


def kill_daemon(supervisor: Supervisor) -> int:
    """Kill -9; the pid that it had."""
    pid = supervisor.pid_of_daemon()
    assert pid
    os.kill(pid, signal.SIGKILL)
    return pid


def all_run(supervisor: Supervisor) -> bool:
    """Both programs run."""
    if not supervisor.running():
        return False
    return {p.name for p in supervisor.status() if p.state == "RUNNING"} == {"service", "watchdog"}


def brought_back(supervisor: Supervisor) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Kill the daemon and wait until all is back; what ran before and what runs after."""
    before = marked(supervisor.home)
    dead = kill_daemon(supervisor)
    wait_for("another", lambda: supervisor.pid_of_daemon() not in (None, dead))
    wait_for("all", lambda: all_run(supervisor))
    wait_for("the old watchdog's end", lambda: ProcessIdentity.of(before["watchdog"][0]) is None)
    return before, marked(supervisor.home)


def test_a_killed_supervisor_comes_back_with_all_that_it_had(site: Supervisor) -> None:
    """One of each afterwards, none of them the old one; and a second time too."""
    site.launch(services(site.home))
    wait_for("all", lambda: all_run(site))
    for _ in range(2):
        before, after = brought_back(site)
        assert sorted(after) == sorted(before) == ["service", "supervisord", "watchdog"]
        assert all(len(pids) == 1 for pids in after.values())
        assert not {*chain(*before.values())} & {*chain(*after.values())}
        words = (site.home.logs / "watchdog.log").read_text()
        assert f"ended what it left: service (pid {before['service'][0]})" in words


def test_a_killed_watchdog_comes_back(site: Supervisor) -> None:
    """The supervisor starts it again, as every program; then it keeps as before."""
    site.launch(services(site.home))
    wait_for("all", lambda: all_run(site))
    old = site.pid("watchdog")
    assert old
    os.kill(old, signal.SIGKILL)
    wait_for("a new watchdog", lambda: site.pid("watchdog") not in (None, old))
    wait_for("all", lambda: all_run(site))
    brought_back(site)


def test_a_program_that_hides_its_environment_is_ended_too(site: Supervisor) -> None:
    """Started again since anyone asked, it is known by the watchdog's own look at it."""
    hidden = ["/usr/bin/env", "-u", "SUPERVISOR_SERVER_URL", "/bin/sleep", "600"]
    service = ProgramSpec("service", hidden, site.home.logs / "service.log")
    site.launch([service, watchdog.program(site.home, {})])
    wait_for("all", lambda: all_run(site))
    first = site.pid("service")
    assert first
    os.kill(first, signal.SIGKILL)
    wait_for("another", lambda: site.pid("service") not in (None, first))
    second = ProcessIdentity.of(site.pid("service") or 0)
    assert second
    record = site.home.run_dir / "programs.json"
    wait_for(
        "the record", lambda: json.loads(record.read_text()).get("service") == second.as_json()
    )
    dead = kill_daemon(site)
    wait_for("another", lambda: site.pid_of_daemon() not in (None, dead))
    assert not second.alive


def test_a_service_that_was_given_up_is_tried_again(site: Supervisor, tmp_path: Path) -> None:
    """What it lacked comes back later than supervisord has patience; an engine is left alone."""
    needed = tmp_path / "needed"
    argv = ["/bin/sh", "-c", f"test -e {needed} && exec sleep 600"]
    service = ProgramSpec("service", argv, site.home.logs / "service.log", startretries=0)
    engine = ProgramSpec("engine", argv, site.home.logs / "engine.log", startretries=0)
    site.launch([service, watchdog.program(site.home, {})])
    site.start_program(engine)
    for program in ("service", "engine"):
        wait_for("the end of patience", partial(given_up, site, program))
    needed.touch()
    wait_for("the service", lambda: site.pid("service"))
    assert given_up(site, "engine")


def given_up(supervisor: Supervisor, name: str) -> bool:
    """The supervisor has no more patience with a program."""
    found = supervisor.program(name)
    return found is not None and found.state == "FATAL"


SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def gate(site: Supervisor) -> tuple[ProgramSpec, Ports]:
    """A service that answers for its health, under the gate's name."""
    ports = Ports(panel=free_port(), gate=free_port(), metrics=free_port())
    script = site.home.root / "serve.py"
    script.write_text(SERVE)
    argv = [sys.executable, str(script), str(ports.metrics)]
    spec = ProgramSpec("gate", argv, site.home.logs / "gate.log", startsecs=0)
    site.launch([spec])
    wait_for("its answer", health_checks(ports)["gate"].passes)
    return spec, ports


def test_a_service_that_hangs_is_ended_and_started_again(
    site: Supervisor, gate: tuple[ProgramSpec, Ports], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only after it was silent for long; one that answers again in time is left alone."""
    monkeypatch.setattr("mmadmin.host.service_health.ANSWER_S", 0.2)
    monkeypatch.setattr("mmadmin.host.service_health.START_S", 0)
    monkeypatch.setattr(watchdog, "HUNG_PATIENCE_S", 0.2)
    services = watchdog.Services(site, gate[1])
    pid = site.pid("gate")
    assert pid
    os.kill(pid, signal.SIGSTOP)
    services.look()
    assert [p.name for p in silent_services(site.status(), gate[1])] == ["gate"]
    os.kill(pid, signal.SIGCONT)
    services.look()
    monkeypatch.setattr(watchdog, "HUNG_S", 0.5)
    os.kill(pid, signal.SIGSTOP)
    services.look()
    assert site.pid("gate") == pid, "it is silent only since now"
    time.sleep(0.5)
    services.look()
    wait_for("another", lambda: site.pid("gate") not in (None, pid))
    wait_for("its answer", health_checks(gate[1])["gate"].passes)


def test_a_service_that_is_asked_by_its_public_name_answers() -> None:
    """The panel refuses names that it does not serve, and may listen on another address."""
    ports = Ports(panel=1, gate=2, metrics=3)
    checks = health_checks(ports, {"MM_BIND": "::"})
    assert checks["panel"] == HealthCheck("::1", 1)
    assert checks["gate"] == HealthCheck("127.0.0.1", 3)
    assert health_checks(ports, {"MM_BIND": "0.0.0.0"})["panel"] == HealthCheck("127.0.0.1", 1)


def test_the_watchdog_of_an_older_installation_is_replaced(site: Supervisor) -> None:
    """Its program had another name: the next start ends it and runs the present one alone."""
    old = ProgramSpec("keeper", ["/bin/sleep", "600"], site.home.logs / "keeper.log")
    site.launch([services(site.home)[0], old])
    service = site.pid("service")
    site.launch(services(site.home))
    wait_for("all", lambda: all_run(site))
    assert sorted(p.name for p in site.status()) == ["service", "watchdog"]
    assert site.pid("service") == service
    assert sorted(marked(site.home)) == ["service", "supervisord", "watchdog"]


def test_programs_are_listed_when_the_record_cannot_be_written(
    site: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk hides nothing, and the watchdog lives on."""
    site.launch([services(site.home)[0]])

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("mmadmin.host.supervisor._write", full)
    assert [p.name for p in site.status()] == ["service"]


def test_an_ordinary_shutdown_is_not_a_death(site: Supervisor) -> None:
    """The watchdog stops first, by order and by SIGTERM to the daemon: nothing comes back."""
    site.launch(services(site.home))
    wait_for("all", lambda: all_run(site))
    pid = site.pid_of_daemon()
    assert pid
    os.kill(pid, signal.SIGTERM)
    assert site.shutdown(30, lambda _line: None) == []
    assert site.state() == "absent"
    assert marked(site.home) == {}


def test_an_end_that_is_asked_for_while_it_comes_back(site: Supervisor) -> None:
    """`mm down` right after the death: it waits for the watchdog or ends it; nothing is left."""
    site.launch(services(site.home))
    wait_for("all", lambda: all_run(site))
    kill_daemon(site)
    with site.alone("the test"):
        site.shutdown(30, lambda _line: None)
        assert site.state() == "absent"
        assert marked(site.home) == {}


def test_two_ends_at_once_end_once(site: Supervisor) -> None:
    """The second one waits for the first, and for what the first one waits for."""
    stubborn = "trap 'sleep 1; exit' TERM; echo up; while :; do sleep 0.1; done"
    slow = ProgramSpec("slow", ["/bin/sh", "-c", stubborn], site.home.logs / "slow.log")
    site.launch([*services(site.home), slow])
    wait_for("the trap", lambda: "up" in slow.log.read_text() if slow.log.exists() else "")
    pid = site.pid("slow")
    assert pid
    left: list[dict[str, list[int]]] = []

    def end() -> None:
        Supervisor(site.home).shutdown(30, lambda _line: None)
        left.append(marked(site.home))

    threads = [threading.Thread(target=end) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [{}, {}]
    assert "stopped: slow (exit status 0)" in (site.home.logs / "supervisord.log").read_text()


START = """
import sys
from pathlib import Path
from mmadmin.core.home import Home, Ports
from mmadmin.host.service_health import HealthCheck, health_checks, silent_services
from mmadmin.host.supervisor import ProgramSpec, Supervisor
from tests.support.ports import free_port
home = Home(Path(sys.argv[1]))
Supervisor(home).launch([ProgramSpec("service", ["/bin/sleep", "600"], home.logs / "service.log")])
"""


def test_an_end_right_after_an_interrupted_start(site: Supervisor) -> None:
    """A start that was killed leaves a daemon that does not answer yet: it is ended all the same."""
    start = subprocess.Popen([sys.executable, "-c", START, str(site.home.root)])
    wait_for("the daemon's process", lambda: marked(site.home))
    start.kill()
    start.wait()
    site.shutdown(30, lambda _line: None)
    assert site.state() == "absent"
    assert marked(site.home) == {}


def test_a_daemon_that_lost_its_socket_is_ended_in_order(site: Supervisor) -> None:
    """A cleaned-up /tmp takes the socket away; the daemon is still known, and told by a signal."""
    site.launch(services(site.home))
    wait_for("all", lambda: all_run(site))
    service = site.pid("service")
    assert service
    site.home.supervisor_socket.unlink()
    assert site.shutdown(30, lambda _line: None) == []
    assert ProcessIdentity.of(service) is None
    assert "stopped: service" in (site.home.logs / "supervisord.log").read_text()


def test_a_silent_daemon_is_ended_by_force(
    site: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens and answers nothing: that is told, and it is killed with its programs."""
    monkeypatch.setattr("mmadmin.host.supervisor.RPC_TIMEOUT_S", 0.5)
    site.launch(services(site.home))
    pid = site.pid_of_daemon()
    assert pid
    os.kill(pid, signal.SIGSTOP)
    assert site.state() == "silent"
    assert not site.running()
    site.shutdown(30, lambda _line: None)
    assert marked(site.home) == {}


def test_a_removed_socket_is_made_again_without_a_restart(site: Supervisor) -> None:
    """With its folder, as cleaners of /tmp do; meanwhile it is said what is the matter."""
    site.launch([services(site.home)[0]])
    wait_for("the service", lambda: site.pid("service"))
    before, daemon = site.pid("service"), site.pid_of_daemon()
    for _ in range(2):
        shutil.rmtree(site.home.run_dir)
        assert not site.running()
        assert site.without_socket() == daemon
        assert before in site.own_pids()
        ports, url = Ports(panel=1, gate=2, metrics=3), site.home.broker_url
        patient = Patient(site.home, ports, host_facts(), url, Hub("http://127.0.0.1:9"))
        assert "its socket" in doctor.supervisor(patient).fact
        wait_for("its socket", site.running)
        assert (site.pid("service"), site.pid_of_daemon()) == (before, daemon)
    assert site.without_socket() is None


def test_a_broker_without_its_socket_is_restarted(
    site: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can reach it, and it makes its socket only when it starts."""
    monkeypatch.setattr(watchdog, "START_S", 0)
    spec = replace(services(site.home)[0], name="broker")
    site.launch([spec])
    wait_for("the broker", lambda: (p := site.program("broker")) and p.state == "RUNNING")
    looker = watchdog.Services(site, Ports(panel=1, gate=2, metrics=3))
    site.home.broker_socket.touch()
    before = site.pid("broker")
    looker.look()
    assert site.pid("broker") == before
    site.home.broker_socket.unlink()
    looker.look()
    wait_for("another", lambda: site.pid("broker") not in (None, before))
