"""Files of the Python index, found through the indexes that pip is configured with.

pip's own configuration (files and `PIP_*` variables) says which indexes, link folders, trusted
hosts and CA bundle count; `unearth` does the looking. No address is written here, and one with
credentials in it is never shown. An index file is known by project, version and file name; its
address is looked up again when its bytes are wanted, so that no lock depends on a mirror.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit, urlunsplit

import httpx2
from unearth import Package, PackageFinder
from unearth.errors import UnpackError, VCSBackendError
from unearth.fetchers import Fetcher
from unearth.fetchers.sync import PyPIClient
from unearth.link import Link

from mmadmin.core.errors import SourceMissing, SourceUnavailable
from mmadmin.host.download import Remote, tls
from mmadmin.host.network import check_proxies, why_silent

Kind = Literal["sdist", "wheel"]
TIMEOUTS = httpx2.Timeout(60.0, connect=5.0)


@dataclass(frozen=True, slots=True)
class PipConfig:
    """The part of pip's configuration that says where packages come from."""

    index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: str = ""


@dataclass(frozen=True, slots=True)
class IndexFile:
    """One release file."""

    filename: str
    url: str
    """May hold credentials: never shown or stored."""
    sha256: str | None
    """As the index says; None when it says nothing."""
    cert: str = ""

    @property
    def remote(self) -> Remote:
        """Where the downloader gets it."""
        url, headers = without_login(self.url)
        return Remote(url, label=self.filename, headers=headers, cert=self.cert)


def without_login(url: str) -> tuple[str, dict[str, str]]:
    """Split an address into one without `user:password@` and the header that replaces it."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, {}
    host = parts.netloc.rpartition("@")[2]
    request = httpx2.Request("GET", url)
    auth = httpx2.BasicAuth(parts.username or "", parts.password or "")
    header = next(auth.auth_flow(request)).headers["Authorization"]
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": header}


def _config_files(env: Mapping[str, str], system: Path) -> list[Path]:
    """Pip's configuration files, weakest first (pip documentation, "Configuration files")."""
    home = Path(env.get("HOME") or "~").expanduser()
    own = env.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return []
    xdg = [Path(folder) for folder in (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    user = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    files = [folder / "pip" / "pip.conf" for folder in reversed(xdg)]
    files += [system, home / ".pip" / "pip.conf", user / "pip" / "pip.conf"]
    files += [Path(sys.prefix) / "pip.conf"]
    return [*files, Path(own)] if own else files


def pip_config(
    env: Mapping[str, str] | None = None, *, system: Path = Path("/etc/pip.conf")
) -> PipConfig:
    """Read pip's configuration; `PIP_*` variables win over files, `[download]` over `[global]`."""
    env = os.environ if env is None else env
    values: dict[str, str] = {}
    for file in _config_files(env, system):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(file.read_text(encoding="utf-8"), source=str(file))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # absent or not pip's: pip itself reports a broken file
        for section in ("global", "download"):
            if parser.has_section(section):
                values.update({k.replace("_", "-"): v for k, v in parser.items(section)})
    for name in ("index-url", "extra-index-url", "find-links", "trusted-host", "cert", "no-index"):
        value = env.get("PIP_" + name.upper().replace("-", "_"))
        if value is not None:
            values[name] = value
    indexes: list[str] = []
    if values.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        default = str(PackageFinder().sources[0]["url"])
        indexes = [values.get("index-url") or default, *values.get("extra-index-url", "").split()]
    return PipConfig(
        index_urls=tuple(indexes),
        find_links=tuple(values.get("find-links", "").split()),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        cert=values.get("cert", ""),
    )


def find(
    project: str,
    version: str,
    *,
    kind: Kind | None = None,
    filename: str | None = None,
    config: PipConfig | None = None,
) -> IndexFile:
    """The release file of `project==version`: by file name, else by kind (a wheel first).

    Looks at every platform's files. Blocking, network. Raises `SourceMissing` (with the files
    that there are) and `SourceUnavailable`.
    """
    config = pip_config() if config is None else config
    check_proxies()
    with PyPIClient(
        verify=tls(config.cert), trusted_hosts=config.trusted_hosts, timeout=TIMEOUTS
    ) as session:
        finder = PackageFinder(
            session=cast("Fetcher", session),
            index_urls=config.index_urls,
            find_links=[link for link in config.find_links if _usable(link)],
            ignore_compatibility=True,
        )
        try:
            found = list(finder.find_matches(f"{project}=={version}"))
        except (httpx2.HTTPError, UnpackError, VCSBackendError, OSError) as error:
            silence = why_silent(error, "the Python index")
            raise SourceUnavailable(
                f"{project}: {silence.message}"
                if silence
                else f"the Python index does not answer for {project}: {type(error).__name__}",
                remedy=f"{silence.remedy if silence else 'check the network'}; pip's configuration"
                " names the index (pip config list)",
            ) from error
    matching = [package for package in found if _fits(package.link, kind, filename)]
    if not matching:
        wanted = filename or f"{project}=={version}" + (f" as {kind}" if kind else "")
        names = sorted(package.link.filename for package in found)
        raise SourceMissing(
            f"{wanted} is on none of the configured Python indexes",
            remedy=f"there are: {', '.join(names)}" if names else "check project and version",
            files=names,
        )
    link = min(matching, key=_order).link
    digests = link.hash_option or {}
    sha256 = digests.get("sha256", [None])[0]
    return IndexFile(link.filename, link.url_without_fragment, sha256, config.cert)


def _usable(link: str) -> bool:
    return "://" in link or Path(link).exists()


def _fits(link: Link, kind: Kind | None, filename: str | None) -> bool:
    if filename is not None:
        return link.filename == filename
    return kind is None or (kind == "wheel") == link.is_wheel


def _order(package: Package) -> tuple[bool, str]:
    return not package.link.is_wheel, package.link.filename
