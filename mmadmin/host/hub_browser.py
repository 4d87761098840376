"""What a hub repository offers, and what a model in it would need, before anything is downloaded.

`browse` lists the model files of a repository at one commit, with licence and name as the hub has
them now. `read_header` reads a set's headers by HTTP ranges: a few megabytes and a few requests,
whatever the size of the set. Both explain gated, missing and renamed repositories (the errors are
those of `mmadmin.host.hub`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from mmadmin.core import catalog
from mmadmin.core.build.recipe import Json
from mmadmin.core.errors import InvalidModel, SourceUnavailable
from mmadmin.core.formats.protocol import FileSet, ModelHeader, RepoFile
from mmadmin.host.download import Remote, client, refusal
from mmadmin.host.hub import Hub, HubFile

FIRST_RANGE = 256 * 1024
"""Bytes of the first request for a file: the tensor table of a shard fits."""
NEXT_RANGE = 768 * 1024
BYTE_LIMIT = 32 * 1024 * 1024
"""The most that is read of all headers of a set: vocabularies of a million words fit."""
REQUEST_LIMIT = 40
"""Besides what each further file of a set takes."""
REQUESTS_PER_FILE = 4
"""A redirect, the first range and two more."""
STALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    asked: str
    """The name that was asked for."""
    repo: str
    """The name that the hub has for it now."""
    commit: str
    licence: str
    """As the repository declares it; empty = it does not."""
    licence_link: str
    gated: bool
    """True when its files want an accepted licence."""
    sets: tuple[FileSet, ...]
    """Models first, by size."""
    other_files: int
    """Files that belong to no known format."""
    notes: tuple[str, ...] = ()
    """What a person should know: renamed, gated, incomplete sets, no model at all."""
    files: tuple[RepoFile, ...] = field(default=(), repr=False)

    def as_json(self) -> dict[str, Json]:
        """Plain data, for the lock, records and pages."""
        return {
            "asked": self.asked,
            "repo": self.repo,
            "commit": self.commit,
            "licence": self.licence,
            "licence_link": self.licence_link,
            "gated": self.gated,
            "other_files": self.other_files,
            "notes": list(self.notes),
            "sets": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "quant": one.quant,
                    "size_bytes": one.size_bytes,
                    "shards": one.shards,
                    "missing": list(one.missing),
                    "files": [file.path for file in one.files],
                }
                for one in self.sets
            ],
        }


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What the headers of a set said, and what it cost to read them."""

    header: ModelHeader
    requests: int
    bytes_read: int


def browse(hub: Hub, repo: str, revision: str = "main") -> Listing:
    """The sets of a repository at the commit that `revision` means now. Blocking; two requests.

    Raises `Unauthorized`, `Gated`, `SourceMissing`, `RateLimited`, `SourceUnavailable`.
    """
    info = hub.info(repo, revision)
    name = str(getattr(info, "id", "") or repo)
    commit = str(info.sha or "")
    found = [_repo_file(file) for file in hub.files(name, commit)]
    sets = tuple(one for kind in catalog.formats().values() for one in kind.group(found))
    card = _card(info)
    gated = bool(getattr(info, "gated", False))
    return Listing(
        asked=repo,
        repo=name,
        commit=commit,
        licence=_licence(info, card),
        licence_link=str(card.get("license_link") or ""),
        gated=gated,
        sets=sets,
        other_files=len(found) - sum(len(one.files) for one in sets),
        notes=_notes(repo, name, sets, page=f"{hub.endpoint}/{name}" if gated else ""),
        files=tuple(found),
    )


def read_header(hub: Hub, repo: str, commit: str, chosen: FileSet) -> Glimpse:
    """The header of a set, by ranges of its files. Blocking.

    Raises `InvalidModel` when a file is damaged or of another format, and what `browse` raises.
    """
    with client(stall_s=STALL_S) as http:
        budget = _Budget(http, REQUEST_LIMIT + REQUESTS_PER_FILE * len(chosen.files))
        header = catalog.format_of_set(chosen).read_remote(
            chosen, _opener(hub, repo, commit, budget)
        )
        return Glimpse(header, budget.requests, budget.bytes_read)


def read_template(hub: Hub, repo: str, commit: str, chosen: FileSet) -> str | None:
    """The chat template of a set, by ranges of its files; None when the model has none.

    Blocking. Raises as `read_header`.
    """
    with client(stall_s=STALL_S) as http:
        opener = _opener(hub, repo, commit, _Budget(http, REQUEST_LIMIT))
        return catalog.format_of_set(chosen).read_remote_template(chosen, opener)


def _opener(hub: Hub, repo: str, commit: str, budget: _Budget) -> Callable[[RepoFile], _RangeFile]:
    return lambda file: _RangeFile(budget, hub.remote(repo, commit, file.path), file.size_bytes)


@dataclass(slots=True)
class _Budget:
    """What a look at a set may cost, and has cost."""

    http: httpx2.Client
    request_limit: int
    requests: int = 0
    bytes_read: int = 0

    def fetch(
        self, url: str, headers: Mapping[str, str], start: int, end: int
    ) -> tuple[bytes, str]:
        """Bytes [start, end) of a file, and the address that answered at last."""
        if self.requests >= self.request_limit or self.bytes_read + end - start > BYTE_LIMIT:
            raise InvalidModel(
                f"its header is longer than {BYTE_LIMIT >> 20} MiB",
                remedy="download the file to look at it",
            )
        asked = {**headers, "Range": f"bytes={start}-{end - 1}"}
        try:
            with self.http.stream("GET", url, headers=asked) as answer:
                self.requests += 1 + len(answer.history)
                if answer.status_code not in (httpx2.codes.OK, httpx2.codes.PARTIAL_CONTENT):
                    raise refusal(answer.status_code, str(httpx2.URL(url).path))
                skip = start if answer.status_code == httpx2.codes.OK else 0
                data = _take(answer, skip, end - start)
        except httpx2.HTTPError as error:
            raise SourceUnavailable(
                f"{httpx2.URL(url).path}: {type(error).__name__}",
                remedy="check the network and retry",
            ) from error
        self.bytes_read += len(data) + skip
        return data, str(answer.url)


def _take(answer: httpx2.Response, skip: int, count: int) -> bytes:
    """`count` bytes of an answer after `skip`; the rest is left on the wire."""
    data = bytearray()
    for piece in answer.iter_raw():
        data += piece
        if len(data) >= skip + count:
            break
    return bytes(data[skip : skip + count])


class _RangeFile(io.BytesIO):
    """A remote file that is fetched as far as it is read, from its start."""

    def __init__(self, budget: _Budget, remote: Remote, size: int) -> None:
        super().__init__()
        self.budget, self.size = budget, size
        self.url, self.headers = remote.url, dict(remote.headers)
        self.data = bytearray()
        self.position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Within what was read."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move back or forth; nothing is fetched by it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = max(0, start + offset)
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        """`size` bytes, fetching what is missing."""
        end = self.size if size is None or size < 0 else min(self.position + size, self.size)
        while len(self.data) < end:
            self._more(end)
        piece = bytes(self.data[self.position : end])
        self.position = end
        return piece

    def _more(self, needed: int) -> None:
        start = len(self.data)
        step = NEXT_RANGE if start else FIRST_RANGE
        end = min(max(start + step, needed), self.size)
        data, url = self.budget.fetch(self.url, self.headers, start, end)
        if len(data) != end - start:
            raise SourceUnavailable(
                f"{httpx2.URL(self.url).path}: the answer ended early", remedy="try again"
            )
        if httpx2.URL(url).host != httpx2.URL(self.url).host:
            self.headers.pop("Authorization", None)  # the token is for the hub alone
        self.url = url  # a signed address: further ranges need no second redirect
        self.data += data


def _repo_file(file: HubFile) -> RepoFile:
    return RepoFile(file.path, file.size, file.sha256)


def _card(info: Any) -> Mapping[str, Any]:
    card = getattr(info, "card_data", None)
    if card is None:
        return {}
    return card if isinstance(card, Mapping) else dict(card.to_dict())


def _licence(info: Any, card: Mapping[str, Any]) -> str:
    named = card.get("license_name") or card.get("license")
    if named:
        return ", ".join(named) if isinstance(named, list) else str(named)
    tags = getattr(info, "tags", None) or []
    return next((t.removeprefix("license:") for t in tags if t.startswith("license:")), "")


def _notes(asked: str, name: str, sets: tuple[FileSet, ...], *, page: str) -> tuple[str, ...]:
    """`page`: where a gated repository's licence is accepted."""
    notes: list[str] = []
    if name != asked:
        notes.append(f"{asked} was renamed: the hub has it as {name} now; write that name")
    if page:
        notes.append(
            f"it is gated: accept its licence at {page}, then set HF_TOKEN to a token of that "
            "account"
        )
    if not any(one.kind == "model" for one in sets):
        known = ", ".join(kind.upper() for kind in sorted(catalog.formats()))
        others = ", ".join(f"{one.files[0].path} ({one.kind})" for one in sets)
        notes.append(
            f"it has no model in a known format ({known})"
            + (f", only {others}" if others else "; look for a repository that says so")
        )
    notes += [
        f"{one.label}: shard {', '.join(map(str, one.missing))} of {one.shards} is missing"
        for one in sets
        if one.missing
    ]
    return tuple(notes)
