"""Whole files: downloaded by their digest, or copied from this machine in one pass."""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from mmadmin.core.callbacks import silent
from mmadmin.core.errors import Cancelled, DigestMismatch, SourceMissing
from mmadmin.core.store.disk import disk_full
from mmadmin.host.download.answers import HEAD_BYTES, Remote, describe
from mmadmin.host.download.part import Part, one_transfer
from mmadmin.host.download.transfer import CHUNK, Transfer
from mmadmin.host.policy import Policy

MOST_SEGMENTS = 1024


def never() -> bool:
    """Not cancelled."""
    return False


def download(
    remote: Remote,
    to: Path,
    sha256: str,
    size: int,
    *,
    folder: Path,
    policy: Policy | None = None,
    progress: Callable[[int, int], None] = silent,
    cancelled: Callable[[], bool] = never,
    log: Callable[[str], None] = silent,
    already: Callable[[], bool] = never,
    keep_others: bool = True,
) -> None:
    """Have the bytes with this digest at `to` (moved there, never copied, on one file system).

    `folder` is the store's `downloads/`. `already` is asked once it is our turn: True when another
    transfer has brought the bytes meanwhile and `to` is there. Bytes with another digest are kept
    under it, or dropped without `keep_others`. Blocking; may be killed and called again at any
    time.
    Raises `DigestMismatch`, `SourceUnavailable` and its kinds, `DiskFull`, `Cancelled`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with one_transfer(folder / f"{sha256}.lock", remote.label, cancelled, log):
        if already():
            return
        part = Part(folder, sha256, size, _segment_bytes(policy or Policy(), size))
        try:
            transfer = Transfer(remote, part, policy or Policy(), cancelled, log)
            if part.done:
                log(f"{remote.label}: {transfer.got} of {size} bytes are here already")
            found = transfer.run(progress)
            if found != sha256:
                if keep_others:
                    _keep_as(part, found, folder)
                else:
                    part.drop()
                _refuse(remote, part, sha256, found, folder if keep_others else None)
            os.fsync(part.fd)
        finally:
            part.close()
        move(part.path, to)
        part.state.unlink(missing_ok=True)


def _segment_bytes(policy: Policy, size: int) -> int:
    """The policy's, or more for a huge file: each segment is a request, and hubs count those."""
    return max(policy.segment_bytes, -(-size // MOST_SEGMENTS))


def _keep_as(part: Part, found: str, folder: Path) -> None:
    """Keep mismatching bytes under their true digest: a corrected pin then needs no transfer."""
    part.path.replace(folder / f"{found}.part")
    part.state.replace(folder / f"{found}.state")


def _refuse(remote: Remote, part: Part, sha256: str, found: str, kept_in: Path | None) -> None:
    head = os.pread(part.fd, HEAD_BYTES, 0)
    what = describe(head) or f"sha256 {found}"
    raise DigestMismatch(
        f"{remote.label}: the source has {what}; the pin says sha256 {sha256}",
        remedy="if the source was replaced on purpose, update the lock"
        + ("; its bytes are kept" if kept_in else ""),
        expected=sha256,
        actual=found,
        **({"path": str(kept_in / f"{found}.part")} if kept_in else {}),
    )


def move(source: Path, to: Path) -> None:
    """Rename, or copy and remove where `to` lies on another file system."""
    try:
        source.replace(to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, to)
        source.unlink()


def copy_hashed(
    source: Path,
    to: Path,
    *,
    progress: Callable[[int, int], None] = silent,
    cancelled: Callable[[], bool] = never,
) -> str:
    """Copy a local file in one pass, hashing in a second thread; its sha256.

    Raises `SourceMissing`, `DiskFull`, `Cancelled`.
    """
    pieces: queue.Queue[bytes] = queue.Queue(maxsize=8)
    digest = hashlib.sha256()

    def consume() -> None:
        while piece := pieces.get():
            digest.update(piece)

    try:
        total = source.stat().st_size
        reader = source.open("rb")
    except OSError as error:
        raise SourceMissing(
            f"{source}: {error.strerror}", remedy="check the path and its permissions"
        ) from error
    hasher = threading.Thread(target=consume, daemon=True)
    hasher.start()
    done = 0
    try:
        with reader, to.open("wb") as writer:
            while piece := reader.read(4 * CHUNK):
                if cancelled():
                    raise Cancelled(f"copying {source.name} was cancelled")
                pieces.put(piece)
                writer.write(piece)
                done += len(piece)
                progress(done, total)
    except OSError as error:
        raise disk_full(error, doing=f"copying {source.name}") or error from error
    finally:
        pieces.put(b"")
        hasher.join()
    return digest.hexdigest()
