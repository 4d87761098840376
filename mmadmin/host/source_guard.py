"""What one asker may take from this host and from the network, links and names resolved."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmadmin.core.errors import InvalidSpec, SourceRefused
from mmadmin.core.home import Home
from mmadmin.core.source_policy import Access
from mmadmin.core.source_secrets import SourceSecrets

if TYPE_CHECKING:
    from mmadmin.host.reach import Reach


@dataclass(frozen=True, slots=True)
class Guard:
    """What one asker may take from this host and from the network."""

    access: Access = Access(on_host=True)  # noqa: RUF009 (frozen)
    home: Home | None = None

    def file(self, path: Path, where: str) -> Path:
        """The real path of a file that may be read. Raises `SourceRefused` and `InvalidSpec`.

        An operator gets one refusal for what is missing, unreadable, mmadmin's own, or behind a
        link that leads out of the allowed folders: it tells nothing about the host.
        """
        self.access.check_folder(str(path), where)
        real = path.resolve()
        if self.access.on_host:
            if self._is_in(real, self.home.private if self.home else ()):
                raise SourceRefused(
                    f"{where}: {path} is one of mmadmin's own files",
                    remedy="name a file outside of MM_HOME",
                    field=where,
                )
            return real
        inside = not self._is_in(real, (self.home.root,) if self.home else ())
        if not inside or not self._allows(real) or not os.access(real, os.R_OK):
            raise InvalidSpec(
                f"{where}: {path} is not a file that a deployment may read",
                remedy="check the path on the host that builds: links must not lead out of the"
                " allowed folders, and the user that mmadmin runs as must be able to read it",
                field=where,
            )
        return real

    @staticmethod
    def _is_in(real: Path, folders: Iterable[Path]) -> bool:
        return any(real.is_relative_to(folder.resolve()) for folder in folders)

    def _allows(self, real: Path) -> bool:
        """Whether the rules allow a real path, with the folders that their own paths lead to."""
        rules = tuple(
            replace(rule, pattern=str(Path(rule.pattern).resolve()))
            for rule in self.access.policy.in_force
            if rule.kind == "folder"
        )
        policy = replace(self.access.policy, rules=rules)
        return policy.folder(str(real)).allow and real.is_file()

    def login(self, secret: str, url: str, where: str) -> dict[str, str]:
        """The header with the credential of that name, empty without one. Raises `InvalidSpec`."""
        if not secret or self.home is None:
            return {}
        return SourceSecrets(self.home).headers(secret, url, where)

    def reach(self, sha256: str, where: str) -> Reach:
        """The way to one pinned file of an address."""
        from mmadmin.host.reach import Reach  # noqa: PLC0415 (a local file needs no client)

        return Reach(self.access, sha256, where)
