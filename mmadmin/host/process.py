"""Run a program to its end: output line by line, limits, and no survivors.

Promises: when `run` returns or raises, the program and everything it started is gone; when the
calling process dies, by SIGKILL too, they go within moments (`guard.py`). Blocking; safe to call
from any thread.
"""

from __future__ import annotations

import codecs
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmadmin.core.callbacks import silent
from mmadmin.core.errors import Cancelled, DiskFull, StepFailed
from mmadmin.host.guard import descendants

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.2
MEMORY_POLL_S = 1.0
TAIL_LINES = 40
LINE_LIMIT = 8192
"""Characters; longer lines are cut into pieces of this size."""
GUARD_PATIENCE_S = 15.0
ROOM_FLOOR = 1 << 20
"""Bytes; a file system with less room than this is full."""
DISK_FULL_WORDS = ("No space left on device", "Disk quota exceeded")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use; 0 = no limit. Overstepping ends it with `StepFailed`."""

    time_s: float = 0
    silence_s: float = 0
    """Seconds without a byte of output."""
    log_bytes: int = 0
    memory_bytes: int = 0
    """Anonymous memory of the whole tree, watched."""
    address_space_bytes: int = 0
    """RLIMIT_AS of each process: the kernel refuses."""
    file_bytes: int = 0
    """RLIMIT_FSIZE of each process."""
    cpu_s: int = 0
    """RLIMIT_CPU of each process."""

    def rlimits(self) -> dict[str, int]:
        """The part that the kernel enforces, by the `resource` module's names."""
        limits = {
            "RLIMIT_AS": self.address_space_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_CPU": self.cpu_s,
        }
        return {name: value for name, value in limits.items() if value}


NO_LIMITS = Limits()


class _Lines:
    """Cuts a byte stream into lines at LF and CR, whatever its encoding."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, chunk: bytes, *, final: bool = False) -> list[str]:
        text = self._rest + self._decoder.decode(chunk, final).replace("\r\n", "\n")
        text = text.replace("\r", "\n")
        *whole, self._rest = text.split("\n")
        lines = [piece for line in whole for piece in self._pieces(line)]
        if len(self._rest) > LINE_LIMIT or (final and self._rest):
            lines += self._pieces(self._rest)
            self._rest = ""
        return lines

    @staticmethod
    def _pieces(line: str) -> list[str]:
        return [line[i : i + LINE_LIMIT] for i in range(0, max(1, len(line)), LINE_LIMIT)]


@dataclass(slots=True)
class _Watch:
    """What has been seen of a running program, against its limits."""

    limits: Limits
    guard: int
    started: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    log_bytes: int = 0
    lines: _Lines = field(default_factory=_Lines)
    _memory_at: float = 0.0

    def heard_bytes(self, count: int) -> None:
        if count:
            self.heard = time.monotonic()
        self.log_bytes += count

    def verdict(self) -> str | None:
        """In words what was overstepped, or None."""
        now, limits = time.monotonic(), self.limits
        if limits.time_s and now - self.started > limits.time_s:
            return f"ran longer than {limits.time_s:g} s"
        if limits.silence_s and now - self.heard > limits.silence_s:
            return f"said nothing for {limits.silence_s:g} s"
        if limits.log_bytes and self.log_bytes > limits.log_bytes:
            return f"wrote more than {limits.log_bytes} bytes of log"
        if limits.memory_bytes and now - self._memory_at > MEMORY_POLL_S:
            self._memory_at = now
            used = sum(_anonymous_bytes(pid) for pid in descendants(self.guard))
            if used > limits.memory_bytes:
                return f"used {used} bytes of memory; {limits.memory_bytes} are allowed"
        return None


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0  # ended meanwhile
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _never() -> bool:
    return False


def run(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    on_line: Callable[[str], None] = silent,
    cancelled: Callable[[], bool] = _never,
    limits: Limits = NO_LIMITS,
    inherit_fds: Sequence[int] = (),
    may_fill: Sequence[Path] = (),
    name: str = "",
) -> None:
    """Run `argv` to its end.

    `inherit_fds` are held by the guard (a lock stays taken until the tree is gone), never by the
    program. `may_fill` are folders whose file systems it writes: a failure with no room left
    there is `DiskFull`. Raises `StepFailed` (details `exit_code`, `log_tail`) and `Cancelled`.
    """
    name = name or Path(argv[0]).name
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    guard = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", str(GUARD)),
            *(str(os.getpid()), json.dumps(limits.rlimits()), "--", *argv),
        ],
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=tuple(inherit_fds),
    )
    try:
        reason = _follow(guard, _Watch(limits, guard.pid), on_line, tail, cancelled)
    finally:
        _end(guard)
    if reason == "cancelled":
        raise Cancelled(f"{name} was cancelled")
    if reason is not None:
        raise StepFailed(
            f"{name} {reason} and was ended",
            remedy="see the log; raise the limit if this is how the step should be",
            exit_code=guard.returncode,
            log_tail=list(tail),
        )
    if guard.returncode:
        _fail(name, guard.returncode, list(tail), may_fill)


def _follow(
    guard: subprocess.Popen[bytes],
    watch: _Watch,
    on_line: Callable[[str], None],
    tail: deque[str],
    cancelled: Callable[[], bool],
) -> str | None:
    """Hand on lines until the program has ended; a reason when it must be ended."""
    asked = 0.0
    for chunk in _output(guard):
        watch.heard_bytes(len(chunk))
        for line in watch.lines.feed(chunk):
            tail.append(line)
            on_line(line)
        if time.monotonic() - asked >= POLL_S:
            asked = time.monotonic()
            if cancelled():
                return "cancelled"
        reason = watch.verdict()
        if reason is not None:
            return reason
    for line in watch.lines.feed(b"", final=True):
        tail.append(line)
        on_line(line)
    return None


def _output(guard: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """The program's output until it has ended; an empty chunk whenever it is silent a while."""
    if guard.stdout is None:
        raise AssertionError("Popen without a pipe")
    with selectors.DefaultSelector() as selector:
        selector.register(guard.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(POLL_S):
                yield b""
                continue
            chunk = os.read(guard.stdout.fileno(), 1 << 16)
            if not chunk:
                break
            yield chunk
    while guard.poll() is None:  # it closed its output and works on
        yield b""
        time.sleep(0.01)


def _end(guard: subprocess.Popen[bytes]) -> None:
    """The tree is gone when this returns; a no-op when it has ended by itself."""
    if guard.poll() is None:
        guard.send_signal(signal.SIGTERM)
        try:
            guard.wait(GUARD_PATIENCE_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()
    if guard.stdout is not None:
        guard.stdout.close()


def _fail(name: str, code: int, tail: list[str], may_fill: Sequence[Path]) -> None:
    text = "\n".join(tail)
    for folder in may_fill:
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if free < ROOM_FLOOR or any(words in text for words in DISK_FULL_WORDS):
            raise DiskFull(
                f"disk full while {name} was writing",
                remedy="free space on the store's disk and retry",
                have_bytes=free,
                log_tail=tail,
            )
    how = f"was ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"  # noqa: PLR2004
    last = next((line for line in reversed(tail) if line.strip()), "it said nothing")
    raise StepFailed(
        f"{name} {how}: {last}", remedy="see the step's log", exit_code=code, log_tail=tail
    )
