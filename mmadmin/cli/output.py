"""How `mm` speaks: sentences for people (tables: `tables.py`), one JSON document for machines.

What was asked for goes to stdout; what went wrong, and what is going on meanwhile, to stderr.
Exit codes: 0 done, 1 failed (an `MmError`: fact and remedy), 2 invalid usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import markup
from rich.console import Console

from mmadmin.core.errors import DiskFull, MmError, Unreachable


def _open_the_closed() -> None:
    """Without 0, 1 or 2 (a daemon's child, `>&-`) the next file opened would be written into."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 (stderr)
        os.set_inheritable(descriptor, True)  # noqa: FBT003 (its form)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


_open_the_closed()
console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
"""What people asked for: stdout. Where that is not a terminal, no line is broken."""
errors = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
"""What went wrong, and what is going on meanwhile: stderr, so that a pipe gets data only."""

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document; errors too, to stderr.")
]

STATE_STYLES = {
    "live": "green",
    "running": "cyan",
    "succeeded": "green",
    "built": "green",
    "active": "green",
    "open": "green",
    "failed": "red",
    "errored": "red",
    "cancelled": "yellow",
    "draining": "yellow",
    "starting": "cyan",
    "probing": "cyan",
    "building": "cyan",
    "suspended": "yellow",
    "revoked": "red",
    "expired": "yellow",
    "bytes missing": "red",
    "host away": "red",
    "retired": "dim",
    "cached": "dim",
}


CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What moves a terminal's cursor, sets its title, or turns its lines round."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """Text of others that a terminal can be given: no colours, control characters by number."""
    return CONTROL.sub(_numbered, COLOURS.sub("", text))


def coloured(text: str) -> str:
    """The same with its colours, for logs; unchanged where the output is not a terminal."""
    if not sys.stdout.isatty():
        return text
    parts = COLOURS.split(text)
    kept = [*COLOURS.findall(text), ""]
    return "".join(CONTROL.sub(_numbered, part) + k for part, k in zip(parts, kept, strict=True))


def escape(text: str) -> str:
    """Text of others within markup: what looks like markup is shown, and it is `plain`."""
    return markup.escape(plain(text))


def _numbered(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"  # noqa: PLR2004 (a byte)


def styled(state: str) -> str:
    """A state's word in its colour."""
    style = STATE_STYLES.get(state.lower())
    return f"[{style}]{escape(state)}[/]" if style else escape(state)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if (dump := getattr(value, "model_dump", None)) is not None:  # a schema of the REST API
        return dump()
    raise TypeError(f"no JSON form for {type(value).__name__}")


def emit_json(value: Any, *, failed: bool = False) -> None:
    """Print one JSON document: to stdout, or to stderr when it says what went wrong."""
    out = sys.stderr if failed else sys.stdout
    text = json.dumps(value, indent=2, ensure_ascii=False, default=_plain)
    out.write(CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def seconds_text(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 10:  # noqa: PLR2004 (below ten, tenths matter)
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004 (a minute)
        return f"{whole} s"
    if whole < 3600:  # noqa: PLR2004 (an hour)
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:  # noqa: PLR2004 (a day)
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def counted(count: int, what: str) -> str:
    """`1 object`, `2 objects`, `no objects`."""
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def when_text(at: datetime | None) -> str:
    """A moment in this machine's time zone, to the minute."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M") if at else "never"


DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
LOCKED = "database is locked"
DATABASE = ("disk is full", "readonly database", "unable to open", "disk I/O error")


def of_the_disk(error: BaseException | None) -> MmError | None:
    """Explain a full, read-only or busy disk, wherever it was met; None for other errors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK:
            where = f": {error.filename}" if error.filename else ""
            return DiskFull(
                f"the disk refuses: {error.strerror}{where}",
                remedy="make room, or let the user that mmadmin runs as write there",
            )
        if type(error).__name__ == "OperationalError" and LOCKED in str(error):
            return Unreachable(
                "the database is held by another program",
                remedy="wait for it (a backup?), or end it; then try again",
            )
        if type(error).__name__ == "OperationalError" and any(w in str(error) for w in DATABASE):
            return DiskFull(
                f"the database cannot be written: {error}",
                remedy="make room, or let the user that mmadmin runs as write there; what lies in"
                " downloads/, logs/ and trash/ of a store may be removed by hand",
            )
        error = error.__cause__ or error.__context__
    return None


def report(error: MmError, *, as_json: bool) -> None:
    """Say an expected failure: the fact, then the remedy with its command; details to machines."""
    if as_json:
        emit_json({"error": error.as_json()}, failed=True)
        return
    errors.print(f"[red]failed:[/] {escape(error.message)}")
    if error.remedy:
        command = str(error.details.get("command") or "")
        how = f": {command}" if command else ""
        errors.print(f"[bold]remedy:[/] {escape(error.remedy + how)}")
    for line in error.details.get("log_tail") or ():
        errors.print(f"  [dim]{escape(str(line))}[/]")
