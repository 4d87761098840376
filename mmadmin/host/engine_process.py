"""Engines as supervised processes: start, look, stop for certain.

Start writes a 0600 launch file and hands the program to the supervisor, so that the engine
outlives whoever asked for it. Stop ends the whole process group and returns when the process is
gone and its GPU memory is given back.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Timer

import psutil

from mmadmin.core.callbacks import Report, silent
from mmadmin.core.engines.protocol import LaunchSpec
from mmadmin.core.errors import InvalidInput, InvalidSpec, ProbeFailed, Unreachable
from mmadmin.core.home import Home
from mmadmin.core.private_file import write_private
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.host import process_tree
from mmadmin.host.engine_sandbox import EngineSandbox, engine_of, holds_here, level_setting
from mmadmin.host.facts import driver_and_gpus, gpu_nodes, gpu_processes
from mmadmin.host.sandbox import Level
from mmadmin.host.supervisor import ProgramSpec, ProgramStatus, Supervisor
from mmadmin.host.termination import end_processes

STOP_WAIT_S = 15
"""What an engine may take to end after SIGTERM."""
RELEASE_S = 60.0
"""What the driver may take to give a dead process's memory back."""
POLL_S = 0.1
LAUNCH_POLL_S = 0.02
LAUNCH_S = 60.0
"""What the launcher may take, on a machine that is busy."""
LAUNCHER = "mmadmin.host.launch"
PRIORITY = 15
"""After the broker, before the gate: what stops last-started first lets the gate finish its
streams while the engines still run."""
HELP_S = 60.0
"""What a built engine may take to list its options."""
LINES_OF_A_START = 1000
"""Lines of a log that are searched for what ended an engine."""
CAUSE_CHARACTERS = 600
PROJECT = Path(__file__).resolve().parent.parent.parent


def launch_file(home: Home, uid: str) -> Path:
    """The replica's launch file."""
    return home.replicas / f"{uid}.json"


def start(
    home: Home, uid: str, launch: LaunchSpec, secret: str, *, startsecs: int | None = None
) -> ProcessIdentity:
    """Start an engine under the supervisor and return once its process exists.

    Idempotent: one that runs with this launch is left alone, one with another is replaced.
    `startsecs` (default: from the load deadline) is how long it must run before its end counts as
    a crash instead of a failed start.
    Raises `ProbeFailed` when it ends at once, `Unreachable` when there is no supervisor,
    `InvalidSpec` for options that this build does not have.
    """
    if not secret.strip():
        raise InvalidInput("an engine needs a secret", remedy="run `mm up` once: it makes them")
    supervisor = Supervisor(home)
    running = process(home, uid)
    if running is not None:
        if runs(home, uid, launch):
            return running
        stop(home, uid, recorded=running)
    check_command(launch)
    path = launch_file(home, uid)
    folders = [home.scratch(uid), Path(launch.socket).parent]
    write_launch_file(path, launch, secret, sandbox_of(launch, folders))
    for folder in folders:
        folder.mkdir(mode=0o700, exist_ok=True)
    supervisor.start_program(program_spec(home, uid, launch, startsecs=startsecs))
    return wait_for_process(home, uid)


def sandbox_of(launch: LaunchSpec, writable: Sequence[Path] = ()) -> EngineSandbox:
    """The sandbox that a launch gets here, at the best level or at that of `MM_SANDBOX`.

    Raises `ToolMissing` where the level does not work.
    """
    return EngineSandbox(
        level=holds_here(level_setting()).level,
        readable=launch.readable,
        writable=[str(folder) for folder in writable],
        devices=[str(node) for node in _nodes(launch.devices)],
    )


def _nodes(devices: Sequence[int] | None) -> list[Path]:
    if devices is None:
        devices = [gpu.index for gpu in driver_and_gpus()[1]]
    return gpu_nodes(devices) if devices else []


def sandbox_level(home: Home, uid: str) -> str:
    """The level that an engine was last started at; empty = before engines had a sandbox."""
    try:
        holds = json.loads(launch_file(home, uid).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(holds.get("sandbox", {}).get("level", ""))


def runs(home: Home, uid: str, launch: LaunchSpec) -> bool:
    """True when the engine's launch file holds this command."""
    try:
        holds = json.loads(launch_file(home, uid).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(holds.get("argv") == list(launch.argv))


def check_command(launch: LaunchSpec) -> None:
    """Refuse options that this very build does not have, by its own help text.

    Raises `InvalidSpec` naming them, `ProbeFailed` when the program cannot be run at all.
    """
    unknown_options = launch.questions.unknown_options
    if unknown_options is None or not launch.help_argv:
        return
    # No GPU is woken for a list of options: that alone can take seconds.
    env = tuple(sorted({**launch.env, "CUDA_VISIBLE_DEVICES": ""}.items()))
    sandbox = sandbox_of(replace(launch, devices=()))
    text = _help_text(tuple(launch.help_argv), env, sandbox.level, tuple(sandbox.readable))
    if unknown := unknown_options(launch.argv, text):
        raise InvalidSpec(
            f"serve: this build of the engine has no option {', '.join(unknown)}",
            remedy="remove it, or choose an engine version that has it",
            field="serve",
        )


@lru_cache(maxsize=32)
def _help_text(
    help_argv: tuple[str, ...],
    env: tuple[tuple[str, str], ...],
    level: Level,
    readable: tuple[str, ...],
) -> str:
    """The help of a build, which lies in the store and does not change."""
    own = {"PATH": os.environ.get("PATH", ""), **dict(env)}
    try:
        with EngineSandbox(level, readable).enclosing(help_argv, own) as (command, its_env, given):
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env=its_env,
                pass_fds=given,
                timeout=HELP_S,
                check=False,
            )
        lines = (done.stderr or done.stdout).strip().splitlines()
        failed = f"exit code {done.returncode}: {lines[-1] if lines else ''}"
    except (OSError, subprocess.TimeoutExpired) as error:
        done, failed = None, str(error)
    if done is None or done.returncode != 0:
        raise ProbeFailed(
            f"the engine's program cannot be run here ({failed})",
            remedy="build the engine on this host; for a GPU build, check the driver"
            if level != "bubblewrap"
            else "build the engine on this host; for a GPU build, check the driver. In its sandbox"
            " it sees its own objects and the system's libraries only",
            probe="command",
        )
    return done.stdout


def program_spec(
    home: Home, uid: str, launch: LaunchSpec, *, startsecs: int | None = None
) -> ProgramSpec:
    """The engine as the supervisor runs it."""
    if startsecs is None:
        startsecs = min(max(launch.load_deadline_s // 10, 5), 3600)
    return ProgramSpec(
        name=uid,
        argv=[sys.executable, "-m", LAUNCHER, str(launch_file(home, uid))],
        cwd=PROJECT,
        log=home.engine_log(uid),
        startsecs=startsecs,
        startretries=3,
        stopwaitsecs=STOP_WAIT_S,
        priority=PRIORITY,
        autorestart="true",
    )


def write_launch_file(path: Path, launch: LaunchSpec, secret: str, sandbox: EngineSandbox) -> None:
    """The launch file, complete or absent, mode 0600 from its first byte."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = {
        "argv": list(launch.argv),
        "socket": launch.socket,
        "env": dict(launch.env),
        "secret_env": launch.secret_env,
        "secret": secret,
        "sandbox": sandbox.as_json(),
    }
    write_private(path, json.dumps(data))


def program(launcher: int) -> int | None:
    """The pid of the engine itself, which its launcher holds in a sandbox; None = not yet.

    The launcher is what the supervisor started; without a sandbox it has become the engine.
    """
    try:
        argv = psutil.Process(launcher).cmdline()
    except psutil.NoSuchProcess:
        return None
    if LAUNCHER not in argv:
        return launcher if argv and "supervisor.supervisord" not in argv else None
    return engine_of(launcher)


def wait_for_process(home: Home, uid: str, *, timeout_s: float = LAUNCH_S) -> ProcessIdentity:
    """The engine's launcher, as the supervisor knows it, as soon as the engine has started.

    Raises `ProbeFailed` with the log's last lines when it ends instead.
    """
    supervisor = Supervisor(home)
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        found = supervisor.program(uid)
        if found and found.pid:
            started = ProcessIdentity.of(found.pid)
            if started is not None and program(found.pid) is not None:
                return started
        if found and found.state in ("FATAL", "EXITED"):
            raise failed_probe(home, uid, "process", "it ended as soon as it was started")
        time.sleep(LAUNCH_POLL_S)
    raise failed_probe(home, uid, "process", f"it did not start within {timeout_s:.0f} s")


def failed_probe(
    home: Home, uid: str, probe: str, why: str, launch: LaunchSpec | None = None
) -> ProbeFailed:
    """Why an engine is not what it should be, with the last lines of its log."""
    log = home.engine_log(uid)
    tail = log_tail(log)
    last = next((line for line in reversed(tail) if line.strip()), "")
    message = f"the engine {uid} failed its probe: {why}"
    if probe == "process" and (cause := _cause_of_end(log, launch)):
        message += f": {cause[:CAUSE_CHARACTERS]}"
    elif probe == "process" and last:
        message += f"; its last line: {last.strip()[:300]}"
    return ProbeFailed(message, remedy=f"read {log}", probe=probe, log_tail=[*tail])


def _cause_of_end(log: Path, launch: LaunchSpec | None) -> str:
    """What this kind of engine logged about its end, since it was started last; empty = nothing."""
    read = launch.questions.cause_of_end if launch else None
    if read is None:
        return ""
    lines = log_tail(log, LINES_OF_A_START)
    starts = [n for n, line in enumerate(lines) if line.startswith("mmadmin: starting ")]
    return read(lines[starts[-1] + 1 :] if starts else lines)


def status(home: Home, uid: str) -> ProgramStatus | None:
    """The engine as the supervisor sees it; None when it does not know it."""
    return Supervisor(home).program(uid)


def engines(home: Home) -> list[str]:
    """The uids of all engines that the supervisor has or would start, sorted."""
    return sorted(path.stem for path in (home.supervisor / "engines").glob("*.conf"))


def forget_moved(home: Home) -> bool:
    """Forget engines that would start in another place: the folder or the program was moved.

    Only while no supervisor runs. True when there were any.
    """
    moved = [
        uid
        for uid in engines(home)
        if str(launch_file(home, uid)) not in _config(home, uid)
        or str(sys.executable) not in _config(home, uid)
    ]
    for uid in moved:
        stop(home, uid)
    return bool(moved)


def _config(home: Home, uid: str) -> str:
    path = home.supervisor / "engines" / f"{uid}.conf"
    return path.read_text(encoding="utf-8").replace("%%", "%")


def process(home: Home, uid: str) -> ProcessIdentity | None:
    """The process of an engine that the supervisor runs (see `program`); None = it is down.

    Raises `Unreachable` without a supervisor.
    """
    pid = Supervisor(home).pid(uid)
    return None if pid is None else ProcessIdentity.of(pid)


def stop(
    home: Home,
    uid: str,
    *,
    recorded: ProcessIdentity | None = None,
    term_s: float = STOP_WAIT_S,
    on_progress: Report = silent,
) -> None:
    """End an engine with all its processes; return when its memory is free.

    SIGTERM, then SIGKILL after `term_s`. `recorded` is its process by the records, so that an
    engine that outlived its supervisor is found. Idempotent.
    Raises `Unreachable` when the memory is not given back in time.
    """
    supervisor = Supervisor(home)
    tree = process_tree.members(recorded.pid) if recorded is not None and recorded.alive else []
    if supervisor.running():
        found = supervisor.program(uid)
        family = process_tree.members(found.pid) if found and found.pid else []
        on_progress(f"stopping {uid}")
        # Force comes after `term_s` at the latest, after the supervisor's own `stopwaitsecs` else.
        killer = Timer(term_s, end_processes, [family], {"patience_s": 0})
        killer.daemon = True
        killer.start()
        try:
            supervisor.remove_program(uid)
        finally:
            killer.cancel()
        end_processes(family, patience_s=0)
        tree = [*tree, *family]
    else:
        (home.supervisor / "engines" / f"{uid}.conf").unlink(missing_ok=True)
    if recorded is not None and recorded.alive:
        on_progress(f"ending process {recorded.pid}")
        end_processes([recorded], patience_s=term_s)
    launch_file(home, uid).unlink(missing_ok=True)
    for folder in (home.scratch(uid), home.engine_socket(uid).parent):
        shutil.rmtree(folder, ignore_errors=True)
    pids = {one.pid for one in [*tree, *([recorded] if recorded else [])]}
    _wait_released(pids, on_progress)


def _wait_released(pids: set[int], on_progress: Report) -> None:
    """Return when no GPU counts memory for these pids."""
    give_up = time.monotonic() + RELEASE_S
    reported = False
    while True:
        held = {pid: size for pid, size in gpu_processes().items() if pid in pids}
        if not held:
            return
        if time.monotonic() > give_up:
            raise Unreachable(
                f"the ended engine still holds {sum(held.values()) >> 20} MiB of GPU memory after"
                f" {RELEASE_S:.0f} s",
                remedy="look at the driver's log; the host may need a restart",
            )
        if not reported:
            on_progress("waiting until its memory is free")
            reported = True
        time.sleep(POLL_S)


def log_tail(path: Path, lines: int = 20, *, since: int = 0) -> list[str]:
    """The last lines of a log, from the byte `since` on; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since if since <= size else 0, size - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]
