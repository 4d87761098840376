"""A program in an engine's place that looks for what it should not find.

`python intruder.py WANTED REPORT PORT`: WANTED is JSON with paths of files and Unix sockets, PORT
one of the host's loopback on which somebody listens. It writes what it has found, and waits.
"""

from __future__ import annotations

import ctypes
import json
import resource
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

MOUNT, UNSHARE = 165, 272
OUTSIDE = ("192.0.2.1", 443)
LIMITS = ("RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_DATA")


def contents(paths: list[str]) -> dict[str, str]:
    """What can be read of files, and of all files below folders but our own program."""
    found = {}
    for top in map(Path, paths):
        for path in [top, *top.rglob("*")]:
            with suppress(OSError):
                if path.is_file() and path != Path(__file__):
                    found[str(path)] = path.read_text(errors="replace")
    return found


def connects(family: int, address: object) -> bool:
    """True when somebody answers there."""
    with socket.socket(family) as one:
        one.settimeout(2)
        try:
            one.connect(address)
        except OSError:
            return False
    return True


def status(name: str) -> str:
    """A line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(f"{name}:"))


def writes(path: str) -> bool:
    """True when a file can be made there."""
    try:
        Path(path).write_text("x")
    except OSError:
        return False
    return True


def allowed(number: int, *words: int) -> bool:
    """True when a system call is not refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(number, *words, 0, 0, 0) == 0)


def main() -> None:
    """Look around."""
    wanted, report, port = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    environments = []
    for pid in processes:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
            environments += [word for word in text.split("\0") if word.startswith("PYTEST_")]
    places = [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET, OUTSIDE)]
    found = {
        "files": {k: v for k, v in contents(wanted["files"]).items() if k != str(report)},
        "sockets": [path for path in wanted["sockets"] if connects(socket.AF_UNIX, path)],
        "connected": [str(where) for family, where in places if connects(family, where)],
        "interfaces": [name for _, name in socket.if_nameindex()],
        "processes": processes,
        "environment": environments,
        "capabilities": status("CapEff"),
        "written": [path for path in ("/usr/x", "/x", __file__, "/etc/x") if writes(path)],
        "calls": [number for number in (MOUNT, UNSHARE) if allowed(number)],
        "limits": {name: resource.getrlimit(getattr(resource, name))[0] for name in LIMITS},
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
    }
    scratch = report.with_suffix(".new")
    scratch.write_text(json.dumps(found))
    scratch.rename(report)
    time.sleep(600)


if __name__ == "__main__":
    main()
