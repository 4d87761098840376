"""Stands between us and a program: whatever becomes of us, the program's whole tree ends.

Run as a script (`python -I -S guard.py PARENT_PID LIMITS -- argv...`), standard library only, so
that it starts in milliseconds. It

- watches its caller through a pidfd, so that it notices the death of the *process* (the kernel's
  parent-death signal fires when the calling *thread* ends, which kills healthy work);
- is a subreaper: grandchildren that daemonise are re-parented to it, not to init;
- kills every descendant when the caller is gone, when it is told to end (SIGTERM), and when the
  program itself has ended, so that nothing is left behind;
- exits with the program's exit code (128 + signal when a signal ended it).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_PATIENCE_S = 10.0
"""A process in uninterruptible sleep may outlast SIGKILL; we do not wait for it longer."""
CANNOT_EXECUTE = 127


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(root: int) -> list[int]:
    """The pids below `root`, from /proc; racing forks are found by asking again."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.extend(below)
        queue.extend(below)
    return found


def _kill_all() -> None:
    deadline = time.monotonic() + KILL_PATIENCE_S
    me = os.getpid()
    while time.monotonic() < deadline:
        for pid in descendants(me):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _keep_to_myself() -> None:
    """Descriptors that the caller handed down (locks) are the guard's, not the program's."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > 2:  # noqa: PLR2004 (beyond the standard streams)
            with suppress(OSError):  # the listing's own descriptor is gone by now
                os.set_inheritable(int(entry.name), False)  # noqa: FBT003


def _become_program(command: list[str], limits: dict[str, int], guard: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the guard has one thread: its end is the guard's end
    if os.getppid() != guard:
        os._exit(CANNOT_EXECUTE)
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (soft, soft))
    try:
        os.execvp(command[0], command)  # noqa: S606 (the guard's purpose)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    os._exit(CANNOT_EXECUTE)


def main() -> int:
    """Run the program under watch and return its exit code."""
    caller = int(sys.argv[1])
    limits: dict[str, int] = json.loads(sys.argv[2])
    command = sys.argv[4:]
    _keep_to_myself()
    told_to_end, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        caller_fd = os.pidfd_open(caller)
    except ProcessLookupError:
        return CANNOT_EXECUTE
    if os.getppid() != caller:
        return CANNOT_EXECUTE
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _become_program(command, limits, guard)
    child_fd = os.pidfd_open(child)
    poll = select.poll()
    for fd in (caller_fd, child_fd, told_to_end):
        poll.register(fd, select.POLLIN)
    ready = {fd for fd, _event in poll.poll()}
    if child_fd not in ready:
        _kill_all()
        return 128 + signal.SIGKILL
    status = os.waitpid(child, 0)[1]
    _kill_all()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
