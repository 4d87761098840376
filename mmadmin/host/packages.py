"""Python packages → wheels: resolved by uv, through the indexes that pip is configured with.

uv reads no configuration of its own and gets the addresses through its environment, because they
may hold credentials. Only file names, digests and sizes leave this module: a wheel's address is
looked up again by name when its bytes are wanted (`mmadmin.host.index`).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from uv import find_uv_bin

from mmadmin.core.environments import python_program
from mmadmin.core.errors import InvalidSpec, SourceUnavailable
from mmadmin.core.spec.pins import Packages
from mmadmin.host.index import PipConfig

TIMEOUT_S = 600
_SHOWN = 600
"""Most characters of uv's explanation that a message repeats."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel that was chosen."""

    project: str
    version: str
    filename: str
    sha256: str
    """Empty = the index did not say."""
    url: str
    """May hold credentials: never shown or stored."""
    size_bytes: int | None
    """None = the index did not say."""


def resolve_wheels(packages: Packages, config: PipConfig, field: str) -> list[Wheel]:
    """The wheels of an environment for this process's interpreter, by package name.

    Blocking, network. Raises `InvalidSpec` when the requirements have no solution in wheels, and
    `SourceUnavailable` when an index does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="mm-resolve-") as folder:
        locked = _run_uv(Path(folder), packages, config, field)
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    return [_best(package, ranks, field) for package in locked.get("packages", [])]


def _run_uv(folder: Path, packages: Packages, config: PipConfig, field: str) -> Mapping[str, Any]:
    wanted, overrides, answer = (
        folder / "wanted.in",
        folder / "overrides.in",
        folder / "pylock.toml",
    )
    wanted.write_text("\n".join(packages.requirements) + "\n", encoding="utf-8")
    overrides.write_text("\n".join(packages.overrides) + "\n", encoding="utf-8")
    argv = [
        *(find_uv_bin(), "pip", "compile", str(wanted), "--override", str(overrides)),
        *("--output-file", str(answer), "--format", "pylock.toml", "--only-binary", ":all:"),
        *("--python", str(python_program()), "--no-python-downloads", "--no-config"),
        *("--no-header", "--no-annotate", "--quiet", "--cache-dir", str(folder / "cache")),
    ]
    try:
        done = subprocess.run(
            argv,
            env=_environment(config),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _silent() from error
    if done.returncode == 0:
        return tomllib.loads(answer.read_text(encoding="utf-8"))
    said = " ".join(_without(config, done.stderr).split())[:_SHOWN]
    if "No solution found" in said or "Couldn't parse" in said:
        raise InvalidSpec(
            f"{field}: these packages cannot be installed together here: {said}",
            remedy="change the requirements; only wheels for this host's interpreter count",
            field=field,
        )
    raise SourceUnavailable(
        f"the Python index does not answer: {said}",
        remedy="check the network and pip's configuration (pip config list)",
    )


def _silent() -> SourceUnavailable:
    return SourceUnavailable(
        f"the Python packages were not resolved within {TIMEOUT_S} s",
        remedy="check the network and pip's configuration (pip config list)",
    )


def _environment(config: PipConfig) -> dict[str, str]:
    """The whole environment of uv: pip's indexes, with pip's way of looking at all of them."""
    kept = ("PATH", "HOME", "LANG", "http_proxy", "https_proxy", "no_proxy", "all_proxy")
    names = [*kept, *(name.upper() for name in kept)]
    variables = {name: os.environ[name] for name in names if name in os.environ}
    first, *more = config.index_urls or ("",)
    if first:
        variables |= {"UV_DEFAULT_INDEX": first, "UV_INDEX": " ".join(more)}
    else:
        variables["UV_NO_INDEX"] = "1"
    links = [link for link in config.find_links if "://" in link or Path(link).exists()]
    return {
        **variables,
        "UV_FIND_LINKS": ",".join(links),
        "UV_INSECURE_HOST": " ".join(config.trusted_hosts),
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_KEYRING_PROVIDER": "disabled",
        "UV_SYSTEM_CERTS": "1",
        **({"SSL_CERT_FILE": config.cert} if config.cert else {}),
    }


def _without(config: PipConfig, said: str) -> str:
    """What uv said, without the addresses of the indexes."""
    for url in sorted([*config.index_urls, *config.find_links], key=len, reverse=True):
        said = said.replace(url.rstrip("/"), "the index")
    return said


def _best(package: Mapping[str, Any], ranks: Mapping[Any, int], field: str) -> Wheel:
    """The wheel that pip would install: the most specific one for this interpreter."""
    found = sorted(_usable(package.get("wheels", []), ranks), key=lambda one: one[0])
    if not found:
        raise InvalidSpec(
            f"{field}: {package['name']} {package.get('version', '')} has no wheel for this host",
            remedy="choose another version",
            field=field,
        )
    filename, wheel = found[0][1:]
    return Wheel(
        project=package["name"],
        version=str(parse_wheel_filename(filename)[1]),
        filename=filename,
        sha256=wheel.get("hashes", {}).get("sha256", ""),
        url=wheel["url"],
        size_bytes=wheel.get("size"),
    )


def _usable(
    wheels: Sequence[Mapping[str, Any]], ranks: Mapping[Any, int]
) -> Iterator[tuple[tuple[int, str], str, Mapping[str, Any]]]:
    for wheel in wheels:
        filename = unquote(urlsplit(wheel["url"]).path.rpartition("/")[2])
        try:
            tags = parse_wheel_filename(filename)[3]
        except InvalidWheelFilename:
            continue
        rank = min((ranks[tag] for tag in tags if tag in ranks), default=None)
        if rank is not None:
            yield (rank, filename), filename, wheel
