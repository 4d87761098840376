"""The doctor: each check well, ill, and with its remedy."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmadmin.core.errors import ToolMissing, Unreachable
from mmadmin.core.fit.facts import GpuFacts, HostFacts
from mmadmin.core.home import Home, Ports
from mmadmin.host import doctor
from mmadmin.host.doctor import Patient, Result, nvidia_cards, run_checks, worst
from mmadmin.host.engine_sandbox import holds_here
from mmadmin.host.facts import host_facts
from mmadmin.host.hub import Hub
from mmadmin.host.private_files import exposed, make_private
from mmadmin.host.supervisor import ProgramStatus
from mmadmin.host.tunnel import Tunnel, TunnelState
from tests.support.hub import local_hub
from tests.support.ports import free_port, free_ports

V100 = GpuFacts(0, "Tesla V100-SXM2-32GB", "7.0", 32 << 30, 31 << 30)
CANARY = "canary-31f7"


@pytest.fixture(scope="module")
def facts() -> HostFacts:
    """The machine of the tests, as if it had no GPU."""
    return replace(host_facts(), gpus=())


@pytest.fixture
def patient(tmp_path: Path, facts: HostFacts) -> Patient:
    """A fresh installation that does not run."""
    home = Home(tmp_path)
    ports = Ports(*free_ports(3))
    return Patient(home, ports, facts, home.broker_url, Hub("http://127.0.0.1:9"))


def test_a_fresh_installation_can_be_looked_at(patient: Patient) -> None:
    """Every check answers with a fact, in a fixed order, and nothing fails on a sound machine."""
    results = run_checks(patient, [("database", lambda: Result("database", "ok", "migrated"))])
    assert [r.name for r in results] == [
        "host", "driver", "compiler", "disk", "permissions", "sandbox",
        "store", "supervisor", "ports", "broker", "hub", "clock", "tunnel", "database",
    ]  # fmt: skip
    assert all(r.fact for r in results)
    assert all(r.remedy for r in results if r.level != "ok")
    assert {r.name for r in results if r.level == "warn"} >= {"supervisor", "broker", "hub"}
    assert all(set(r.as_json()) == {"name", "level", "fact", "remedy"} for r in results)
    assert not list(patient.home.root.iterdir())


def test_a_host_that_does_not_fence_engines_in_is_a_warning(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what was tried; the remedy depends on what is missing."""
    monkeypatch.delenv("MM_SANDBOX", raising=False)
    assert doctor.sandbox(patient).level == "ok"
    monkeypatch.setenv("MM_SANDBOX", "none")
    found = doctor.sandbox(patient)
    assert (found.level, found.fact) == ("warn", "none: engines are not fenced in at all")
    assert "user namespaces" in found.remedy
    held = replace(holds_here("bubblewrap"), system_calls=False)
    monkeypatch.setattr(doctor, "holds_here", lambda _setting: held)
    found = doctor.sandbox(patient)
    assert found.level == "warn"
    assert "filter of system calls" in found.remedy


def test_a_check_that_breaks_does_not_hide_the_others(patient: Patient) -> None:
    """Expected errors keep their remedy; a bug is a failed check; the rest is still there."""

    def unreachable() -> Result:
        raise Unreachable("the database does not answer", remedy="start it")

    def broken() -> Result:
        raise ZeroDivisionError

    results = {
        r.name: r for r in run_checks(patient, [("database", unreachable), ("other", broken)])
    }
    assert results["database"] == Result(
        "database", "fail", "the database does not answer", "start it"
    )
    assert "ZeroDivisionError" in results["other"].fact
    assert results["host"].level == "ok" or results["host"].remedy
    assert worst(list(results.values())) == "fail"
    assert worst([Result("a", "ok", ""), Result("b", "warn", "")]) == "warn"
    assert worst([]) == "ok"


def test_little_memory_is_a_warning(patient: Patient, facts: HostFacts) -> None:
    """Under 2 GiB builds and models would swap."""
    short = replace(patient, facts=replace(facts, memory_available_bytes=1 << 30))
    assert doctor.host(short).level == "warn"


def test_cards_without_a_driver(
    patient: Patient, facts: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plugged in and not shown is a failure; fewer shown than plugged in is a warning."""
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: 4)
    assert doctor.driver(patient).level == "fail"
    some = replace(patient, facts=replace(facts, gpus=(V100,), driver="550"))
    assert doctor.driver(some).level == "warn"
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: 1)
    assert doctor.driver(some).level == "ok"
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: 0)
    assert doctor.driver(patient).level == "ok"


def test_cards_are_counted_on_the_bus(tmp_path: Path) -> None:
    """Display and 3D controllers of NVIDIA count; their audio functions and others do not."""
    for name, vendor, kind in (
        ("a", "0x10de", "0x030200"),
        ("b", "0x10de", "0x030000"),
        ("c", "0x10de", "0x040300"),
        ("d", "0x8086", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    (tmp_path / "e").mkdir()
    assert nvidia_cards(tmp_path) == 2


def test_the_compiler_and_the_toolkit(
    patient: Patient, facts: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing compiler fails with its package; CUDA 13 for a V100 fails by the rule."""
    assert doctor.compilers(patient).level == "ok"
    volta = replace(facts, gpus=(V100,), cuda="13.0")
    assert "CUDA 12" in doctor.compilers(replace(patient, facts=volta)).remedy
    assert doctor.compilers(replace(patient, facts=replace(volta, cuda=""))).level == "warn"
    fine = doctor.compilers(replace(patient, facts=replace(volta, cuda="12.8")))
    assert (fine.level, "CUDA 12.8" in fine.fact) == ("ok", True)

    def missing() -> object:
        raise ToolMissing("g++ is not installed", remedy="apt-get install g++")

    monkeypatch.setattr(doctor.compiler, "compiler", missing)
    assert doctor.compilers(patient).remedy == "apt-get install g++"


@pytest.mark.parametrize(
    ("free", "level"), [(1 << 30, "fail"), (10 << 30, "warn"), (100 << 30, "ok")]
)
def test_disk_room(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    """Under 2 GiB fails, under 20 GiB warns."""
    usage = SimpleNamespace(free=free, total=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert doctor.disk(patient).level == level


def test_secrets_that_others_can_read(patient: Patient) -> None:
    """The mode of everything in the state folder is checked; `mm up` mends it, the store's too."""
    home = patient.home
    home.secrets.mkdir(mode=0o700)
    secret = home.secrets / "key_pepper"
    secret.write_text(CANARY)
    secret.chmod(0o600)
    assert doctor.permissions(patient).level == "ok"
    secret.chmod(0o644)
    found = doctor.permissions(patient)
    assert found.level == "fail"
    assert str(secret) in found.fact
    assert CANARY not in found.fact
    assert "mm up" in found.remedy
    log = home.logs / "engines" / "a.log"
    log.parent.mkdir(parents=True, mode=0o755)
    log.touch(0o644)
    home.root.chmod(0o755)
    elsewhere = home.root.parent / "big-disk"
    elsewhere.mkdir(mode=0o755)
    home.store.symlink_to(elsewhere)
    kept = home.store / "objects" / "0-a"
    kept.mkdir(parents=True)
    kept.chmod(0o555)
    wrong = {found.path for found in exposed(home)}
    assert {home.root, secret, log, log.parent.parent, elsewhere, elsewhere / "objects"} <= wrong
    make_private(home)
    assert not [*exposed(home)]
    assert log.stat().st_mode & 0o777 == 0o600
    assert kept.stat().st_mode & 0o777 == 0o555, "an object's mode belongs to its digest"
    assert doctor.permissions(patient).level == "ok"
    assert doctor.permissions(replace(patient, home=Home(home.root / "none"))).level == "warn"


def test_the_store_must_be_writable_and_whole(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written to and linked in, and leaves nothing behind."""
    root = patient.home.store
    for part in ("blobs", "objects", "staging", "downloads"):
        (root / part).mkdir(parents=True)
    (root / "objects" / "a-b.json").write_text("{}")
    found = doctor.store(patient)
    assert (found.level, found.fact) == ("ok", f"1 objects in {root}")
    assert not list(root.glob(".doctor-*"))

    def refuses(number: int) -> None:
        def refused(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refused)

    refuses(errno.EROFS)
    assert "Read-only file system" in doctor.store(patient).fact
    refuses(errno.EPERM)
    found = doctor.store(patient)
    assert (found.level, "no hard links" in found.fact) == ("warn", True)


def test_a_port_held_by_someone_else(patient: Patient) -> None:
    """The program that holds it is named."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", patient.ports.gate))
        other.listen()
        found = doctor.ports(patient)
    assert found.level == "fail"
    assert f"the gate port {patient.ports.gate} is held by " in found.fact
    assert f"(pid {os.getpid()})" in found.fact
    assert doctor.ports(patient).level == "ok"


@contextmanager
def redis(reply: Callable[[bytes], bytes]) -> Iterator[int]:
    """A server that answers each command once."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # whoever asked is gone, or nobody has asked
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(4096):
                    connection.sendall(reply(data))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)  # ends a wait for somebody, unlike close
        server.close()
        thread.join()


def test_the_broker_is_asked_with_its_password(patient: Patient) -> None:
    """PING after AUTH; a wrong password is said without showing it; silence is explained."""

    def right(data: bytes) -> bytes:
        if b"AUTH" in data:
            return b"+OK\r\n" if CANARY.encode() in data else b"-WRONGPASS invalid\r\n"
        return b"+PONG\r\n"

    with redis(right) as port:
        url = f"redis://:{CANARY}@127.0.0.1:{port}/0"
        assert doctor.broker(replace(patient, redis_url=url)).level == "ok"
    with redis(right) as port:
        url = f"redis://:wrong@127.0.0.1:{port}/0"
        found = doctor.broker(replace(patient, redis_url=url))
    assert found.level == "fail"
    assert "WRONGPASS" in found.fact
    gone = doctor.broker(replace(patient, redis_url=f"redis://:{CANARY}@127.0.0.1:{free_port()}/0"))
    assert CANARY not in gone.fact
    assert gone.remedy == "check REDIS_URL and that server"


def test_the_hub_and_the_clock(patient: Patient) -> None:
    """A hub that answers is well, one that does not is a warning; its Date tells the clock."""
    with local_hub() as running:
        here = replace(patient, hub=Hub(running.url))
        assert doctor.hub(here).level == "ok"
        assert doctor.clock(here).level == "ok"
        for off, level in ((60, "warn"), (-4000, "fail")):
            wrong = replace(here, now=lambda off=off: time.time() + off)
            assert doctor.clock(wrong).level == level
    assert doctor.hub(patient).level == "warn"
    assert "not compared" in doctor.clock(patient).fact


def test_a_tunnel_to_the_panel_needs_its_origin(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down is a failure; a panel behind a tunnel without PUBLIC_ORIGIN is one too."""
    panel = TunnelState(
        Tunnel("admin", target="panel"), "https://p.trycloudflare.com", "RUNNING", 1
    )
    monkeypatch.setattr(doctor, "tunnels", lambda _home: [panel])
    assert "PUBLIC_ORIGIN" in doctor.tunnel(patient).fact
    fine = replace(patient, public_origin="https://p.trycloudflare.com")
    assert doctor.tunnel(fine).level == "ok"
    monkeypatch.setattr(doctor, "tunnels", lambda _home: [replace(panel, state="BACKOFF")])
    assert doctor.tunnel(fine).level == "fail"


def test_programs_that_fail_are_named(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program in FATAL fails with its log; a stopped service warns."""

    def supervised(*states: tuple[str, str]) -> type:
        class Control:
            def __init__(self, home: Home) -> None:
                self.home = home

            def running(self) -> bool:
                return True

            def status(self) -> list[ProgramStatus]:
                return [
                    ProgramStatus(n, s, pid=1, uptime_s=60, exit_status=0, log=tmp_path / n)
                    for n, s in states
                ]

        return Control

    monkeypatch.setattr(doctor, "Supervisor", supervised(("gate", "FATAL"), ("panel", "RUNNING")))
    found = doctor.supervisor(patient)
    assert (found.level, found.fact) == ("fail", "gate is FATAL")
    assert "mm logs gate" in found.remedy
    monkeypatch.setattr(doctor, "Supervisor", supervised(("worker", "STOPPED")))
    assert doctor.supervisor(patient).level == "warn"
    monkeypatch.setattr(doctor, "Supervisor", supervised(("worker", "RUNNING")))
    assert doctor.supervisor(patient).level == "ok"
    monkeypatch.setattr(doctor, "Supervisor", supervised(("gate", "RUNNING")))
    found = doctor.supervisor(patient)
    assert (found.level, found.fact) == ("fail", "not answering: gate")
