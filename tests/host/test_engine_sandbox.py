"""An engine's sandbox, tried from inside by programs that want out, and from outside."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mmadmin.core.engines.llama_server.questions import QUESTIONS
from mmadmin.core.engines.protocol import Expectation, LaunchSpec
from mmadmin.core.errors import InvalidInput, ProbeFailed, ToolMissing
from mmadmin.core.home import Home
from mmadmin.host import engine_process, engine_sandbox, facts, system_calls
from mmadmin.host.engine_sandbox import EngineSandbox, Holds, holds_here
from mmadmin.host.supervisor import Supervisor
from tests.host.test_engine_process import SECRET, home, path, uid, wait_for
from tests.support.python import PYTHON

__all__ = ["home", "path", "uid"]
INTRUDER = Path(__file__).with_name("intruder.py")
ENGINE = """
import json, os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(7)))
print("up", flush=True)
time.sleep(600)
"""


def run(level: str, code: str, *words: str, tmp_path: Path, **more: Any) -> Any:
    """What a Python program prints as JSON at a level, its own folder being `tmp_path`."""
    sandbox = EngineSandbox(level, readable=PYTHON, writable=[str(tmp_path)], **more)
    argv = [sys.executable, "-c", code, *words]
    with sandbox.enclosing(argv, dict(os.environ)) as (command, env, given):
        done = subprocess.run(
            command, env=env, pass_fds=given, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def intruder(path: str, home: Home, report: Path) -> LaunchSpec:
    """A launch of a program that looks for what it should not find, then waits."""
    wanted = {
        "files": [str(home.root), str(home.secrets / "key_pepper"), str(Path(__file__).parent)],
        "sockets": [str(home.broker_socket), str(home.supervisor_socket)],
    }
    return LaunchSpec(
        engine_kind="llama-server",
        argv=[sys.executable, str(INTRUDER), json.dumps(wanted), str(report)],
        env={},
        secret_env="LLAMA_API_KEY",
        expect=Expectation(alias="model"),
        questions=QUESTIONS,
        load_deadline_s=60,
        socket=path,
        readable=[*PYTHON, str(INTRUDER)],
    )


@pytest.fixture
def found(home: Home, uid: str, path: str) -> dict[str, Any]:
    """What an intruder in an engine's place has found, started as every engine is."""
    home.secrets.mkdir(exist_ok=True)
    (home.secrets / "key_pepper").write_text("s3cret")
    report = home.scratch(uid) / "report.json"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = intruder(path, home, report)
        made = replace(made, argv=[*made.argv, str(listening.getsockname()[1])])
        engine_process.start(home, uid, made, SECRET)
        wait_for("its report", report.exists)
    answer: dict[str, Any] = json.loads(report.read_text())
    return answer


def test_an_engine_sees_nothing_of_the_installation_and_has_no_network(
    found: dict[str, Any],
) -> None:
    """Neither secrets nor sockets, no other process, no connection, no way to more."""
    assert found["files"] == {}, "what is above its own folders looks empty"
    assert found["sockets"] == []
    assert found["connected"] == []
    assert found["interfaces"] == ["lo"]
    assert max(found["processes"]) < 10
    assert found["environment"] == []
    assert found["capabilities"] == "0000000000000000"
    assert found["written"] == []
    assert found["calls"] == []


def test_an_engine_is_limited(found: dict[str, Any]) -> None:
    """No core dumps, and ends to files, open files and processes; first to go without memory."""
    limits = found["limits"]
    assert limits["RLIMIT_CORE"] == 0
    assert limits["RLIMIT_NOFILE"] <= engine_sandbox.OPEN_FILES
    assert 0 < limits["RLIMIT_NPROC"] <= engine_sandbox.PROCESSES
    assert 0 < limits["RLIMIT_FSIZE"] <= engine_sandbox.FILE_BYTES
    assert 0 < limits["RLIMIT_DATA"] <= psutil.virtual_memory().total
    assert found["oom_score_adj"] == engine_sandbox.OUT_OF_MEMORY_SCORE


def test_memory_of_an_engine_with_gpus_is_not_limited() -> None:
    """CUDA reserves more addresses than any machine has memory."""
    code = (
        "import resource\nfrom mmadmin.host.engine_sandbox import limit_resources\n"
        "limit_resources(on_gpus=True)\nprint(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(done.stdout) == resource.getrlimit(resource.RLIMIT_DATA)[0]


def engine(path: str, code: str = ENGINE) -> LaunchSpec:
    """A launch that runs some Python."""
    return LaunchSpec(
        engine_kind="llama-server",
        argv=[sys.executable, "-c", code],
        env={},
        secret_env="LLAMA_API_KEY",
        expect=Expectation(alias="model"),
        questions=QUESTIONS,
        load_deadline_s=60,
        socket=path,
        readable=PYTHON,
    )


@pytest.fixture(params=["bubblewrap", "unshare", "none"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each level, as `MM_SANDBOX` asks for it."""
    monkeypatch.setenv("MM_SANDBOX", request.param)
    return request.param


def test_an_engine_is_asked_to_end_and_its_exit_code_is_told(
    level: str, home: Home, uid: str, path: str
) -> None:
    """SIGTERM from the supervisor reaches it, whatever is between them."""
    log = home.engine_log(uid)
    launcher = engine_process.start(home, uid, engine(path), SECRET)
    pid = engine_process.program(launcher.pid)
    assert pid is not None
    assert (pid == launcher.pid) == (level == "none")
    wait_for("its start", lambda: "up" in log.read_text())
    engine_process.stop(home, uid)
    assert "asked to end" in log.read_text()
    assert not launcher.alive
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_signal_that_ends_an_engine_ends_its_launcher(
    level: str, home: Home, uid: str, path: str, number: signal.Signals
) -> None:
    """So that the supervisor starts it again and can say what happened."""
    launcher = engine_process.start(home, uid, engine(path), SECRET, startsecs=0)
    pid = engine_process.program(launcher.pid)
    assert pid is not None
    os.kill(pid, number)
    wait_for("its end", lambda: not launcher.alive)
    wait_for("the word", lambda: Supervisor(home).last_signal(uid))
    assert Supervisor(home).last_signal(uid) == number.name


def test_an_engine_ends_with_its_killed_launcher(
    level: str, home: Home, uid: str, path: str
) -> None:
    """Nothing in the sandbox outlives the process that the supervisor knows."""
    launcher = engine_process.start(home, uid, engine(path), SECRET, startsecs=0)
    pid = engine_process.program(launcher.pid)
    assert pid is not None
    os.kill(launcher.pid, signal.SIGKILL)
    wait_for("its end", lambda: not psutil.pid_exists(pid))


def test_a_closure_that_lacks_something_fails_with_a_message(
    home: Home, uid: str, path: str, tmp_path: Path
) -> None:
    """The log has the missing file; a check of the flags says what a sandbox shows."""
    missing = tmp_path / "vocabulary.json"
    missing.write_text("{}")
    made = engine(path, f"open({str(missing)!r}); import time; time.sleep(600)")
    with pytest.raises(ProbeFailed, match=r"No such file or directory: '.*vocabulary\.json"):
        start_and_look(home, uid, made)
    shown = replace(made, readable=[*PYTHON, str(missing)])
    launcher = engine_process.start(home, uid, shown, SECRET)
    assert launcher.alive
    asked = replace(made, help_argv=(sys.executable, "-c", f"open({str(missing)!r})"))
    with pytest.raises(ProbeFailed, match="No such file") as refused:
        engine_process.check_command(asked)
    assert "sees its own objects" in refused.value.remedy


def start_and_look(home: Home, uid: str, made: LaunchSpec) -> None:
    """Start an engine and fail with its last words once it has ended."""
    engine_process.start(home, uid, made, SECRET)
    wait_for("an end", lambda: _state(home, uid) not in ("STARTING", "RUNNING"))
    raise engine_process.failed_probe(home, uid, "process", "it ended")


def _state(home: Home, uid: str) -> str:
    found = engine_process.status(home, uid)
    return found.state if found else ""


def test_an_engine_gets_the_device_files_of_its_own_gpus(
    home: Home, uid: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None without GPUs; all of the host's for a seat that names none."""
    asked: list[list[int]] = []

    def nodes(indices: list[int]) -> list[Path]:
        asked.append(list(indices))
        return [Path("/dev/null")]

    gpu = facts.GpuFacts(3, "card", "9.0", 1 << 30, 1 << 30)
    monkeypatch.setattr(engine_process, "gpu_nodes", nodes)
    monkeypatch.setattr(engine_process, "driver_and_gpus", lambda: ("580", (gpu,)))
    made = engine(path)
    assert engine_process.sandbox_of(made).devices == []
    assert engine_process.sandbox_of(replace(made, devices=[1])).devices == ["/dev/null"]
    engine_process.sandbox_of(replace(made, devices=None))
    assert asked == [[1], [3]]


def test_libraries_outside_the_systems_folders_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's folder that only the linker's cache names is bound where it resolves to."""
    driver = tmp_path / "driver" / "580"
    driver.mkdir(parents=True)
    (driver / "libcuda.so.1").touch()
    (tmp_path / "current").symlink_to(driver)
    listed = (
        f"1 libs found\n\tlibcuda.so.1 (libc6) => {tmp_path}/current/libcuda.so.1\nCache by x\n"
    )
    done = subprocess.CompletedProcess([], 0, stdout=listed)
    engine_sandbox.linker_folders.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", lambda *_, **__: done)
        folders = engine_sandbox.linker_folders()
    assert folders == (str(tmp_path / "current"), str(driver))
    code = f"import json, os; print(json.dumps(os.listdir({str(tmp_path / 'current')!r})))"
    own = tmp_path / "own"
    own.mkdir()
    assert run("bubblewrap", code, tmp_path=own) == ["libcuda.so.1"]
    engine_sandbox.linker_folders.cache_clear()


def test_every_forbidden_call_is_refused_and_threads_and_children_work(tmp_path: Path) -> None:
    """The filter is tried call by call: EPERM for each, ENOSYS for clone3."""
    code = """
import ctypes, errno, json, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def error(number, *words):
    ctypes.set_errno(0)
    libc.syscall(number, *words, 0, 0, 0, 0)
    return errno.errorcode.get(ctypes.get_errno(), "")
said = {name: error(number, 0, 0) for name, number in json.loads(sys.argv[1]).items()}
said["clone3"] = error(435, 0, 0)
said["a namespace by clone"] = error(json.loads(sys.argv[2]), 0x10000000 | 17, 0)
libc.ioctl(0, 0x5412, b"x")
said["typing into a terminal"] = errno.errorcode.get(ctypes.get_errno(), "")
thread = threading.Thread(target=said.update, args=({"thread": "works"},))
thread.start()
thread.join()
subprocess.run(["/bin/true"], check=True)
print(json.dumps(said))
"""
    names = dict(system_calls.forbidden())
    assert {"mount", "ptrace", "bpf", "keyctl", "unshare", "setns", "kexec_load"} <= set(names)
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    said = run("bubblewrap", code, json.dumps(names), json.dumps(clone), tmp_path=tmp_path)
    assert said.pop("clone3") == "ENOSYS"
    assert said.pop("thread") == "works"
    assert set(said.values()) == {"EPERM"}, said


def test_a_machine_whose_calls_are_not_known_has_no_filter() -> None:
    """Rather than one that forbids the wrong ones."""
    assert system_calls.filter_program("riscv64") == b""
    assert len(system_calls.filter_program("aarch64")) % 8 == 0


def test_what_holds_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level as it is here; one that is asked for and does not work is refused."""
    best = holds_here()
    assert (best.level, best.all) == ("bubblewrap", True)
    assert "no network" in best.message
    unshare = holds_here("unshare")
    assert (unshare.network, unshare.processes, unshare.files) == (True, True, False)
    none = holds_here("none")
    assert not any((none.network, none.files, none.processes, none.privileges, none.system_calls))
    assert "not fenced in at all" in none.message
    with pytest.raises(InvalidInput, match="docker"):
        holds_here("docker")
    monkeypatch.setattr(engine_sandbox, "_look", lambda level: none if level == "none" else None)
    holds_here.cache_clear()
    try:
        assert holds_here() == none
        with pytest.raises(ToolMissing, match="bubblewrap"):
            holds_here("bubblewrap")
    finally:
        holds_here.cache_clear()


def test_a_partial_sandbox_names_only_what_holds() -> None:
    """As on a machine without a filter."""
    held = Holds("bubblewrap", True, True, True, True, False)  # noqa: FBT003
    assert not held.all
    assert "system calls" not in held.message


@pytest.mark.engine
def test_the_real_engine_sees_its_own_model_alone(engine_store: Any, tmp_path: Path) -> None:
    """llama-server in its sandbox runs from its closure; a model outside it is not there."""
    server = str(engine_store.server)
    outside = tmp_path / "other.gguf"
    outside.write_bytes(b"GGUF")
    own = tmp_path / "own"
    own.mkdir()
    sandbox = EngineSandbox("bubblewrap", [str(engine_store.server.parent)], [str(own)])

    def last(*words: str) -> subprocess.CompletedProcess[str]:
        with sandbox.enclosing([server, *words], {}) as (command, env, given):
            return subprocess.run(
                command, env=env, pass_fds=given, capture_output=True, text=True, check=False
            )

    assert last("--version").returncode == 0
    refused = last("--model", str(outside), "--host", str(own / "engine.sock"))
    assert refused.returncode != 0
    assert "No such file or directory" in refused.stderr + refused.stdout
