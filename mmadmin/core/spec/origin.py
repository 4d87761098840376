"""Where something comes from: a hub, the Python index, an address or a path of the host.

`[model]` and `[engine]` say it with the same keys; each engine words them for its tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mmadmin.core.build.recipe import Json
from mmadmin.core.source_secrets import NAME
from mmadmin.core.spec.fields import Field

SHA256 = r"[0-9a-f]{64}"
PINNED = r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*"
DEFAULT_REVISION = "main"
RELATIVE = r"(?!/)(?!.*(?:^|/)\.\.?(?:/|$))(?!.*//)[^\\\x00]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The keys of a table that say where its subject comes from."""

    source: str
    """"hub", "index", "url" or "path"; the other keys belong to one of them."""
    repo: str = ""
    revision: str = DEFAULT_REVISION
    package: str = ""
    url: str = ""
    sha256: str = ""
    secret: str = ""
    """Name of the credential that the url takes."""
    path: str = ""


@dataclass(frozen=True, slots=True)
class Wording:
    """How one table words a key of its origin."""

    help: str
    example: Json = None
    pattern: str = ""
    remedy: str = ""


_KEYS: Mapping[str, Field] = {
    field.name: field
    for field in (
        Field("source", "choice", ""),
        Field(
            "repo",
            "string",
            "",
            required=True,
            only_for=("hub",),
            pattern=r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*",
            remedy="write owner/name",
        ),
        Field(
            "revision",
            "string",
            "",
            default=DEFAULT_REVISION,
            only_for=("hub",),
            pattern=r"[\w./-]{1,255}",
        ),
        Field(
            "package",
            "string",
            "",
            required=True,
            only_for=("index",),
            pattern=PINNED,
            remedy="write name==version",
        ),
        Field(
            "url",
            "string",
            "",
            required=True,
            only_for=("url",),
            pattern=r"https?://\S+",
            remedy="write an http:// or https:// address",
            label="Address",
        ),
        Field(
            "sha256",
            "string",
            "",
            required=True,
            only_for=("url",),
            pattern=SHA256,
            remedy="write the 64 hex digits that `sha256sum` prints",
            label="SHA-256",
        ),
        Field(
            "secret",
            "string",
            "",
            only_for=("url",),
            pattern=NAME,
            remedy="name a secret that an admin has set with `mm secret set`",
        ),
        Field(
            "path",
            "string",
            "",
            required=True,
            only_for=("path",),
            pattern=r"/[^\x00]+",
            remedy="write an absolute path",
        ),
    )
}


def origin_fields(
    sources: Sequence[str], wordings: Mapping[str, Wording], *, default: str = ""
) -> Mapping[str, Field]:
    """The fields of an origin by name, as a table words them; `default` is its usual source."""
    made: dict[str, Field] = {}
    for name, wording in wordings.items():
        key = _KEYS[name]
        made[name] = replace(
            key,
            help=wording.help,
            example=wording.example,
            pattern=wording.pattern or key.pattern,
            remedy=wording.remedy or key.remedy,
        )
    made["source"] = replace(
        made["source"], choices=tuple(sources), default=default or None, required=not default
    )
    return made
