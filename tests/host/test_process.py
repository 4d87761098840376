"""Programs under watch: output, limits, and no survivors whoever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from mmadmin.core.errors import Cancelled, DiskFull, InvalidInput, StepFailed
from mmadmin.host import process
from mmadmin.host.process import Limits
from mmadmin.host.sandbox import LEVELS, Level, Sandbox, environment, level_from, level_here
from tests.support.disks import needs_root, small_disk

PATIENCE_S = 60.0
DAEMON, CHILD = f"600.{os.getpid()}", f"601.{os.getpid()}"
"""How long the family sleeps: odd, so that it is known from outside, and this run's alone."""

# A shell that starts a child that starts a daemon in a session of its own; each writes its pid.
FAMILY = f"""
echo $$ > family.1
sh -c 'echo $$ > family.2
(setsid sh -c "echo \\$\\$ > family.3; exec sleep {DAEMON}" &) ; sleep {CHILD}' &
while [ ! -s family.3 ]; do sleep 0.02; done
echo ready
wait
"""


def argv_of(level: Level, folder: Path, *argv: str) -> list[str]:
    """The program inside a level's walls."""
    return Sandbox(level, writable=(folder,)).wrap(argv, cwd=folder)


def run(level: Level, folder: Path, *argv: str, **options: object) -> None:
    """Run a program at a level, in its folder."""
    process.run(argv_of(level, folder, *argv), cwd=folder, env=environment(folder), **options)  # type: ignore[arg-type]


def sleepers() -> list[psutil.Process]:
    """The family's processes, recognised by their odd durations, seen from outside."""
    family = (["sleep", DAEMON], ["sleep", CHILD])
    return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] in family]


def wait_until(condition) -> bool:
    """Wait for something to come true; whether it did."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture(autouse=True)
def _no_family_left():
    """Nothing of the family is there before and after each test."""
    assert not sleepers()
    yield
    left = sleepers()
    for one in left:
        one.kill()
    assert not left


def test_every_level_works_here_and_the_best_is_bubblewrap() -> None:
    """The table of levels is tried for real; this host has all of them."""
    assert level_here() == "bubblewrap"
    assert [level_from(level) for level in LEVELS] == list(LEVELS)
    with pytest.raises(InvalidInput, match="MM_SANDBOX"):
        level_from("docker")


@pytest.mark.parametrize("level", LEVELS)
def test_lines_arrive_one_by_one_and_in_order(level: Level, tmp_path: Path) -> None:
    """LF, CR and a last line without an end are lines; bad UTF-8 is replaced."""
    lines: list[str] = []
    run(level, tmp_path, "printf", r"one\ntwo\rthree\r\n\377four", on_line=lines.append)
    assert lines == ["one", "two", "three", "�four"]


@pytest.mark.parametrize("level", LEVELS)
def test_failure_carries_exit_code_and_last_lines(level: Level, tmp_path: Path) -> None:
    """A bad exit is explained with the program's own last words."""
    with pytest.raises(StepFailed, match="sh ended with exit code 3: it broke") as caught:
        run(level, tmp_path, "sh", "-c", "echo first; echo it broke; exit 3", name="sh")
    assert caught.value.details["exit_code"] == 3
    assert caught.value.details["log_tail"] == ["first", "it broke"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_ended_by_a_signal_says_so(level: Level, tmp_path: Path) -> None:
    """SIGABRT, as the merge tool dies on a full disk, is told from an exit code."""
    with pytest.raises(StepFailed, match="signal 6"):
        run(level, tmp_path, "sh", "-c", "kill -ABRT $$", name="tool")


def test_an_unknown_program_is_a_failure_in_words(tmp_path: Path) -> None:
    """A program that is not there is named."""
    with pytest.raises(StepFailed, match="no-such-program"):
        run("none", tmp_path, "no-such-program")


def test_bubblewrap_has_no_network_and_writes_only_where_allowed(tmp_path: Path) -> None:
    """Inputs are read-only, the network is empty, the caller's environment does not get in."""
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    allowed.mkdir()
    other.mkdir()
    os.environ["MM_CANARY"] = "canary-7f3a"
    lines: list[str] = []
    try:
        script = (
            f"touch {allowed}/yes; touch {other}/no; cat /proc/net/route | wc -l; "
            "env; ls /proc | grep -c '^[0-9]'"
        )
        run("bubblewrap", allowed, "sh", "-c", script, on_line=lines.append)
    finally:
        del os.environ["MM_CANARY"]
    assert (allowed / "yes").exists()
    assert not (other / "no").exists()
    assert any("Read-only file system" in line for line in lines)
    assert not any("canary-7f3a" in line for line in lines)
    assert int(lines[-1]) < 8  # its own pid namespace


def test_bubblewrap_hides_secrets_but_shows_what_is_needed(tmp_path: Path) -> None:
    """A hidden folder looks empty inside; a visible one below it does not."""
    secrets, needed = tmp_path / "secrets", tmp_path / "secrets" / "needed"
    needed.mkdir(parents=True)
    (secrets / "key").write_text("s3cret")
    (needed / "model").write_text("weights")
    lines: list[str] = []
    sandbox = Sandbox("bubblewrap", hidden=(secrets,), visible=(needed,))
    command = sandbox.wrap(["find", str(secrets), "-type", "f"], cwd=Path("/"))
    process.run(command, cwd=tmp_path, env=environment(tmp_path), on_line=lines.append)
    assert lines == [str(needed / "model")]


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_program_leaves_running_ends_with_it(level: Level, tmp_path: Path) -> None:
    """A daemon that a step starts does not outlive the step."""
    daemon = f"touch there; exec sleep {DAEMON} >/dev/null 2>&1"
    script = f"(setsid sh -c '{daemon}' &); while [ ! -e there ]; do sleep 0.02; done"
    run(level, tmp_path, "sh", "-c", script)
    assert not sleepers()


@pytest.mark.parametrize("level", LEVELS)
def test_cancel_ends_the_whole_tree(level: Level, tmp_path: Path) -> None:
    """Child, grandchild and a daemon in its own session are gone when `run` raises."""
    lines: list[str] = []
    with pytest.raises(Cancelled):
        run(
            level, tmp_path, "sh", "-c", FAMILY, on_line=lines.append, cancelled=lambda: bool(lines)
        )
    assert lines == ["ready"]
    assert not sleepers()


CALLER = """
import sys, threading, time
from pathlib import Path
from mmadmin.host import process
from mmadmin.host.sandbox import Sandbox, environment

level, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
script = Path(sys.argv[4]).read_text()

def work():
    process.run(
        Sandbox(level, writable=(folder,)).wrap(["sh", "-c", script], cwd=folder),
        cwd=folder, env=environment(folder), on_line=lambda line: print(line, flush=True),
    )

if how == "thread":
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
"""


@pytest.mark.parametrize("how", ["main", "thread"])
@pytest.mark.parametrize("level", LEVELS)
def test_kill_9_of_the_caller_leaves_no_orphan(level: Level, how: str, tmp_path: Path) -> None:
    """SIGKILL of a worker ends its programs, grandchildren and daemons too, within seconds."""
    script = tmp_path / "script"
    script.write_text(FAMILY)
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CALLER), level, str(tmp_path), how, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert caller.stdout is not None
    try:
        assert caller.stdout.readline() == "ready\n"
        assert wait_until(lambda: len(sleepers()) == 2)
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        caller.stdout.close()
    assert wait_until(lambda: not sleepers())


@pytest.mark.parametrize("level", LEVELS)
def test_the_end_of_another_thread_does_not_kill_the_program(level: Level, tmp_path: Path) -> None:
    """A program whose starting thread is long gone goes on; the kernel's own signal would kill it."""
    results: list[str] = []
    guards: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        # As `process.run` starts it, but from a thread that returns at once.
        argv = argv_of(level, tmp_path, "sh", "-c", "sleep 1; echo alive")
        guards.append(
            subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(process.GUARD)),
                    *(str(os.getpid()), "{}", "--", *argv),
                ],
                stdout=subprocess.PIPE,
                cwd=tmp_path,
                env=environment(tmp_path),
            )
        )

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    output, _ = guards[0].communicate(timeout=PATIENCE_S)
    results.append(output.decode().strip())
    assert results == ["alive"]
    assert guards[0].returncode == 0


@pytest.mark.parametrize("level", LEVELS)
def test_kill_9_of_the_guard_ends_the_program(level: Level, tmp_path: Path) -> None:
    """The guard's own death is noticed: at the weakest level at least by the program itself."""
    guard = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", str(process.GUARD), str(os.getpid()), "{}", "--"),
            *argv_of(level, tmp_path, "sh", "-c", f"echo up; exec sleep {DAEMON}"),
        ],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert guard.stdout is not None
    assert guard.stdout.readline() == b"up\n"
    guard.kill()
    guard.wait()
    guard.stdout.close()
    assert wait_until(lambda: not sleepers())


@pytest.mark.parametrize(
    ("limits", "script", "words"),
    [
        (Limits(time_s=0.5), "while true; do echo x; sleep 0.1; done", "ran longer than 0.5 s"),
        (Limits(silence_s=0.5), "echo x; sleep 600", "said nothing for 0.5 s"),
        (Limits(silence_s=0.5), "exec >&- 2>&-; sleep 600", "said nothing for 0.5 s"),
        (
            Limits(log_bytes=10_000),
            "while true; do echo xxxxxxxxxxxxxxxx; done",
            "10000 bytes of log",
        ),
        (
            Limits(memory_bytes=60 << 20),
            f"exec {sys.executable} -c 'b = bytearray(200 << 20); import time; time.sleep(600)'",
            "bytes of memory",
        ),
    ],
)
def test_limits_end_the_program_and_say_which(
    limits: Limits, script: str, words: str, tmp_path: Path
) -> None:
    """Time, silence, log size and memory each end the tree, in words."""
    with pytest.raises(StepFailed, match=words):
        run("bubblewrap", tmp_path, "sh", "-c", script, limits=limits, name="step")


def test_kernel_limits_reach_the_program(tmp_path: Path) -> None:
    """Address space is refused by the kernel, not only watched."""
    program = "try:\n b = bytearray(1 << 30)\nexcept MemoryError: print('refused')"
    lines: list[str] = []
    run(
        *("bubblewrap", tmp_path, sys.executable, "-c", program),
        limits=Limits(address_space_bytes=512 << 20),
        on_line=lines.append,
    )
    assert lines == ["refused"]


@needs_root
def test_a_full_disk_is_told_from_other_failures(tmp_path: Path) -> None:
    """No room left where the program writes is `DiskFull`, whatever its exit code was."""
    script = "dd if=/dev/zero of=big bs=64k 2>/dev/null; exit 134"
    with (
        small_disk(tmp_path / "full", "256k") as full,
        pytest.raises(DiskFull, match="disk full while dd") as caught,
    ):
        run("bubblewrap", full, "sh", "-c", script, may_fill=[full], name="dd")
    assert caught.value.details["have_bytes"] == 0


def test_inherited_locks_are_held_by_the_guard_until_the_tree_is_gone(tmp_path: Path) -> None:
    """A lock's descriptor goes to the guard and not to the program."""
    read, write = os.pipe()
    lines: list[str] = []
    script = (
        f"test -e /proc/$PPID/fd/{write} && echo guard has it; "
        f"test -e /proc/$$/fd/{write} || echo program has not"
    )
    run("none", tmp_path, "sh", "-c", script, inherit_fds=(write,), on_line=lines.append)
    os.close(write)
    assert os.read(read, 1) == b""  # nobody else has it any more
    os.close(read)
    assert lines == ["guard has it", "program has not"]
