"""An attempt: a private folder in which a step writes, until it is sealed or thrown away."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from mmadmin.core.callbacks import Report, silent
from mmadmin.core.store.files import take_blob
from mmadmin.core.store.locks import Lease
from mmadmin.core.store.writer import Writer

Reserve = Callable[..., AbstractContextManager[None]]
"""Reserves room (`Store.reserve`)."""


class Staging:
    """A private attempt: what a step writes before it is sealed."""

    def __init__(
        self, store: Writer, reserve: Reserve, folder: Path, lease: Lease, inherit: tuple[int, ...]
    ) -> None:
        self.folder = folder
        self.lease = lease
        self._store = store
        self._reserve = reserve
        self._promises = ExitStack()
        self.inherit = inherit
        """Descriptors that programs should inherit (`pass_fds`): the locks outlive a kill."""
        self.sandbox = "none"
        """Set by the toolbox: bubblewrap, unshare or none."""
        self._known: dict[str, tuple[str, tuple[int, int, int]]] = {}

    @property
    def out(self) -> Path:
        """What becomes the object."""
        return self.folder / "out"

    @property
    def scratch(self) -> Path:
        """Thrown away at the end."""
        return self.folder / "scratch"

    def hashed(self, path: Path, sha256: str) -> None:
        """Note a file's digest, so that it is not read again.

        Forgotten when the file is changed afterwards (size, mtime or inode).
        """
        self._known[os.path.abspath(path)] = (sha256, _fingerprint(path.stat()))  # noqa: PTH100

    def reserve(self, size_bytes: int, *, wait_s: float = 0, on_wait: Report = silent) -> None:
        """Reserve room for what this attempt will write, until it ends; raises `DiskFull`."""
        self._promises.enter_context(
            self._reserve(
                size_bytes,
                owner=self.lease.owner,
                covers=self.folder,
                wait_s=wait_s,
                on_wait=on_wait,
            )
        )

    def take(self, sha256: str, size: int, to: Path, *, executable: bool = False) -> bool:
        """Link a file that the store has to `to` (a new path); False when it does not.

        The file is shared with the store: it must not be written to.
        """
        if not take_blob(self._store.blob_path(sha256, executable=executable), size, to):
            return False
        self.hashed(to, sha256)
        return True

    def keep(self, path: Path, sha256: str) -> None:
        """Take a fetched file into the store now: it outlives this attempt.

        It stays where it is, too, from now on shared with the store: it must not be written to.
        """
        self._store.keep_blob(path, sha256, stay=True)
        self.hashed(path, sha256)

    def close(self) -> None:
        """Give back the reserved room."""
        self._promises.close()

    def known(self, path: Path, info: os.stat_result) -> str | None:
        """The digest that is known for the file as it is now."""
        found = self._known.get(os.path.abspath(path))  # noqa: PTH100
        return found[0] if found and found[1] == _fingerprint(info) else None


def _fingerprint(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_size, info.st_mtime_ns
