"""Room on the disk: reserved before work begins, so that two jobs cannot both count on it.

A reservation covers a folder: what already lies there counts as used, the rest is still owed to
its holder. needed + owed to others + floor ≤ free, checked under one lock.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.callbacks import Report, silent
from mmadmin.core.canonical import canonical, parse
from mmadmin.core.errors import DiskFull, InvalidDerivation
from mmadmin.core.process_identity import ProcessIdentity
from mmadmin.core.store.locks import file_lock, holder_from

BLOCK_BYTES = 512
"""Unit of `st_blocks` (stat(2))."""
RETRY_S = 0.5


def free_bytes(folder: Path) -> int:
    """Bytes that an unprivileged process may still write on the folder's file system."""
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize


def used_bytes(folder: Path) -> int:
    """Disk blocks below a folder, in bytes; what vanishes meanwhile counts as nothing."""
    total = 0
    try:
        with os.scandir(folder) as items:
            for item in items:
                try:
                    if item.is_dir(follow_symlinks=False):
                        total += used_bytes(Path(item.path))
                    else:
                        total += item.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        return 0
    return total


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reserved room: what its holder may still write."""

    owner: str
    size_bytes: int
    used_bytes: int

    @property
    def owed_bytes(self) -> int:
        """Not yet written."""
        return max(0, self.size_bytes - self.used_bytes)


class Disk:
    """Reservations on one store's file system, shared by all its processes."""

    def __init__(self, folder: Path, reservations: Path, lock: Path, floor_bytes: int) -> None:
        self._folder = folder
        self._reservations = reservations
        self._lock = lock
        self.floor_bytes = floor_bytes

    def free_bytes(self) -> int:
        """Free bytes of the file system, reservations not deducted."""
        return free_bytes(self._folder)

    def reservations(self) -> list[Reservation]:
        """What living processes reserved; files of dead ones are removed."""
        found = []
        for path in self._reservations.glob("*.json"):
            try:
                data = path.read_bytes()
                value = parse(data)
            except (FileNotFoundError, InvalidDerivation):
                continue
            holder = holder_from(data)
            if not isinstance(value, dict) or holder is None or not holder.alive:
                path.unlink(missing_ok=True)
                continue
            size, covers = value.get("size_bytes"), value.get("covers")
            if isinstance(size, int) and isinstance(covers, str):
                used = used_bytes(Path(covers)) if covers else 0
                found.append(Reservation(str(value.get("owner", "")), size, used))
        return found

    @contextmanager
    def reserve(
        self,
        size_bytes: int,
        *,
        owner: str,
        covers: Path | None = None,
        wait_s: float = 0,
        on_wait: Report = silent,
    ) -> Iterator[None]:
        """Reserve `size_bytes`; raises `DiskFull` when that is not possible within `wait_s`.

        `covers` is the folder that the bytes go to. While the reservations of others
        are in the way, waiting may help; `on_wait` is told why.
        """
        path = self._reservations / f"{uuid.uuid4().hex}.json"
        record = {
            **ProcessIdentity.me().as_json(),
            "owner": owner,
            "size_bytes": size_bytes,
            "covers": str(covers) if covers else "",
        }
        give_up_at = time.monotonic() + wait_s
        while True:
            with file_lock(self._lock):
                refusal = self._refusal(size_bytes, covers)
                if refusal is None:
                    temporary = path.with_suffix(".new")
                    temporary.write_bytes(canonical(record))
                    temporary.rename(path)
                    break
            if time.monotonic() >= give_up_at:
                raise refusal
            on_wait(refusal.message)
            time.sleep(RETRY_S)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def _refusal(self, size_bytes: int, covers: Path | None) -> DiskFull | None:
        free = self.free_bytes()
        already = used_bytes(covers) if covers else 0
        need = max(0, size_bytes - already)
        others = [r for r in self.reservations() if r.owed_bytes]
        owed = sum(r.owed_bytes for r in others)
        if need + owed + self.floor_bytes <= free:
            return None
        promised = "; ".join(f"{bytes_text(r.owed_bytes)} to {r.owner}" for r in others)
        message = (
            f"disk full: need {bytes_text(need)}, have {bytes_text(free)} free"
            + (f", of which {bytes_text(owed)} are promised ({promised})" if owed else "")
            + f", and {bytes_text(self.floor_bytes)} must stay free"
        )
        return DiskFull(
            message,
            remedy="free space with `mm store gc`"
            + (", or wait until the other work is done" if owed else ", or use a larger disk"),
            need_bytes=need,
            have_bytes=free,
            promised_bytes=owed,
            floor_bytes=self.floor_bytes,
        )


def disk_full(error: OSError, *, doing: str) -> DiskFull | None:
    """The `DiskFull` that an `OSError` means (no space, quota, file size limit), else None."""
    if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return None
    return DiskFull(
        f"disk full while {doing}: {os.strerror(error.errno)}",
        remedy="free space with `mm store gc` and try again",
    )
