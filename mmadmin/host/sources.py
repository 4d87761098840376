"""Bringing a pinned file here from whatever source it has.

Kept apart from the toolbox, which imports it only when something is really fetched: the hub's and
the index's clients cost half a second of start-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from mmadmin.core.build.recipe import HubSource, IndexSource, PathSource, Source, UrlSource
from mmadmin.core.errors import DigestMismatch, InvalidInput, SourceMissing
from mmadmin.host.download import Remote, copy_hashed, download
from mmadmin.host.policy import Policy
from mmadmin.host.source_guard import Guard

if TYPE_CHECKING:
    from mmadmin.host.hub import Hub

REPLACED = "if it was replaced on purpose, update the lock"


@dataclass(frozen=True, slots=True)
class Fetcher:
    """One step's way to the sources."""

    downloads: Path
    policy: Policy
    hub: Hub | None
    progress: Callable[[int, int], None]
    cancelled: Callable[[], bool]
    log: Callable[[str], None]
    already: Callable[[str, int, Path], bool]
    """Takes a file that another transfer has brought meanwhile: (sha256, size, to)."""
    guard: Guard = Guard()  # noqa: RUF009 (frozen)
    """What the build's asker may take."""

    def bring(self, source: Source, to: Path, sha256: str, size: int) -> None:
        """Have the pinned bytes at `to`.

        Raises `DigestMismatch`, `SourceRefused`, `SourceUnavailable` and its kinds, `DiskFull`,
        `Cancelled`.
        """
        self.guard.access.check_source(source, sha256, to.name)
        if isinstance(source, PathSource):
            path = self.guard.file(Path(source.path), to.name)
            self._copy(path, to, sha256, size, source.path)
            return
        remote = self.remote(source)
        if remote.url.startswith("file:"):
            path = Path(unquote(urlsplit(remote.url).path))
            if isinstance(source, UrlSource):
                path = self.guard.file(path, to.name)
            self._copy(path, to, sha256, size, remote.label)
            return
        self.log(f"fetching {remote.label} ({size} bytes)")
        if isinstance(source, UrlSource):
            reach = self.guard.reach(sha256, to.name)
            with reach.telling(remote.label):
                self._download(replace(remote, reach=reach), to, sha256, size, reach.tell(self.log))
        else:
            self._download(remote, to, sha256, size, self.log)

    def _download(
        self, remote: Remote, to: Path, sha256: str, size: int, log: Callable[[str], None]
    ) -> None:
        download(
            remote,
            to,
            sha256,
            size,
            folder=self.downloads,
            policy=self.policy,
            progress=self.progress,
            cancelled=self.cancelled,
            log=log,
            already=lambda: self.already(sha256, size, to),
            keep_others=self.guard.access.trusted,
        )

    def remote(self, source: Source) -> Remote:
        """Where the downloader gets a source's bytes."""
        from mmadmin.host import index  # noqa: PLC0415 (a local file needs neither client)
        from mmadmin.host.hub import Hub  # noqa: PLC0415

        if isinstance(source, HubSource):
            hub = self.hub or Hub.from_env()
            return hub.remote(source.repo, source.revision, source.path)
        if isinstance(source, IndexSource):
            return index.find(source.project, source.version, filename=source.filename).remote
        if isinstance(source, UrlSource):
            url, headers = index.without_login(source.url)
            headers |= self.guard.login(source.secret, url, "secret")
            return Remote(url, label=url.partition("?")[0], headers=headers)
        raise InvalidInput(f"{source} cannot be downloaded", remedy="use a hub, index or url")

    def _copy(self, path: Path, to: Path, sha256: str, size: int, label: str) -> None:
        """A local file: looked at before it is copied, hashed while it is copied."""
        try:
            here = path.stat().st_size
        except OSError as error:
            raise SourceMissing(
                f"{label}: {error.strerror}", remedy="check the path and its permissions"
            ) from error
        if here != size:
            raise DigestMismatch(
                f"{label}: the file has {here} bytes where the pin says {size}", remedy=REPLACED
            )
        found = copy_hashed(path, to, progress=self.progress, cancelled=self.cancelled)
        if found != sha256:
            raise DigestMismatch(
                f"{label}: the file has sha256 {found}; the pin says {sha256}",
                remedy=REPLACED,
                expected=sha256,
                actual=found,
                path=str(to),
            )
