"""Locks, leases, and who holds them.

A lock is a `flock` on a file of its own. Programs that a step runs may inherit the descriptor
(`pass_fds`), so that the lock outlives a killed worker for as long as its programs do. The file
is unlinked by its last holder; who locks an unlinked file notices and tries again.

A lease says "I am alive and need these objects": a file that names its process in the form of
`core.process_identity`, so that neither a reused pid nor a reboot is mistaken for its holder.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.callbacks import Report, silent
from mmadmin.core.canonical import canonical, parse
from mmadmin.core.errors import InvalidDerivation, StoreCorrupt
from mmadmin.core.process_identity import ProcessIdentity, process_identity_from, start_time

POLL_S = 0.05
REPORT_EVERY_S = 2.0


@contextmanager
def file_lock(
    path: Path,
    *,
    shared: bool = False,
    on_wait: Report = silent,
    report_every_s: float = REPORT_EVERY_S,
    owner: str = "",
) -> Iterator[int]:
    """Hold a lock on `path`, made if absent; yields the descriptor, for children to inherit.

    Looks every `POLL_S` until it is free; `on_wait` is told who holds it, at once and then at
    the first look after each `report_every_s` (0: at every look).
    """
    fd = _locked(path, shared=shared, on_wait=on_wait, report_every_s=report_every_s)
    try:
        if not shared:
            with suppress(OSError):  # on a full disk the lock holds, without saying whose it is
                os.ftruncate(fd, 0)
                os.pwrite(fd, (owner or f"process {os.getpid()}").encode(), 0)
        yield fd
    finally:
        if not shared:
            with suppress(FileNotFoundError):
                path.unlink()
        os.close(fd)


def _locked(path: Path, *, shared: bool, on_wait: Report, report_every_s: float) -> int:
    wanted = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    report_at = 0.0
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, wanted)
        except BlockingIOError:
            holder = os.pread(fd, 200, 0).decode(errors="replace")
            os.close(fd)
            if time.monotonic() >= report_at:
                on_wait(holder or "another process")
                report_at = time.monotonic() + report_every_s
            time.sleep(POLL_S)
            continue
        except BaseException:
            os.close(fd)
            raise
        if _is_still(path, fd):
            return fd
        os.close(fd)  # the last holder unlinked it between our open and our lock


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def holder_from(data: bytes) -> ProcessIdentity | None:
    """The process that a lease or reservation file names; None when it is half-written."""
    try:
        return process_identity_from(parse(data))
    except InvalidDerivation:
        return None


class Lease:
    """A process's hold on objects; see `Writer.lease`."""

    __slots__ = ("_objects", "id", "owner")

    def __init__(self, lease_id: str, owner: str, objects: Path) -> None:
        self.id = lease_id
        self.owner = owner
        self._objects = objects

    def add(self, names: Iterable[str]) -> None:
        """Write object names down; the caller holds the collector off meanwhile."""
        with self._objects.open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease as others see it."""

    id: str
    owner: str
    holder: ProcessIdentity
    objects: frozenset[str]


@contextmanager
def lease_in(folder: Path, owner: str) -> Iterator[Lease]:
    """A lease of this process, withdrawn at the end."""
    lease_id = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
    path = folder / f"{lease_id}.json"
    objects = folder / f"{lease_id}.objects"
    temporary = folder / f"{lease_id}.new"
    temporary.write_bytes(canonical({**ProcessIdentity.me().as_json(), "owner": owner}))
    objects.touch()
    temporary.rename(path)
    try:
        yield Lease(lease_id, owner, objects)
    finally:
        path.unlink(missing_ok=True)
        objects.unlink(missing_ok=True)


def leases_in(folder: Path, *, strict: bool = False) -> list[LeaseRecord]:
    """Every living lease. Files of dead ones are left to `sweep_leases`.

    `strict` raises `StoreCorrupt` for a record that cannot be read, instead of passing over it.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = path.read_bytes()
            names = path.with_suffix(".objects").read_text(encoding="utf-8")
        except FileNotFoundError:  # withdrawn meanwhile
            continue
        holder = holder_from(data)
        if holder is None and strict:
            raise StoreCorrupt(
                f"the lease {path} is damaged", remedy="find out who wrote it, then remove the file"
            )
        if holder is None or not holder.alive:
            continue
        value = parse(data)
        owner = value.get("owner", "") if isinstance(value, dict) else ""
        # a line without its end is still being written, and its object not yet promised
        lines = names.split("\n")[:-1]
        found.append(LeaseRecord(path.stem, str(owner), holder, frozenset(lines)))
    return found


def sweep_leases(folder: Path) -> list[str]:
    """Remove the files of leases whose process is gone; returns their ids."""
    living = {lease.id for lease in leases_in(folder)}
    dead = set()
    for path in folder.iterdir():
        if path.stem in living or _made_by_living(path.stem):
            continue
        path.unlink(missing_ok=True)
        dead.add(path.stem)
    return sorted(dead)


def _made_by_living(lease_id: str) -> bool:
    """True while a process with the pid in the id runs: its lease may be on its way.

    A reused pid only delays the sweep until that process ends.
    """
    pid = lease_id.partition("-")[0]
    return pid.isdigit() and start_time(int(pid)) is not None
