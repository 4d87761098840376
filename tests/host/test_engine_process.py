"""Engines under a real supervisord: started, proved, stopped for certain.

A stub engine plays the faults; the real one has its own tests.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mmadmin.core.engines.llama_server.questions import QUESTIONS
from mmadmin.core.engines.protocol import Expectation, LaunchSpec
from mmadmin.core.errors import (
    Cancelled,
    InvalidInput,
    InvalidSpec,
    ProbeFailed,
    Unreachable,
)
from mmadmin.core.home import Home
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.host import engine_process, launch, process_tree
from mmadmin.host.readiness import is_loading, wait_ready
from mmadmin.host.supervisor import ProgramSpec, Supervisor, program_section
from mmadmin.host.termination import end_processes
from tests.support.python import PYTHON

PATIENCE_S = 60
STUB = Path(__file__).with_name("stub_engine.py")
SECRET = "canary-5f1c0e"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An installation with a running supervisor, ended by force if a test leaves it running."""
    home = Home(tmp_path_factory.mktemp("home"))
    supervisor = Supervisor(home)
    supervisor.launch()
    yield home
    supervisor.shutdown(30, lambda _line: None)
    assert supervisor.end_leftovers() == []


@pytest.fixture
def uid(home, request):
    """A replica's uid; its engine is gone when the test ends."""
    name = f"r-{abs(hash(request.node.name)) % 10**10}"
    yield name
    with suppress(Unreachable):
        engine_process.stop(home, name, term_s=1)


@pytest.fixture
def path(home, uid):
    """The socket of the test's engine."""
    return str(home.engine_socket(uid))


def stub(path: str, **plan) -> LaunchSpec:
    """The launch of a stub engine with some faults."""
    full = {"alias": "model", "model": "/m.gguf", "context": 4096, "slots": 2, **plan}
    return LaunchSpec(
        engine_kind="llama-server",
        argv=[sys.executable, str(STUB), path, json.dumps(full)],
        env={},
        secret_env="LLAMA_API_KEY",
        expect=Expectation(alias="model", slots=2, context_per_slot=4096, model_file="/m.gguf"),
        questions=QUESTIONS,
        load_deadline_s=PATIENCE_S,
        socket=path,
        readable=[*PYTHON, str(STUB.parent), *files_of(plan)],
    )


def files_of(plan: Mapping[str, object]) -> list[str]:
    """The folders of the files that a plan names, as far as they are there."""
    files = [Path(value) for value in plan.values() if str(value).startswith("/")]
    return [str(file.parent) for file in files if file.parent.is_dir() and file.parent != Path("/")]


def engine_of(launcher: ProcessIdentity) -> psutil.Process:
    """The engine itself, inside its sandbox."""
    pid = engine_process.program(launcher.pid)
    assert pid is not None
    return psutil.Process(pid)


def failure(home, uid, made, **more) -> ProbeFailed:
    """How an engine fails its probe."""
    with pytest.raises(ProbeFailed) as caught:
        wait_ready(home, uid, made, SECRET, **more)
    return caught.value


def wait_for(what: str, look: Callable[[], object]) -> None:
    """Return once `look` gives something true."""
    give_up = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < give_up, what
        time.sleep(0.05)


def wait_for_listener(path: str) -> None:
    """Return once somebody listens on the socket."""
    wait_for(path, lambda: process_tree.listener(path))


def kill(supervisor: Supervisor) -> None:
    """End the daemon as a lack of memory would."""
    daemon = supervisor.pid_of_daemon()
    assert daemon
    os.kill(daemon, signal.SIGKILL)
    wait_for("its end", lambda: not supervisor.running())


def test_an_engine_is_started_proved_and_stopped(home, uid, path, tmp_path):
    """The whole way: process, socket, secret, alias, context, completion; then nothing is left.

    503 on health is waited out, however early the socket answers.
    """
    loaded = tmp_path / "loaded"
    made = stub(path, load_until=str(loaded))
    said: list[str] = []

    def told(words: str) -> None:
        said.append(words)
        if words == "loading the model":
            loaded.touch()

    process = engine_process.start(home, uid, made, SECRET)
    ready = wait_ready(home, uid, made, SECRET, on_progress=told)
    assert (ready.process, ready.context_per_slot, ready.slots) == (process, 4096, 2)
    assert ready.completion == " east."
    assert said[-2:] == ["loading the model", "answering; proving that it is the right one"]
    assert not is_loading(made, SECRET)
    assert engine_process.process(home, uid) == process
    assert engine_process.start(home, uid, made, SECRET) == process
    assert uid in engine_process.engines(home)
    engine_process.stop(home, uid)
    assert not process.alive
    assert process_tree.listener(path) is None
    assert engine_process.status(home, uid) is None
    assert uid not in engine_process.engines(home)
    assert not engine_process.launch_file(home, uid).exists()
    engine_process.stop(home, uid)


def text_of(path: Path) -> str:
    """What a file holds; nothing when it is none, or was put in another's place just now."""
    try:
        return path.read_text("utf-8", "replace") if path.is_file() else ""
    except FileNotFoundError:
        return ""


def test_the_secret_is_in_no_argv_and_in_no_file_that_others_read(home, uid, path):
    """It lies in one 0600 file and in the engine's environment, nowhere else."""
    process = engine_process.start(home, uid, stub(path), SECRET)
    wait_ready(home, uid, stub(path), SECRET)
    file = engine_process.launch_file(home, uid)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            assert SECRET not in " ".join(one.cmdline())
    assert [p for p in home.root.rglob("*") if SECRET in text_of(p)] == [file]
    assert engine_of(process).environ()["LLAMA_API_KEY"] == SECRET


def test_an_operators_environment_does_not_reach_the_engine(tmp_path, monkeypatch):
    """LLAMA_ARG_… in a shell would change the engine behind the deployment file's back."""
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")
    path = tmp_path / "launch.json"
    made = replace(
        stub("/nowhere/engine.sock"),
        argv=[sys.executable, "-c", "import os; print(sorted(os.environ))"],
    )
    engine_process.write_launch_file(path, made, SECRET, engine_process.sandbox_of(made))
    command = [sys.executable, "-m", "mmadmin.host.launch", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "LLAMA_API_KEY" in done.stdout
    assert "LLAMA_ARG_CTX_SIZE" not in done.stdout
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"secret": ""}, "has no secret"),
        ({"secret": " \r\n"}, "has no secret"),
        ({"argv": ["/nowhere/llama-server"]}, "cannot be started"),
    ],
)
def test_a_bad_launch_file_is_refused(tmp_path, change, words):
    """An engine without a key would answer everyone; it is not started at all."""
    path = tmp_path / "launch.json"
    made = stub("/nowhere/engine.sock")
    engine_process.write_launch_file(path, made, SECRET, engine_process.sandbox_of(made))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    command = [sys.executable, "-m", "mmadmin.host.launch", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == launch.EXIT_BAD_FILE
    assert words in done.stderr


def test_a_launch_file_that_others_may_read_is_refused(tmp_path):
    """The secret must not lie about."""
    path = tmp_path / "launch.json"
    made = stub("/nowhere/engine.sock")
    engine_process.write_launch_file(path, made, SECRET, engine_process.sandbox_of(made))
    path.chmod(0o640)
    command = [sys.executable, "-m", "mmadmin.host.launch", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == launch.EXIT_BAD_FILE
    assert "0600" in done.stderr


def test_an_empty_secret_starts_nothing(home, uid, path):
    """Refused before anything is written."""
    with pytest.raises(InvalidInput, match="needs a secret"):
        engine_process.start(home, uid, stub(path), " ")
    assert engine_process.status(home, uid) is None


def test_the_socket_of_a_killed_engine_is_no_hindrance(home, uid, path):
    """SIGKILL leaves the socket's file behind; the next start takes its place."""
    Path(path).parent.mkdir(mode=0o700, parents=True)
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(path)
    assert process_tree.listener(path) is None
    engine_process.start(home, uid, stub(path), SECRET)
    assert wait_ready(home, uid, stub(path), SECRET).completion == " east."
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700


def test_an_engine_with_another_launch_is_replaced(home, uid, path):
    """As one is that an earlier version started on a TCP port."""
    first = engine_process.start(home, uid, stub(path), SECRET)
    assert engine_process.start(home, uid, stub(path), SECRET) == first
    second = engine_process.start(home, uid, stub(path, speed=7), SECRET)
    assert second != first
    assert not first.alive
    assert wait_ready(home, uid, stub(path, speed=7), SECRET).process == second


def test_another_process_on_the_socket_fails_the_probe(home, uid, path):
    """What answers there is somebody else."""
    Path(path).parent.mkdir(mode=0o700, parents=True)
    other = subprocess.Popen(
        stub(path).argv, env={**os.environ, "LLAMA_API_KEY": SECRET}, stdout=subprocess.DEVNULL
    )
    try:
        wait_for_listener(path)
        idle = replace(stub(path), argv=["/bin/sleep", "600"])
        file = engine_process.launch_file(home, uid)
        elsewhere = replace(idle, socket=f"{path}.none")
        engine_process.write_launch_file(
            file, elsewhere, SECRET, engine_process.sandbox_of(elsewhere)
        )
        Supervisor(home).start_program(engine_process.program_spec(home, uid, idle))
        engine_process.wait_for_process(home, uid)
        assert failure(home, uid, idle).details["probe"] == "identity"
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("plan", "failed"),
    [
        ({"exit": 1}, ("process", "cannot find tokenizer merges")),
        ({"kill": "SIGILL"}, ("process", "by SIGILL (the program uses instructions that this CPU")),
        ({"kill": "SIGKILL"}, ("process", "for lack of memory")),
        ({"open": True}, ("secret", "instead of 401")),
        ({"serve_alias": "other"}, ("identity", "it serves other, not model")),
        ({"model": "/old.gguf"}, ("identity", "/old.gguf")),
        ({"context": 2048}, ("context", "2048 tokens")),
        ({"slots": 1}, ("context", "1 slots")),
        ({"empty": True}, ("completion", "came back empty")),
        ({"status": 500}, ("completion", "answered with 500")),
    ],
)
def test_an_engine_that_is_not_right_is_refused(home, uid, path, tmp_path, *, plan, failed):
    """Each kind of wrong engine fails in words, with its probe named."""
    probe, words = failed
    made = stub(path, **plan, end_when=str(tmp_path / "started"))
    engine_process.start(home, uid, made, SECRET)
    (tmp_path / "started").touch()
    error = failure(home, uid, made)
    assert error.details["probe"] == probe
    assert words in error.message
    assert isinstance(error.details["log_tail"], list)


def test_an_engine_that_loads_for_ever_is_refused(home, uid, path):
    """It says so until the deadline; the log's last lines come along."""
    made = stub(path, load_until="/nowhere")
    engine_process.start(home, uid, made, SECRET)
    wait_for_listener(path)
    assert is_loading(made, SECRET)
    error = failure(home, uid, made, deadline_s=0)
    assert error.details["probe"] == "ready"
    assert "not ready in time: loading the model" in error.message
    assert isinstance(error.details["log_tail"], list)


def test_a_default_template_in_place_of_the_planned_one_is_refused(home, uid, path, tmp_path):
    """An engine that could not parse the template may answer with another one."""
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}\n")
    made = stub(path, template="{{ messages[0].content }}")
    made = replace(made, expect=replace(made.expect, template_path=str(template)))
    engine_process.start(home, uid, made, SECRET)
    wait_ready(home, uid, made, SECRET)
    template.write_text("{{ other }}")
    assert "another chat template" in failure(home, uid, made).message


def test_healthy_but_dead_is_not_ready(home, uid, path, monkeypatch):
    """Health answers 200, completions never come back: that is a failure, by deadline."""
    monkeypatch.setattr("mmadmin.host.readiness.COMPLETION_S", 1.0)
    made = stub(path, hang=True)
    engine_process.start(home, uid, made, SECRET)
    error = failure(home, uid, made)
    assert error.details["probe"] == "completion"
    assert "did not come back" in error.message


def test_a_wait_can_be_given_up(home, uid, path):
    """A cancelled activation does not wait for the deadline."""
    made = stub(path, load_until="/nowhere")
    engine_process.start(home, uid, made, SECRET)

    def check() -> None:
        raise Cancelled("a person cancelled it")

    with pytest.raises(Cancelled):
        wait_ready(home, uid, made, SECRET, check=check)


def test_a_deaf_engine_and_its_children_are_killed_as_a_group(home, uid, path):
    """SIGTERM is ignored by both; after the wait nothing of the group is left."""
    made = stub(path, deaf=True, child=True)
    process = engine_process.start(home, uid, made, SECRET)
    wait_ready(home, uid, made, SECRET)
    children = engine_of(process).children()
    assert len(children) == 1
    engine_process.stop(home, uid, term_s=1)
    assert not process.alive
    assert not children[0].is_running() or children[0].status() == psutil.STATUS_ZOMBIE
    assert process_tree.listener(path) is None


def test_an_end_waits_for_the_gpu_memory_of_a_worker(home, uid, path, monkeypatch):
    """The driver may count memory for a child of the engine after both have ended."""
    process = engine_process.start(home, uid, stub(path, child=True), SECRET)
    wait_for("its child", lambda: engine_of(process).children())
    child = engine_of(process).children()[0].pid
    held = iter([{child: 1 << 30}, {child: 1 << 30}, {1: 1 << 30}])
    with monkeypatch.context() as patched:
        patched.setattr(engine_process, "gpu_processes", lambda: next(held))
        engine_process.stop(home, uid, term_s=1)
    assert next(held, None) is None


def test_options_that_this_build_lacks_are_refused_before_it_is_started(home, uid, path):
    """Its own help text is the last word; a program that does not run is told at once."""
    help_text = "-c, --ctx-size N   size\n--jinja, --no-jinja   template engine"
    say = (sys.executable, "-c", f"print({help_text!r})")
    made = replace(stub(path), argv=["x", "--ctx-size", "1", "--no-jinja"], help_argv=say)
    engine_process.check_command(made)
    with pytest.raises(InvalidSpec, match="no option --jinjo"):
        engine_process.start(home, uid, replace(made, argv=["x", "--jinjo"]), SECRET)
    broken = (sys.executable, "-c", "import sys; sys.exit('libcuda.so.1: cannot open')")
    with pytest.raises(ProbeFailed, match=r"exit code 1: libcuda\.so\.1"):
        engine_process.start(home, uid, replace(made, help_argv=broken), SECRET)
    with pytest.raises(ProbeFailed, match="No such file"):
        engine_process.check_command(replace(made, help_argv=("/nowhere",)))
    assert engine_process.status(home, uid) is None


def test_an_engine_outlives_the_thread_that_started_it(home, uid, path):
    """Nothing ties it to the life of the worker's thread."""
    made = stub(path)
    thread = threading.Thread(target=engine_process.start, args=(home, uid, made, SECRET))
    thread.start()
    thread.join()
    assert wait_ready(home, uid, made, SECRET).completion == " east."


def test_one_program_comes_and_goes_without_touching_another(home, uid, path):
    """Adding, replacing and removing a second engine leaves the first one's pid alone."""
    first = engine_process.start(home, uid, stub(path), SECRET)
    supervisor = Supervisor(home)
    other = ProgramSpec("other", ["/bin/sleep", "600"], home.logs / "other.log")
    supervisor.start_program(other)
    wait_for("its process", lambda: supervisor.pid("other"))
    pid = supervisor.pid("other")
    supervisor.start_program(other)
    assert supervisor.pid("other") == pid
    supervisor.start_program(replace(other, argv=["/bin/sleep", "601"]))
    supervisor.restart_program("other")
    supervisor.remove_program("other")
    supervisor.launch()
    assert supervisor.program("other") is None
    assert engine_process.process(home, uid) == first


def test_a_crashed_engine_is_started_again(home, uid, path):
    """After it had started once, its end is a crash, and the supervisor brings it back."""
    made = stub(path)
    process = engine_process.start(home, uid, made, SECRET, startsecs=0)
    wait_ready(home, uid, made, SECRET)
    os.kill(process.pid, signal.SIGKILL)
    wait_for("another", lambda: engine_process.process(home, uid) not in (None, process))
    again = engine_process.wait_for_process(home, uid)
    assert wait_ready(home, uid, made, SECRET).process == again


def test_what_a_killed_supervisor_leaves_is_found_and_ended(tmp_path):
    """Its engine goes on after a SIGKILL of the supervisor; the next start clears it away."""
    home = Home(tmp_path)
    supervisor = Supervisor(home)
    supervisor.launch()
    made = stub(str(home.engine_socket("left")), deaf=True)
    process = engine_process.start(home, "left", made, SECRET)
    wait_ready(home, "left", made, SECRET)
    assert supervisor.end_leftovers() == []
    kill(supervisor)
    assert process.alive
    with pytest.raises(Unreachable, match="mm up"):
        supervisor.status()
    engine_process.stop(home, "left", recorded=process, term_s=1)
    assert not process.alive
    assert supervisor.end_leftovers() == []


def test_a_supervisor_that_shuts_down_is_unreachable(tmp_path):
    """`mm down` in the middle of an activation is no bug of ours; a worker takes it up later."""
    supervisor = Supervisor(Home(tmp_path))
    deaf = ProgramSpec(
        name="deaf",
        argv=["/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"],
        env={},
        cwd=tmp_path,
        log=tmp_path / "deaf.log",
        startsecs=0,
        startretries=0,
        stopwaitsecs=20,
        priority=1,
    )
    supervisor.launch([deaf])
    wait_for("the trap", lambda: "up" in text_of(deaf.log))
    supervisor._call("shutdown")
    with pytest.raises(Unreachable, match="mm up"):
        supervisor.program("deaf")
    assert supervisor.state() == "stopping"
    assert supervisor.end_leftovers() == []
    assert supervisor.shutdown(0.5, lambda _line: None) == []
    assert supervisor.state() == "absent"


def test_leftovers_are_named_when_they_are_ended(tmp_path):
    """Without any record, by the mark in their environment."""
    home = Home(tmp_path)
    supervisor = Supervisor(home)
    supervisor.launch([ProgramSpec("service", ["/bin/sleep", "600"], home.logs / "service.log")])
    pid = supervisor.pid("service")
    assert pid
    service = ProcessIdentity.of(pid)
    assert service
    kill(supervisor)
    (home.run_dir / "programs.json").unlink(missing_ok=True)
    assert supervisor.end_leftovers() == [f"service (pid {pid})"]
    assert not service.alive


def test_engines_stop_after_what_still_needs_them(home, path):
    """A gate that finishes its streams (priority 20) ends before the engines do."""
    made = engine_process.program_spec(home, "x", stub(path))
    assert made.priority < 20


def test_launch_starts_changes_and_removes_services(tmp_path):
    """A second launch restarts what changed, ends what is no longer listed, and nothing else."""
    home = Home(tmp_path / "my % home")
    supervisor = Supervisor(home)
    keep = ProgramSpec(
        "keep", ["/bin/sleep", "600"], home.logs / "keep.log", {"A": 'x % "y" \\ ,;'}
    )
    gone = ProgramSpec("gone", ["/bin/sleep", "600"], home.logs / "gone.log")
    supervisor.launch([keep, gone])
    try:
        pids = {p.name: p.pid for p in supervisor.status()}
        assert psutil.Process(pids["keep"]).environ()["A"] == 'x % "y" \\ ,;'
        changed = ProgramSpec("new", ["/bin/sleep", "601"], home.logs / "new.log")
        supervisor.launch([keep, changed])
        after = {p.name: p.pid for p in supervisor.status()}
        assert set(after) == {"keep", "new"}
        assert after["keep"] == pids["keep"]
        supervisor.launch([keep, replace(changed, argv=["/bin/sleep", "602"])])
        assert {p.name: p.pid for p in supervisor.status()}["new"] != after["new"]
    finally:
        supervisor.shutdown(PATIENCE_S, lambda _line: None)
    assert not supervisor.running()
    assert not any(psutil.pid_exists(pid) for pid in pids.values() if pid)


def test_a_value_that_the_configuration_cannot_hold_is_refused(tmp_path):
    """Supervisord would cut it off as a comment, in silence."""
    supervisor = Supervisor(Home(tmp_path))
    with pytest.raises(InvalidInput, match="cannot hold"):
        supervisor.launch([ProgramSpec("x", ["/bin/echo", "a ;b"], tmp_path / "x.log")])
    for value in ("a ;b", "'\"", "a'", "a\nb"):
        odd = ProgramSpec("x", ["/bin/echo"], tmp_path / "x.log", {"A": value})
        with pytest.raises(InvalidInput, match="cannot hold"):
            supervisor.launch([odd])
    with pytest.raises(InvalidInput, match="cannot name"):
        supervisor.launch([ProgramSpec("x:y", ["/bin/echo"], tmp_path / "x.log")])


def test_a_clock_that_moves_changes_no_process(tmp_path, monkeypatch):
    """An hour's correction after the records were written: leftovers are still found and ended.

    psutil's start times move with the clock, so moving what it adds to them is a clock's step.
    """
    supervisor = Supervisor(Home(tmp_path))
    unmarked = ["/usr/bin/env", "-u", "SUPERVISOR_SERVER_URL", "sleep", "600"]
    supervisor.launch([ProgramSpec("service", unmarked, tmp_path / "service.log")])
    pid = supervisor.pid("service")
    assert pid
    service = ProcessIdentity.of(pid)
    before = psutil.Process(pid).create_time()
    kill(supervisor)
    stepped = psutil.boot_time() - 3600
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: stepped)
    assert psutil.Process(pid).create_time() < before - 3000
    assert ProcessIdentity.of(pid) == service
    assert supervisor.end_leftovers() == [f"service (pid {pid})"]


def test_only_the_very_process_is_ended():
    """A pid whose process began at another moment is somebody else's: it is left alone."""
    other = subprocess.Popen(["/bin/sleep", "600"])
    try:
        this = ProcessIdentity.of(other.pid)
        assert this
        assert end_processes([replace(this, started=this.started - 1)], patience_s=0) == []
        assert end_processes([replace(this, boot="another boot")], patience_s=0) == []
        assert other.poll() is None
        assert end_processes([this], patience_s=0) == [other.pid]
    finally:
        other.kill()
        other.wait()


def test_engines_of_a_moved_home_are_forgotten(tmp_path, monkeypatch):
    """Their programs name the old place; those that name this one stay."""
    old, new = Home(tmp_path / "old"), Home(tmp_path / "new")
    folder = old.supervisor / "engines"
    folder.mkdir(parents=True)
    spec = engine_process.program_spec(old, "a.1", stub(1))
    (folder / "a.1.conf").write_text(program_section(spec))
    assert not engine_process.forget_moved(old)
    old.root.rename(new.root)
    assert engine_process.forget_moved(new)
    assert engine_process.engines(new) == []
    here = engine_process.program_spec(new, "a.2", stub(1))
    (new.supervisor / "engines" / "a.2.conf").write_text(program_section(here))
    monkeypatch.setattr(sys, "executable", "/elsewhere/python")
    assert engine_process.forget_moved(new), "the checkout was moved"
