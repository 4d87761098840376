"""Binary caches: places with the layout by which stores exchange objects.

    realisations/<resolved key>.json    signed attestations (`attestations.Attestation`)
    objects/<hash>-<name>.json          what an object holds (the store's own record)
    blobs/sha256/ab/<hex>               bytes

A folder, or the same files behind any static web server or in a bucket, is one. What is missing is
a miss.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from mmadmin.core.callbacks import Progress, silent
from mmadmin.core.errors import DigestMismatch, SourceUnavailable, StoreCorrupt
from mmadmin.core.store.files import HALF_WRITTEN, fsync_path
from mmadmin.core.store.ingest import copy_hashing
from mmadmin.core.store.tree import Entry

HALF_WRITTEN_S = 86400
"""A file that nothing was written to for so long was left by a push that was killed."""
SMALL_BYTES = 16 << 20
"""No attestation or record is larger."""


def attestation_path(resolved_key: str) -> str:
    """Where a cache has the attestation of a step."""
    return f"realisations/{resolved_key}.json"


def record_path(name: str) -> str:
    """Where a cache has what an object holds."""
    return f"objects/{name}.json"


def bytes_path(sha256: str) -> str:
    """Where a cache has a file's bytes."""
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


class BinaryCache(Protocol):
    """A place to pull from. Methods block; both raise `SourceUnavailable` when it is down."""

    @property
    def label(self) -> str:
        """What a person calls it."""
        ...

    def read(self, path: str) -> bytes | None:
        """A small file; None when it is not there."""
        ...

    def fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        """Complete `part`, which may hold a beginning already; its sha256, None when not there.

        The caller compares it. A part of an interrupted transfer stays, and is resumed.
        """
        ...


class WritableBinaryCache(BinaryCache, Protocol):
    """A place to push to."""

    def has(self, path: str, size: int) -> bool:
        """True when a file of that size is there."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Put a small file there, at once: old or new, never a part."""
        ...

    def put(self, path: str, source: Path, sha256: str, progress: Progress) -> None:
        """Put a large file there; it appears when it is whole.

        Raises `StoreCorrupt`, and nothing appears, when its bytes have another digest.
        """
        ...


def damaged(source: Path) -> StoreCorrupt:
    """The error of a file that was to be sent and does not have the digest of its name."""
    return StoreCorrupt(
        f"{source} is damaged and was not sent",
        remedy="repair it with `mm store repair`, then push again",
    )


def other_size(label: str, path: str, size: int) -> DigestMismatch:
    """The error of a cache that has a file of another size where `size` bytes are wanted."""
    return DigestMismatch(
        f"{label} has another file at {path}: it should have {size} bytes",
        expected=path.rpartition("/")[2],
    )


class FolderCache:
    """A cache in a folder.

    Not through obstore, whose local store flushes nothing to the disk: a power cut would leave a
    file of the right size without its bytes, which every later push takes for sent. It also leaves
    the parts of a killed push behind.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def label(self) -> str:
        """Its path."""
        return str(self.root)

    def read(self, path: str) -> bytes | None:
        """A small file; None when it is not there."""
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceUnavailable(f"{self.root / path}: {error.strerror}") from error

    def fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        """Copy a file; a part of an earlier attempt is copied again, as copying is cheap."""
        del size
        part.unlink(missing_ok=True)
        try:
            return copy_hashing(self.root / path, part, progress=progress)[0]
        except (FileNotFoundError, NotADirectoryError):
            return None

    def has(self, path: str, size: int) -> bool:
        """True when a file of that size is there."""
        try:
            return (self.root / path).stat().st_size == size
        except FileNotFoundError:
            return False

    def write(self, path: str, data: bytes) -> None:
        """Put a small file there by one rename."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{uuid.uuid4().hex}.new")
        temporary.write_bytes(data)
        fsync_path(temporary)
        temporary.rename(target)

    def put(self, path: str, source: Path, sha256: str, progress: Progress) -> None:
        """Put a large file there by copy and rename."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_half_written(target.parent)
        temporary = target.with_name(f".{uuid.uuid4().hex}.new")
        try:
            if copy_hashing(source, temporary, progress=progress)[0] != sha256:
                raise damaged(source)
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)


def _remove_half_written(folder: Path) -> None:
    """Remove what a killed push left; one that runs writes to its file all the time."""
    for path in folder.glob(HALF_WRITTEN):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - HALF_WRITTEN_S:
                path.unlink()


class CacheSource:
    """Gets damaged files back from a cache; a `verify.BlobSource`."""

    def __init__(self, cache: BinaryCache, progress: Progress = silent) -> None:
        self.cache = cache
        self.progress = progress

    @property
    def label(self) -> str:
        """The cache."""
        return self.cache.label

    def get(self, want: Entry, owner: str, to: Path) -> bool:
        """Fetch the bytes; the caller checks them."""
        del owner
        return self.cache.fetch(bytes_path(want.sha256), to, want.size, self.progress) is not None
