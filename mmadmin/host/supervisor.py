"""The host's process supervisor: supervisord, its configuration and its XML-RPC client.

One supervisord an installation. It runs the services (`services/*.conf`) and the engines
(`engines/*.conf`) and outlives whoever started it. Programs come and go one by one: adding,
stopping or removing one never touches another. Every program carries
`SUPERVISOR_SERVER_URL=unix://<this installation's socket>` in its environment, and so does the
daemon itself, which is how leftovers of a killed supervisord are found, whatever became of their
parents, and a daemon that does not answer yet.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import psutil

from mmadmin.core.callbacks import Report, silent
from mmadmin.core.errors import InvalidInput, NotFound, Unreachable
from mmadmin.core.home import Home
from mmadmin.core.process_identity import ProcessIdentity, process_identity_from
from mmadmin.core.variables import REMEMBERED
from mmadmin.host.termination import PATIENCE_S, end_processes

RPC_TIMEOUT_S = 30.0
START_DEADLINE_S = 60.0
LOG_BYTES = 10 * 1024 * 1024
LOG_BACKUPS = 3
LOG_TAIL_BYTES = 64 * 1024
STOP_DEADLINE_S = 300.0
EXEC_S = 2.0
POLL_S = 0.1
SOON_S = 0.02
"""Between the first looks at what mostly happens at once; then longer, up to `POLL_S`."""
LEFTOVER_ROUNDS = 5
REVIVE_PATIENCE_S = 3.0
"""What a leftover gets to end by itself when people wait for its successor."""
DAEMON = "supervisord"
MARK, MARK_NAME = "SUPERVISOR_SERVER_URL", "SUPERVISOR_PROCESS_NAME"
"""What supervisord sets in the environment of each of its programs."""
State = Literal["running", "stopping", "silent", "absent"]
_RUNS = frozenset({"STARTING", "RUNNING", "BACKOFF", "STOPPING"})
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_COMMENT = re.compile(r"(?:^|\s)[;#]|[\r\n]")
"""What supervisord's configuration reader would cut off as a comment, or as a line."""
_BAD_NAME, _ALREADY_ADDED, _STILL_RUNNING, _NOT_RUNNING = 10, 90, 91, 70
_ALREADY_STARTED, _NO_FILE, _NOT_EXECUTABLE, _SPAWN_ERROR = 60, 20, 21, 50
_SHUTTING_DOWN = 6
"""Fault codes of supervisord's XML-RPC interface."""
_ABSENT = (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError)
"""What a call raises when nobody listens, or stops to in its midst."""


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A program to supervise. Its environment must hold no secret: it lies in a file."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    startsecs: int = 1
    """Seconds after which a running program counts as started."""
    startretries: int = 3
    """How often a program that ends before `startsecs` is started again, with growing pauses."""
    stopwaitsecs: int = 10
    """Seconds between SIGTERM and SIGKILL."""
    priority: int = 100
    """Low ones start first and stop last."""
    autorestart: Literal["true", "false", "unexpected"] = "true"
    stop_group: bool = False
    """SIGTERM to the whole process group instead of the program alone."""
    kill_group: bool = True
    """SIGKILL to the whole process group."""


@dataclass(frozen=True, slots=True)
class ProgramStatus:
    """A supervised program as it is now."""

    name: str
    state: str
    """STOPPED, STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL or UNKNOWN."""
    pid: int | None
    uptime_s: int
    exit_status: int
    log: Path
    message: str = ""
    """What supervisord says about a failed start."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket, with a timeout."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=RPC_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(self._path))
        except OSError:
            self.sock.close()
            raise


class _Transport(xmlrpc.client.Transport):
    """One connection a transport, which lasts for one call; closed with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = _Connection(self._path)
        self._connection = host, connection  # what `close` closes
        return connection


class Supervisor:
    """The supervisor of one installation. Cheap to make; safe to use from several processes."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._config = home.supervisor / "supervisord.conf"
        self._services = home.supervisor / "services"
        self._engines = home.supervisor / "engines"
        self._record = home.run_dir / "supervisord.json"
        self._programs = home.run_dir / "programs.json"
        self._mark = f"unix://{home.supervisor_socket}"

    # The daemon

    @contextmanager
    def alone(self, who: str, on_wait: Report = silent) -> Iterator[None]:
        """Hold the lock on starting and ending the daemon; `who` is shown to those who wait.

        `mm up`, `mm down` and the watchdog take it: what one finds must hold until it has acted.
        """
        from mmadmin.core.store.locks import file_lock  # noqa: PLC0415 (mm status is fast)

        self.home.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        who = f"{who} (pid {os.getpid()})"
        with file_lock(self.home.run_dir / "supervisord.lock", on_wait=on_wait, owner=who):
            yield

    def state(self) -> State:
        """`stopping`: it ends its programs, then itself. `silent`: it listens and says nothing."""
        try:
            self._ask("getState")
        except TimeoutError:
            return "silent"
        except _ABSENT:
            return "absent"
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != _SHUTTING_DOWN:
                raise
            return "stopping"
        return "running"

    def running(self) -> bool:
        """True when it answers on its socket and takes orders."""
        return self.state() == "running"

    def without_socket(self) -> int | None:
        """The pid of a supervisor that runs and has lost its socket; None = there is none.

        It makes the socket again within seconds.
        """
        daemon = None if self.home.supervisor_socket.exists() else self._daemon()
        return daemon.pid if daemon is not None and daemon.alive else None

    def own_pids(self) -> set[int]:
        """The processes of this home's supervisor, also of one that cannot be asked."""
        return {process.pid for _, process in self._family()}

    def pid_of_daemon(self) -> int | None:
        """The supervisor's own pid, when it answers."""
        try:
            return int(self._call("getPID"))
        except Unreachable:
            return None

    def launch(
        self, services: Sequence[ProgramSpec] = (), *, without: Collection[str] = ()
    ) -> list[str]:
        """Start the daemon with these services and every engine that has a file; wait for it.

        When it runs already, services that are new or changed are (re)started, engines are left
        alone; returns those that were changed. The daemon inherits the caller's environment but
        the variables of `without`. Raises `Unreachable` when it does not come up.
        """
        changed: list[str] = []
        with self._locked():
            self._write_config()
            for stale in self._services.glob("*.conf"):
                if stale.stem not in {spec.name for spec in services}:
                    stale.unlink()
            for spec in services:
                _write(self._services / f"{spec.name}.conf", program_section(spec))
            if self.running():
                changed = self._reload_services()
            else:
                self._start_daemon(without)
        self.status()
        return changed

    def _start_daemon(self, without: Collection[str]) -> None:
        argv = [sys.executable, "-W", "ignore", "-m", "supervisor.supervisord"]
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SUPERVISOR_") and name not in without
        }
        give_up = time.monotonic() + START_DEADLINE_S
        try:
            done = subprocess.run(
                [*argv, "-c", str(self._config)],
                cwd=self.home.root,
                env={**clean, MARK: self._mark, MARK_NAME: DAEMON},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=START_DEADLINE_S,
            )
            message = (done.stdout + done.stderr).strip()
            while done.returncode == 0 and time.monotonic() < give_up:
                if (daemon := self._daemon()) is not None:
                    _write(self._record, json.dumps(daemon.as_json()))
                    return
                time.sleep(POLL_S)
        except subprocess.TimeoutExpired:
            message = ""
        message = message or "it does not answer on its socket"
        raise Unreachable(
            f"the supervisor did not start: {message}",
            remedy=f"read {self.home.logs / 'supervisord.log'}",
        )

    def _reload_services(self) -> list[str]:
        added, changed, removed = self._reread()
        known = {path.stem for path in self._services.glob("*.conf")}
        for name in [*changed, *removed]:
            if name in known or not (self._engines / f"{name}.conf").exists():
                self._end_group(name)
        for name in [*added, *changed]:
            if name in known:
                self._tolerant("addProcessGroup", name, but=(_ALREADY_ADDED,))
        return [name for name in changed if name in known]

    def shutdown(self, timeout_s: float, on_progress: Callable[[str], None]) -> list[str]:
        """Stop every program, engines too, and the daemon; return when all are gone.

        One that is just starting, or shuts down already, is waited for. What is left at the
        deadline is killed. Without a daemon, what a killed one left is ended, and returned.
        """
        daemon = self._daemon()
        running = dict(self._recorded())
        give_up = time.monotonic() + timeout_s
        while (state := self.state()) != "absent" or (daemon is not None and daemon.alive):
            daemon = daemon or self._daemon()
            for name in [name for name, process in running.items() if not process.alive]:
                del running[name]
                on_progress(f"{name} stopped")
            if state == "silent" or time.monotonic() > give_up:
                family = [process for _, process in self._family()]
                end_processes([*family, daemon] if daemon else family, patience_s=0)
                break
            with suppress(Unreachable, ProcessLookupError):  # it has ended just now
                if state == "running":
                    self._call("shutdown")
                elif state == "absent" and daemon is not None and daemon.alive:
                    os.kill(daemon.pid, signal.SIGTERM)  # the same order, to one without a socket
            time.sleep(POLL_S)
        ended = self.end_leftovers()
        for path in (self._record, self._programs):
            path.unlink(missing_ok=True)
        return ended

    def revive(self) -> list[str]:
        """Start a killed daemon again with all that it had, its engines too; what had to be ended.

        Raises `Unreachable` when it does not come up.
        """
        ended = self.end_leftovers(patience_s=REVIVE_PATIENCE_S)
        with self._locked():
            self._start_daemon(REMEMBERED)  # each service is told those that it reads
        self.status()
        return ended

    def end_leftovers(self, *, patience_s: float = PATIENCE_S) -> list[str]:
        """End what a killed supervisor left running; `name (pid N)` of each.

        Does nothing while the supervisor answers, even if it is shutting down.
        """
        if self.state() in ("running", "stopping"):
            return []
        ended: set[str] = set()
        for _ in range(LEFTOVER_ROUNDS):  # one that was deaf may have had children meanwhile
            found = self._family()
            if not found:
                break
            end_processes([process for _, process in found], patience_s=patience_s)
            ended |= {f"{name} (pid {process.pid})" for name, process in found}
            patience_s = 0
        self.home.supervisor_socket.unlink(missing_ok=True)
        return sorted(ended)

    def _daemon(self) -> ProcessIdentity | None:
        """The daemon's process, by its own word or by the record; None = it is not known."""
        pid = self.pid_of_daemon()
        if pid is not None:
            return ProcessIdentity.of(pid)
        daemons = [p for name, p in (*self._recorded(), *self._family()) if name == DAEMON]
        return next((daemon for daemon in daemons if daemon.alive), None)

    def _family(self) -> list[tuple[str, ProcessIdentity]]:
        """What carries this home's supervisor in its environment, or is recorded and alive."""
        mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        found: list[tuple[str, ProcessIdentity]] = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
                this = ProcessIdentity.of(process.pid)
                if this and env.get(MARK) == self._mark and this.pid not in mine:
                    name = env.get(MARK_NAME, process.name())
                    found.append((name, this))
            except (psutil.Error, OSError):
                continue  # another user's, or gone meanwhile
        found += [(n, p) for n, p in self._recorded() if p.alive and p.pid not in mine]
        return found

    def _recorded(self) -> Iterator[tuple[str, ProcessIdentity]]:
        """Programs as they were when last looked at, and the daemon."""
        records = _read_json(self._programs) | {DAEMON: _read_json(self._record)}
        for name, record in records.items():
            if (process := process_identity_from(record)) is not None:
                yield name, process

    # Programs

    def status(self) -> list[ProgramStatus]:
        """Every program, and a fresh record of their processes. Raises `Unreachable`."""
        rows = cast("list[dict[str, Any]]", self._call("getAllProcessInfo"))
        found = [_status(row) for row in rows]
        running = {p.name: ProcessIdentity.of(p.pid) for p in found if p.pid is not None}
        record = {name: process.as_json() for name, process in running.items() if process}
        with suppress(OSError):  # on a full disk the programs are still listed
            _write(self._programs, json.dumps(record))
        return found

    def program(self, name: str) -> ProgramStatus | None:
        """One program; None when there is none of that name. Raises `Unreachable`."""
        try:
            row = self._call("getProcessInfo", name)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == _BAD_NAME:
                return None
            raise
        return _status(cast("dict[str, Any]", row))

    def last_signal(self, name: str) -> str:
        """The signal that ended a program last, as `SIGKILL`; empty = it ended by itself.

        supervisord tells a signal in its log alone.
        """
        try:
            with (self.home.logs / "supervisord.log").open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES, 0))
                text = file.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        ends = re.findall(rf"exited: {re.escape(name)} \((.*?);", text)
        return ends[-1].rpartition(" ")[2] if ends and "SIG" in ends[-1] else ""

    def pid(self, name: str) -> int | None:
        """The pid of a program that runs."""
        found = self.program(name)
        return found.pid if found else None

    def start_program(self, spec: ProgramSpec) -> None:
        """Add an engine and start it; another of that name is replaced. Does not wait for it.

        The same one that runs already is left alone: two that start it at once start it once.
        """
        path, text = self._engines / f"{spec.name}.conf", program_section(spec)
        with self._locked():
            known = path.exists() and path.read_text(encoding="utf-8") == text
            found = self.program(spec.name) if known else None
            if found is not None and found.state in ("STARTING", "RUNNING"):
                return
            _write(path, text)
            self._end_group(spec.name)
            self._reread()
            self._tolerant("addProcessGroup", spec.name, but=(_ALREADY_ADDED,))

    def stop_program(self, name: str, *, timeout_s: float = STOP_DEADLINE_S) -> None:
        """Stop a program (SIGTERM, then SIGKILL after its `stopwaitsecs`) and wait for its end.

        It stays known. Nothing happens when it does not run. Raises `Unreachable` at the deadline.
        """
        self._wait_for_exec(name)
        at_once = False
        self._tolerant("stopProcess", name, at_once, but=(_BAD_NAME, _NOT_RUNNING))
        give_up, pause_s = time.monotonic() + timeout_s, SOON_S
        while (found := self.program(name)) is not None and found.state in _RUNS:
            if time.monotonic() > give_up:
                raise Unreachable(
                    f"{name} has not stopped after {timeout_s:.0f} s",
                    remedy=f"look at process {found.pid}",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.25, POLL_S)

    def _wait_for_exec(self, name: str) -> None:
        """Let a program that was just forked become itself.

        Between fork and exec a signal meets supervisord's own handler in the child and is lost.
        """
        found = self.program(name)
        if found is None or found.pid is None or found.uptime_s > EXEC_S:
            return
        give_up = time.monotonic() + EXEC_S
        try:
            child = psutil.Process(found.pid)
            parent = child.parent()
            before = parent.cmdline() if parent else []
            while child.cmdline() == before and time.monotonic() < give_up:
                time.sleep(POLL_S)
        except psutil.Error:
            return  # gone meanwhile

    def restart_program(self, name: str) -> None:
        """Stop a program and start it again. Raises `NotFound`."""
        if self.program(name) is None:
            raise NotFound(f"no program is called {name}", remedy="`mm status` lists them")
        self.stop_program(name)
        wait = False
        self._call("startProcess", name, wait)

    def is_service(self, name: str) -> bool:
        """True for what `launch` was given, False for an engine."""
        return (self._services / f"{name}.conf").exists()

    def start_again(self, name: str) -> None:
        """Start a program that was given up or stopped; its state tells what becomes of it."""
        wait = False
        fails_again = (_BAD_NAME, _NO_FILE, _NOT_EXECUTABLE, _SPAWN_ERROR)
        self._tolerant("startProcess", name, wait, but=(_ALREADY_STARTED, *fails_again))

    def remove_program(self, name: str) -> None:
        """Stop an engine and forget it."""
        with self._locked():
            self._end_group(name)
            (self._engines / f"{name}.conf").unlink(missing_ok=True)
            if self.running():
                self._reread()

    def _end_group(self, name: str) -> None:
        """Stop a program and take it out, whatever state it is in."""
        give_up = time.monotonic() + RPC_TIMEOUT_S
        while True:
            self.stop_program(name)
            try:
                self._call("removeProcessGroup", name)
            except xmlrpc.client.Fault as fault:
                if fault.faultCode == _BAD_NAME:
                    return
                if fault.faultCode != _STILL_RUNNING or time.monotonic() > give_up:
                    raise
                time.sleep(POLL_S)
            else:
                return

    def _reread(self) -> tuple[list[str], list[str], list[str]]:
        """Read the files again; names added, changed, removed. Starts and stops nothing."""
        rows = cast("list[list[list[str]]]", self._call("reloadConfig"))
        added, changed, removed = rows[0]
        return added, changed, removed

    def _tolerant(self, method: str, *args: Any, but: Sequence[int]) -> None:
        """Call a method whose faults of these codes mean that there is nothing to do."""
        try:
            self._call(method, *args)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode not in but:
                raise

    def _call(self, method: str, *args: Any) -> Any:
        """One XML-RPC call. Raises `Unreachable` when the supervisor does not answer."""
        try:
            return self._ask(method, *args)
        except _ABSENT as error:
            raise Unreachable(
                f"the supervisor does not answer: {error}", remedy="start it with `mm up`"
            ) from error
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != _SHUTTING_DOWN:
                raise
            raise Unreachable(
                "the supervisor is shutting down", remedy="start it again with `mm up`"
            ) from fault

    def _ask(self, method: str, *args: Any) -> Any:
        """One XML-RPC call, with whatever it raises."""
        proxy = xmlrpc.client.ServerProxy(
            "http://localhost", transport=_Transport(self.home.supervisor_socket), allow_none=True
        )
        with proxy:
            return getattr(proxy, f"supervisor.{method}")(*args)

    # Files

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One change of the configuration at a time, over all processes."""
        for folder in (self.home.supervisor, self._services, self._engines, self.home.run_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.home.logs / "engines").mkdir(parents=True, exist_ok=True)
        with (self.home.supervisor / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write_config(self) -> None:
        text = f"""\
[unix_http_server]
file = {_escaped(str(self.home.supervisor_socket))}
chmod = 0700

[supervisord]
logfile = {_escaped(str(self.home.logs / "supervisord.log"))}
logfile_maxbytes = {LOG_BYTES}
logfile_backups = {LOG_BACKUPS}
pidfile = {_escaped(str(self.home.run_dir / "supervisord.pid"))}
childlogdir = {_escaped(str(self.home.logs))}
umask = 077
identifier = mmadmin
strip_ansi = true

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[rpcinterface:mmadmin]
supervisor.rpcinterface_factory = mmadmin.host.supervisor_socket:keep

[include]
files = services/*.conf engines/*.conf
"""
        _write(self._config, text)


def program_section(spec: ProgramSpec) -> str:
    """A program as supervisord's configuration. Raises `InvalidInput` for what it cannot say."""
    if not _NAME.fullmatch(spec.name):
        raise InvalidInput(f"{spec.name!r} cannot name a program", remedy="use letters, digits, -")
    environment = ",".join(f"{key}={_quoted(value)}" for key, value in sorted(spec.env.items()))
    lines = {
        "command": shlex.join(spec.argv),
        "environment": environment,
        "directory": str(spec.cwd) if spec.cwd else "",
        "autostart": "true",
        "autorestart": spec.autorestart,
        "startsecs": str(spec.startsecs),
        "startretries": str(spec.startretries),
        "stopsignal": "TERM",
        "stopwaitsecs": str(spec.stopwaitsecs),
        "stopasgroup": "true" if spec.stop_group else "false",
        "killasgroup": "true" if spec.kill_group else "false",
        "priority": str(spec.priority),
        "redirect_stderr": "true",
        # Expanded twice by supervisord, unlike everything else.
        "stdout_logfile": str(spec.log).replace("%", "%%"),
        "stdout_logfile_maxbytes": str(LOG_BYTES),
        "stdout_logfile_backups": str(LOG_BACKUPS),
        "umask": "077",
    }
    body = "\n".join(f"{key} = {_escaped(value)}" for key, value in lines.items() if value)
    return f"[program:{spec.name}]\n{body}\n"


def _escaped(value: str) -> str:
    """A value for supervisord's configuration file, where `%` expands and `;` comments."""
    if _COMMENT.search(value):
        raise InvalidInput(
            f"supervisord's configuration cannot hold {value!r}",
            remedy="leave out line ends, and blanks before ';' or '#'",
        )
    return value.replace("%", "%%")


def _quoted(value: str) -> str:
    """An environment value as supervisord reads it: no escapes, quotes at the ends are cut off."""
    quote = "'" if '"' in value else '"'
    if quote in value or value.strip("'\"") != value:
        raise InvalidInput(
            f"supervisord's environment cannot hold {value!r}",
            remedy="use one kind of quotation mark, and none at the ends",
        )
    return f"{quote}{value}{quote}"


def _status(row: Mapping[str, Any]) -> ProgramStatus:
    pid, start, now = int(row["pid"]), int(row["start"]), int(row["now"])
    return ProgramStatus(
        name=str(row["name"]),
        state=str(row["statename"]),
        pid=pid or None,
        uptime_s=max(now - start, 0) if pid else 0,
        exit_status=int(row["exitstatus"]),
        log=Path(str(row["stdout_logfile"])),
        message=str(row["spawnerr"]),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return {}


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole, readable by its owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    scratch.touch(mode=0o600)
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
