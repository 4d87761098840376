"""Credentials of addresses, by name: a deployment file names one and never holds it.

Each is bound to one origin (scheme, host and port) and goes nowhere else: who may name a secret in
a deployment file could otherwise have it sent to a server of their own.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mmadmin.core.errors import InvalidInput, InvalidSpec, NotFound
from mmadmin.core.home import Home
from mmadmin.core.private_file import write_private

NAME = r"[a-z0-9][a-z0-9-]{0,62}"
DEFAULT_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> str:
    """Scheme, host and port of an address, in one form. Raises `InvalidInput`."""
    parts = urlsplit(url)
    try:
        port = parts.port or DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        port = None
    if port is None or not parts.hostname or "@" in parts.netloc:
        raise InvalidInput(
            "a secret is for one http or https origin", remedy="write --for https://HOST[:PORT]"
        )
    return f"{parts.scheme}://{parts.hostname}:{port}"


@dataclass(frozen=True, slots=True)
class SourceSecrets:
    """The secrets of one host: a file each (0600) in `MM_HOME/secrets/sources`."""

    home: Home

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self.home.secrets / "sources"

    def names(self) -> Iterator[tuple[str, str]]:
        """Name and origin of each; never what it is."""
        for path in sorted(self.folder.glob("*")) if self.folder.exists() else ():
            if kept := self._kept(path.name):
                yield path.name, kept["for"]

    def set(self, name: str, origin: str, value: str) -> None:
        """Keep a secret: `user:password`, or a token. Raises `InvalidInput`."""
        value = value.strip()
        if not re.fullmatch(NAME, name):
            raise InvalidInput(
                f"{name!r} is not a name of a secret", remedy="use a-z, 0-9 and hyphens"
            )
        if not value or not value.isascii() or not value.isprintable():
            raise InvalidInput(
                "the secret is empty, or has characters that no header takes",
                remedy="give user:password or a token, in one line of ASCII",
            )
        bound = origin_of(origin)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self.folder / name, json.dumps({"for": bound, "value": value}))

    def remove(self, name: str) -> None:
        """Forget a secret. Raises `NotFound`."""
        if not self._kept(name):
            raise NotFound(f"there is no secret {name}", command="mm secret list")
        (self.folder / name).unlink()

    def headers(self, name: str, url: str, where: str) -> dict[str, str]:
        """What a request to an address is sent with. Raises `InvalidSpec`.

        One refusal for a secret that does not exist and one of another origin.
        """
        origin = origin_of(url)
        kept = self._kept(name)
        if not kept or kept["for"] != origin:
            raise InvalidSpec(
                f"{where}: this host has no secret {name} for {origin}",
                remedy=f"an admin sets it on the host: mm secret set {name} --for {origin}",
                field=where,
            )
        value = kept["value"]
        if ":" in value:
            return {"Authorization": f"Basic {base64.b64encode(value.encode()).decode()}"}
        return {"Authorization": f"Bearer {value}"}

    def _kept(self, name: str) -> dict[str, str] | None:
        """Origin (`for`) and `value` of a secret; None = there is none of that name."""
        path = self.folder / name
        if not re.fullmatch(NAME, name) or not path.exists():
            return None
        kept: dict[str, str] = json.loads(path.read_bytes())
        return kept
