"""The model hub, through `huggingface_hub`: revisions, file lists, addresses.

A revision is resolved once to its 40-hex commit; everything else is asked by that commit, so a
moving branch cannot mix two states. Bytes are fetched by our own downloader and checked against
the hub's LFS digest (which is the file's sha256). The endpoint comes from `HF_ENDPOINT`, the token
from `HF_TOKEN` or huggingface_hub's token file; the token is sent to the hub only,
and appears in no message.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast
from urllib.parse import quote

import httpx2
import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import DatasetInfo, ModelInfo, RepoFile
from huggingface_hub.utils._http import default_client_factory

from mmadmin.core.callbacks import Report, silent
from mmadmin.core.errors import (
    DigestMismatch,
    Gated,
    InvalidInput,
    MmError,
    RateLimited,
    SourceMissing,
    SourceUnavailable,
    Unauthorized,
)
from mmadmin.host.download import Remote, client, refusal, retry_after
from mmadmin.host.network import (
    check_proxies,
    credential,
    host_of,
    offline,
    offline_by,
    why_silent,
)
from mmadmin.host.policy import Policy

COMMIT = re.compile(r"[0-9a-f]{40}")
API_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
"""A hub that is there takes the connection sooner: two lost packets are forgiven."""
TIMEOUTS = httpx2.Timeout(API_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
ASKED_BY_A_PERSON = Policy(attempts=2)
"""A person at a screen gets an answer soon; a worker's job keeps trying."""
NAMED_BY = "HF_ENDPOINT names the hub"
LATER = "try again later, or set HF_TOKEN: known accounts have higher limits"
SMALL_FILE_LIMIT = 64 << 20
"""Bytes; the hub keeps larger files in LFS, with a digest."""

DATASETS = "datasets/"
"""Names of data sets begin with it, as their addresses do."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository at one commit."""

    path: str
    size: int
    """Bytes."""
    sha256: str | None
    """The LFS digest; None for small files kept in git itself."""
    git_sha1: str
    """Git blob id: covers the content of small files."""


@dataclass(frozen=True, slots=True)
class Hub:
    """One hub as we are configured to use it."""

    endpoint: str
    token: str | None = None
    policy: Policy = Policy()  # noqa: RUF009 (frozen)
    unusable: MmError | None = None
    """Why the environment does not let it be asked; None = it does."""
    report: Report = field(default=silent, compare=False)
    """Told what is waited for."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Hub:
        """`HF_ENDPOINT` (else the library's default), `HF_TOKEN` or the library's token file.

        What makes it unusable is raised when it is asked: not everybody who may ask it does.
        """
        env = os.environ if env is None else env
        endpoint = (env.get("HF_ENDPOINT") or huggingface_hub.constants.ENDPOINT).rstrip("/")
        if name := offline_by(env):
            return cls(endpoint, unusable=offline(name))
        try:
            check_proxies(env)
            token = credential("HF_TOKEN", env) or huggingface_hub.get_token()
        except InvalidInput as error:
            return cls(endpoint, unusable=error)
        return cls(endpoint, token)

    def __repr__(self) -> str:
        return f"Hub({self.endpoint!r}, token={'set' if self.token else 'none'})"

    @property
    def host(self) -> str:
        """Whom we ask, for people."""
        return host_of(self.endpoint)

    def resolve(self, repo: str, revision: str = "main") -> tuple[str, str]:
        """The 40-hex commit that a branch, tag or commit means now, and the repository's name now.

        Raises `Unauthorized`, `Gated`, `SourceMissing`, `RateLimited`, `SourceUnavailable`.
        """
        info = self.info(repo, revision)
        commit = info.sha or ""
        if not COMMIT.fullmatch(commit):
            raise SourceUnavailable(
                f"{repo}@{revision}: the hub names no commit", remedy="try again later"
            )
        prefix = repo.removesuffix(_kind_of(repo)[1])
        return commit, prefix + str(getattr(info, "id", "") or _kind_of(repo)[1])

    def info(
        self, repo: str, revision: str = "main", *, with_files: bool = False
    ) -> ModelInfo | DatasetInfo:
        """What the hub says about a repository: its name now, commit, licence; errors as `resolve`.

        A renamed repository answers under its new name (`id`).
        """
        kind, name = _kind_of(repo)

        def question(api: HfApi) -> ModelInfo | DatasetInfo:
            ask = api.dataset_info if kind == "dataset" else api.model_info
            timeout = cast("float", TIMEOUTS)
            return ask(name, revision=revision, timeout=timeout, files_metadata=with_files)

        return self._ask(repo, revision, question)

    def files(self, repo: str, commit: str) -> list[HubFile]:
        """Every file of the repository at a commit, sorted by path; errors as `resolve`.

        A mirror without the tree API tells the same with the commit itself.
        """
        kind, name = _kind_of(repo)

        def listing(api: HfApi) -> list[HubFile]:
            return [
                HubFile(
                    entry.path,
                    entry.lfs.size if entry.lfs else entry.size,
                    entry.lfs.sha256 if entry.lfs else None,
                    entry.blob_id,
                )
                for entry in api.list_repo_tree(
                    name, recursive=True, revision=commit, repo_type=kind
                )
                if isinstance(entry, RepoFile)
            ]

        try:
            found = self._ask(repo, commit, listing)
        except SourceMissing:
            found = self._siblings(repo, commit)
        return sorted(found, key=lambda file: file.path)

    def _siblings(self, repo: str, commit: str) -> list[HubFile]:
        """The files of a commit as the hub lists them beside it."""
        info = self.info(repo, commit, with_files=True)
        found = [
            HubFile(
                file.rfilename,
                file.size or 0,
                file.lfs.sha256 if file.lfs else None,
                file.blob_id or "",
            )
            for file in info.siblings or []
        ]
        if not found or not all(file.sha256 or file.git_sha1 for file in found):
            raise SourceUnavailable(
                f"{repo}@{commit[:12]}: the hub at {self.host} knows the repository, and tells"
                " neither its file tree nor digests of its files",
                remedy="set HF_ENDPOINT to a hub or mirror with the tree API"
                " (/api/models/OWNER/NAME/tree/COMMIT)",
            )
        return found

    def remote(self, repo: str, commit: str, path: str) -> Remote:
        """Where the downloader gets a file of a commit."""
        self._check_usable()
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        url = f"{self.endpoint}/{quote(repo)}/resolve/{quote(commit, safe='')}/{quote(path)}"
        return Remote(url, label=f"{repo}@{commit[:12]}/{path}", headers=headers)

    def small_file(self, repo: str, commit: str, file: HubFile) -> bytes:
        """The content of a file that has no LFS digest, checked against its git blob id.

        For pinning: the lock wants a sha256. Raises as `resolve`, and `DigestMismatch`.
        """
        remote = self.remote(repo, commit, file.path)
        if file.size > SMALL_FILE_LIMIT:
            raise SourceUnavailable(
                f"{remote.label}: {file.size} bytes without an LFS digest",
                remedy="give its sha256 in the spec",
            )
        try:
            with client(stall_s=API_TIMEOUT_S) as http:
                answer = http.get(remote.url, headers=dict(remote.headers))
        except httpx2.HTTPError as error:
            raise SourceUnavailable(
                f"{remote.label}: {type(error).__name__}", remedy="check the network and retry"
            ) from error
        if answer.status_code != httpx2.codes.OK:
            raise refusal(answer.status_code, remote.label)
        blob = b"blob %d\0" % len(answer.content) + answer.content
        if hashlib.sha1(blob, usedforsecurity=False).hexdigest() != file.git_sha1:
            raise DigestMismatch(
                f"{remote.label}: the bytes are not those of the commit",
                remedy="retry; if it stays so, the hub or a proxy in between is broken",
            )
        return answer.content

    def _ask(self, repo: str, revision: str, question: Callable[[HfApi], T]) -> T:
        """Ask the hub's API; waits out a 429 up to the cap, and retries what may pass."""
        self._check_usable()
        _set_up_library()
        api = HfApi(endpoint=self.endpoint, token=self.token or False)
        label = f"{repo}@{revision}"
        for attempt in range(1, self.policy.attempts + 1):
            try:
                return question(api)
            except HFValidationError as error:
                raise SourceMissing(
                    f"{repo!r} is not a valid repository name", remedy="write it as owner/name"
                ) from error
            except HfHubHTTPError as error:
                wait = self._wait_after(error, label)
                last: Exception = error
            except httpx2.HTTPError as error:
                wait, last = None, error
                silence = why_silent(error, self.host)
                if silence and (silence.final or self.policy == ASKED_BY_A_PERSON):
                    raise SourceUnavailable(
                        f"{label}: {silence.message}", remedy=f"{silence.remedy} ({NAMED_BY})"
                    ) from error
            if attempt < self.policy.attempts:
                pause = self.policy.backoff_s * 2 ** (attempt - 1) if wait is None else wait
                self.report(
                    f"{self.host} {_answer(last)}; "
                    f"asking again in {pause:.0f} s ({attempt + 1} of {self.policy.attempts})"
                )
                time.sleep(pause)
        message = f"{label}: the hub at {self.host} {_answer(last)}"
        if isinstance(last, HfHubHTTPError):
            status = last.response.status_code
            if status == httpx2.codes.TOO_MANY_REQUESTS:
                wait_s = retry_after(last.response.headers) or 0
                raise RateLimited(
                    message, remedy=LATER, status=status, retry_after_s=int(wait_s)
                ) from last
            raise SourceUnavailable(message, remedy="try again later", status=status) from last
        raise SourceUnavailable(
            message,
            remedy="check the network; HF_ENDPOINT names another hub or a mirror. What `mm lock` "
            "or an earlier plan has pinned is not asked again",
        ) from last

    def _check_usable(self) -> None:
        if self.unusable is not None:
            raise self.unusable

    def _wait_after(self, error: HfHubHTTPError, label: str) -> float | None:
        """Seconds to wait before another try, None for back-off; raises what is final."""
        status = error.response.status_code
        said = f" ({error.server_message})" if error.server_message else ""
        if isinstance(error, GatedRepoError):
            raise Gated(
                f"{label}: the repository is gated{said}",
                remedy="accept its licence on its hub page with the account of HF_TOKEN",
                status=status,
            ) from error
        if isinstance(error, RevisionNotFoundError):
            raise SourceMissing(
                f"{label}: the revision does not exist",
                remedy="check the branch, tag or commit; a force push may have removed it",
                status=status,
            ) from error
        if isinstance(error, RepositoryNotFoundError) and status == httpx2.codes.UNAUTHORIZED:
            raise Unauthorized(
                f"{label}: no such repository, or it is private (401)",
                remedy="check its name; for a private one set HF_TOKEN to a token that may read it",
                status=status,
            ) from error
        if isinstance(error, RepositoryNotFoundError | EntryNotFoundError):
            raise SourceMissing(
                f"{label}: no such repository or file",
                remedy="check its name; it may have been renamed or removed",
                status=status,
            ) from error
        wait = retry_after(error.response.headers)
        if status == httpx2.codes.TOO_MANY_REQUESTS and (wait or 0) > self.policy.wait_cap_s:
            raise RateLimited(
                f"{label}: the hub asks to wait {wait:.0f} s (429)",
                remedy=LATER,
                status=status,
            ) from error
        if status in (408, 429) or status >= httpx2.codes.INTERNAL_SERVER_ERROR:
            return wait
        raise refusal(status, label, error.server_message or "") from error


def _kind_of(repo: str) -> tuple[str, str]:
    """What kind of repository it is for the hub, and its name there."""
    if repo.startswith(DATASETS):
        return "dataset", repo.removeprefix(DATASETS)
    return "model", repo


def _answer(error: Exception) -> str:
    """What came of a question: the status that was answered, or why there was no answer."""
    if isinstance(error, HfHubHTTPError):
        message = f" ({error.server_message})" if error.server_message else ""
        return f"answered {error.response.status_code}{message}"
    return f"does not answer ({type(error).__name__})"


@functools.cache
def _set_up_library() -> None:
    """Give huggingface_hub's shared client a timeout: it has none, and a mute hub would hang us.

    Without telemetry it does not ask the hub which programs are agents, before its first question.
    """
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True

    def factory() -> httpx2.Client:
        session = default_client_factory()
        session.timeout = TIMEOUTS
        return session

    huggingface_hub.set_client_factory(factory)
