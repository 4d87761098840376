"""Spec → lock: what moves is pinned, once, over the network.

A hub revision becomes a commit with every file's sha256; a package becomes its release file; a
path becomes the digest of its bytes. What a previous lock already pinned for the same question is
kept, so that editing one part of a deployment moves nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import unquote, urlsplit

import httpx2

from mmadmin.core import catalog
from mmadmin.core.build.recipe import HubSource, IndexSource, PathSource, UrlSource
from mmadmin.core.callbacks import silent
from mmadmin.core.environments import interpreter
from mmadmin.core.errors import InvalidSpec, SourceMissing, SourceUnavailable
from mmadmin.core.formats.protocol import RepoFile
from mmadmin.core.recipes.extract_template import check_template
from mmadmin.core.source_policy import token_names
from mmadmin.core.spec.fields import refuse
from mmadmin.core.spec.lock import Lock, LockedFile
from mmadmin.core.spec.origin import Origin
from mmadmin.core.spec.pins import Packages, PinRequest
from mmadmin.core.spec.questions import questions, requests_of
from mmadmin.core.spec.spec import Spec
from mmadmin.core.store import hash_file
from mmadmin.host import index
from mmadmin.host.download import Remote, client, refusal
from mmadmin.host.hub import Hub, HubFile
from mmadmin.host.hub_browser import read_template
from mmadmin.host.known_digests import KnownDigests
from mmadmin.host.source_guard import Guard

CHUNK = 1 << 20

Part = Literal["model", "engine", "template"]


@dataclass(frozen=True, slots=True)
class Sources:
    """The places that a lock is made from."""

    hub: Hub = field(default_factory=Hub.from_env)
    pip: index.PipConfig = field(default_factory=index.pip_config)
    digests: KnownDigests | None = None
    """Of this host's files; None = each is read every time."""
    guard: Guard = Guard()  # noqa: RUF009 (frozen)
    """What the asker may take."""


def resolve(
    spec: Spec,
    previous: Lock | None = None,
    *,
    sources: Sources | None = None,
    refresh: Collection[Part] = (),
    on_progress: Callable[[str], None] = silent,
) -> Lock:
    """Pin everything that the spec names. Blocking, network; writes nothing.

    A part whose question is the one that `previous` answered keeps its pins, unless it is in
    `refresh`. Files of this host are looked at again, and read where they changed. Raises
    `SourceRefused`, `SourceUnavailable` and its kinds, `InvalidSpec`, `Conflict`, `NotFound`,
    `InvalidModel`.
    """
    sources = sources or Sources()
    sources.guard.access.check_spec(spec)
    resolver = _Resolver(sources, on_progress)
    asked, here = questions(spec), interpreter()
    pins: dict[str, tuple[LockedFile, ...]] = {}
    interpreters: dict[str, str] = {}
    for request in requests_of(spec):
        before = previous.of(request.name) if previous else ()
        if (
            previous is not None
            and request.part not in refresh
            and previous.asked.get(request.part) == asked[request.part]
            and not request.reads_host
            and (request.packages is None or previous.interpreters.get(request.name) == here)
        ):
            files = before
        else:
            files = resolver.files(request)
            if request.model_format:
                resolver.check_template(spec, request.model_format, files, before)
        if files:
            pins[request.name] = files
            if request.packages is not None:
                interpreters[request.name] = here
    return Lock(pins, asked, interpreters)


class _Resolver:
    """Answers the questions of one lock."""

    def __init__(self, sources: Sources, on_progress: Callable[[str], None]) -> None:
        self._sources = replace(sources, hub=replace(sources.hub, report=on_progress))
        self._report = on_progress
        self._listings: dict[tuple[str, str], tuple[str, dict[str, HubFile]]] = {}

    def files(self, request: PinRequest) -> tuple[LockedFile, ...]:
        """The files that a request means."""
        origin = request.origin
        if request.packages is not None:
            return self._packages(request.packages, request.field)
        if origin is None:
            return ()
        if origin.source == "hub":
            return self._hub(origin, request)
        if origin.source == "index":
            return (self._package(origin.package, request.archive),)
        if origin.source == "url":
            return (self._url(origin, request.field),)
        return self._local(Path(origin.path), request)

    def check_template(
        self,
        spec: Spec,
        model_format: str,
        model: Sequence[LockedFile],
        before: Sequence[LockedFile],
    ) -> None:
        """Refuse a hub model that brings another template under patches, before it is downloaded.

        Other than the file says, or, where it does not say, than the revision `before`.
        """
        wanted, source = spec.template, model[0].source
        if not isinstance(source, HubSource) or wanted.source != "model":
            return
        expected = wanted.expect_sha256
        if not expected and wanted.patches and before and before[0].sha256 != model[0].sha256:
            expected = self._template_before(source.repo, model_format, before)
        if expected:
            self._report("reading the model's chat template from the hub")
            check_template(self._template_of(model_format, model), expected, source.repo)

    def _template_before(self, repo: str, model_format: str, before: Sequence[LockedFile]) -> str:
        """The digest of the earlier revision's template; empty = there is none to compare with."""
        earlier = before[0].source
        if not isinstance(earlier, HubSource) or earlier.repo != repo:
            return ""
        try:
            self._report("reading the earlier revision's chat template from the hub")
            return hashlib.sha256(self._template_of(model_format, before).encode()).hexdigest()
        except SourceUnavailable as error:
            self._report(f"whether the template under the patches changed is not known: {error}")
            return ""

    def _template_of(self, model_format: str, model: Sequence[LockedFile]) -> str:
        source = model[0].source
        assert isinstance(source, HubSource)  # noqa: S101 (the callers ask)
        files = [RepoFile(f.path, f.size, f.sha256) for f in model]
        (chosen,) = catalog.model_format(model_format).group(files)
        return read_template(self._sources.hub, source.repo, source.revision, chosen) or ""

    def _hub(self, origin: Origin, request: PinRequest) -> tuple[LockedFile, ...]:
        commit, listing = self._listing(origin.repo, origin.revision)
        known = [RepoFile(file.path, file.size, file.sha256) for file in listing.values()]

        def locked(path: str) -> LockedFile:
            file = listing[path]
            sha256 = file.sha256 or self._small(origin.repo, commit, file)
            return LockedFile(path, sha256, file.size, HubSource(origin.repo, commit, path))

        assert request.choose is not None  # noqa: S101 (a hub's files are always chosen)
        return tuple(locked(path) for path in request.choose(known))

    def _listing(self, repo: str, revision: str) -> tuple[str, dict[str, HubFile]]:
        """A repository's commit and files by path; asked once a lock."""
        known = self._listings.get((repo, revision))
        if known is None:
            hub = self._sources.hub
            self._report(f"asking {hub.host} for {repo}@{revision}")
            commit, name = hub.resolve(repo, revision)
            self._sources.guard.access.check_hub(name, repo)  # it may have been renamed
            known = commit, {file.path: file for file in hub.files(repo, commit)}
            self._listings[repo, revision] = known
        return known

    def _small(self, repo: str, commit: str, file: HubFile) -> str:
        content = self._sources.hub.small_file(repo, commit, file)
        return hashlib.sha256(content).hexdigest()

    def _package(self, package: str, kind: index.Kind) -> LockedFile:
        project, _, version = package.partition("==")
        self._report(f"asking the Python index for {package}")
        try:
            found = index.find(project, version, kind=kind, config=self._sources.pip)
        except SourceMissing:
            found = index.find(project, version, config=self._sources.pip)
        source = IndexSource(project, version, found.filename)
        if found.sha256 is None:
            sha256, size = self._measure(found.remote)
            return LockedFile(found.filename, sha256, size, source)
        return LockedFile(found.filename, found.sha256, self._size(found.remote), source)

    def _packages(self, packages: Packages, dotted: str) -> tuple[LockedFile, ...]:
        """One wheel for each package of an environment."""
        from mmadmin.host.packages import resolve_wheels  # noqa: PLC0415 (half of all locks need none)

        self._report(f"resolving {', '.join(packages.requirements)}")
        found = []
        for wheel in resolve_wheels(packages, self._sources.pip, dotted):
            url, headers = index.without_login(wheel.url)
            remote = Remote(url, label=wheel.filename, headers=headers, cert=self._sources.pip.cert)
            sha256, size = wheel.sha256, wheel.size_bytes
            if not sha256:
                sha256, size = self._measure(remote)
            source = IndexSource(wheel.project, wheel.version, wheel.filename)
            locked = LockedFile(wheel.filename, sha256, size or self._size(remote), source)
            found.append(locked)
        self._report(f"{len(found)} packages, {sum(file.size for file in found)} bytes")
        return tuple(found)

    def _url(self, origin: Origin, dotted: str) -> LockedFile:
        url, sha256 = origin.url, origin.sha256
        name = PurePosixPath(unquote(urlsplit(url).path)).name
        if not name:
            refuse(dotted, "the address names no file", remedy="write the file's own address")
        if names := token_names(url):
            self._report(
                f"{dotted}: the address seems to hold a credential ({', '.join(names)}): everybody"
                " who sees the deployment file can use it"
            )
        reach = self._sources.guard.reach(sha256, dotted)
        with reach.telling(name):
            headers = self._sources.guard.login(origin.secret, url, dotted)
            size = self._size(Remote(url, label=name, headers=headers, reach=reach))
        return LockedFile(name, sha256, size, UrlSource(url, origin.secret))

    def _local(self, path: Path, request: PinRequest) -> tuple[LockedFile, ...]:
        """A file of this host, or those beside it that the engine chooses with it."""
        self._sources.guard.file(path, request.field)
        if request.choose is None or not path.is_file():
            one = self._path(path, request.field)
            return (replace(one, path=request.saved_as or one.path),)
        beside = [p for p in path.parent.iterdir() if p.is_file()]  # no dead links
        chosen = request.choose([RepoFile(p.name, p.stat().st_size) for p in beside])
        return tuple(self._path(path.parent / name, request.field) for name in chosen)

    def _path(self, path: Path, dotted: str) -> LockedFile:
        real = self._sources.guard.file(path, dotted)
        if not real.is_file():
            raise InvalidSpec(
                f"{dotted}: {path} is not a file of this host",
                remedy="check the path; it is looked up on the host that builds",
                field=dotted,
            )
        self._report(f"reading {path.name}")
        try:
            known = self._sources.digests
            sha256, size = known.hash_file(real) if known else hash_file(real)
        except OSError as error:
            raise InvalidSpec(
                f"{dotted}: {path} cannot be read: {error.strerror}",
                remedy="let the user that mmadmin runs as read it",
                field=dotted,
            ) from error
        return LockedFile(path.name, sha256, size, PathSource(str(path)))

    def _size(self, remote: Remote) -> int:
        """A file's size in bytes, without fetching it where the source allows that."""
        if remote.url.startswith("file:"):
            return Path(unquote(urlsplit(remote.url).path)).stat().st_size
        with client(remote.cert, reach=remote.reach) as http:
            try:
                answer = http.head(remote.url, headers=dict(remote.headers))
            except httpx2.HTTPError as error:
                raise _silence(remote, error) from error
        length = answer.headers.get("content-length", "")
        if answer.status_code == httpx2.codes.OK and length.isdigit():
            return int(length)
        if answer.status_code in (401, 403, 404, 410):
            raise refusal(answer.status_code, remote.label)
        return self._measure(remote)[1]

    def _measure(self, remote: Remote) -> tuple[str, int]:
        """Digest and size of a source that tells neither: read it once."""
        if remote.url.startswith("file:"):
            return hash_file(Path(unquote(urlsplit(remote.url).path)))
        self._report(f"reading {remote.label} for its digest")
        total, size = hashlib.sha256(), 0
        try:
            with (
                client(remote.cert, reach=remote.reach) as http,
                http.stream("GET", remote.url, headers=dict(remote.headers)) as answer,
            ):
                if answer.status_code != httpx2.codes.OK:
                    raise refusal(answer.status_code, remote.label)
                for chunk in answer.iter_raw(CHUNK):
                    total.update(chunk)
                    size += len(chunk)
        except httpx2.HTTPError as error:
            raise _silence(remote, error) from error
        return total.hexdigest(), size


def _silence(remote: Remote, error: Exception) -> SourceUnavailable:
    return SourceUnavailable(
        f"{remote.label}: the source does not answer ({type(error).__name__})",
        remedy="check the network and try again",
    )
