"""A model hub on this machine: real HTTP, real `huggingface_hub` on the other end.

Speaks the part of the hub's API that finding and fetching a revision needs: model info by revision,
file trees with LFS digests, `resolve` with `X-Repo-Commit`, `X-Linked-Etag`, `X-Linked-Size`,
Range and If-Range, large files by redirect to another host name. Faults are queued per path and used
up one a request.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Hollow:
    """A file of any size: its head, then zeros. Its digest is made up."""

    head: bytes
    size: int


Content = bytes | Path | Hollow
Fault = Callable[["Handler"], bool]
"""Answers a request wrongly; True when it has answered, False to go on as usual."""


def read(content: Content) -> bytes:
    if isinstance(content, Hollow):
        return b"hollow %d " % content.size + content.head
    return content.read_bytes() if isinstance(content, Path) else content


def size_of(content: Content) -> int:
    return content.size if isinstance(content, Hollow) else len(read(content))


def piece_of(content: Content, start: int, end: int) -> bytes:
    if isinstance(content, Hollow):
        return content.head[start:end].ljust(end - start, b"\0")
    return read(content)[start:end]


@dataclass
class Commit:
    sha: str
    files: Mapping[str, Content]


@dataclass
class Repo:
    name: str
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """Wanted by every request when set (a private repository)."""
    gated: bool = False
    lfs_from: int = 1024
    """Bytes; smaller files carry no LFS digest."""

    def commit(self, files: Mapping[str, Content], *, branch: str = "main") -> str:
        """Add a commit with exactly these files and move the branch to it."""
        digest = hashlib.sha1(f"{self.name}{len(self.commits)}".encode())
        for path, content in sorted(files.items()):
            digest.update(path.encode() + hashlib.sha256(read(content)).digest())
        sha = digest.hexdigest()
        self.commits[sha] = Commit(sha, dict(files))
        self.refs[branch] = sha
        return sha

    def find(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


@dataclass
class Seen:
    method: str
    path: str
    host: str
    headers: dict[str, str]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.seen.append(
            Seen(self.command, path, self.headers.get("Host", ""), dict(self.headers))
        )
        for pattern, faults in self.hub.faults.items():
            if pattern in path and faults and faults.popleft()(self):
                return
        parts = path.strip("/").split("/")
        try:
            if parts[0] == "cdn":
                self.send_content(self.hub.cdn[parts[1]])
            elif parts[:2] == ["api", "models"]:
                self.api(parts[2:])
            elif parts[:2] == ["api", "datasets"]:
                self.api([f"datasets/{parts[2]}", *parts[3:]])
            elif "resolve" in parts:
                at = parts.index("resolve")
                self.resolve("/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :]))
            elif path.strip("/") in self.hub.pages:
                self.send_page(self.hub.pages[path.strip("/")])
            elif path.removeprefix("/") in self.hub.plain:
                self.send_content(self.hub.plain[path.removeprefix("/")])
            else:
                self.refuse(404, "EntryNotFound", "no such page")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    # -- API ---------------------------------------------------------------------------------

    def repo(self, name: str) -> Repo | None:
        """The repository, or None after the request was refused."""
        repo = self.hub.repos.get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo is None or (repo.token is not None and token != repo.token):
            self.refuse(401 if not token else 404, "RepoNotFound", "Repository not found")
            return None
        if repo.gated:
            self.refuse(403, "GatedRepo", "Access to this model is restricted")
            return None
        return repo

    def api(self, parts: list[str]) -> None:
        repo = self.repo("/".join(parts[:2]))
        if repo is None:
            return
        revision = parts[3] if len(parts) > 3 else "main"
        commit = repo.find(revision)
        if commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if len(parts) > 2 and parts[2] == "tree":
            self.send_json([self.entry(repo, p, c) for p, c in sorted(commit.files.items())])
            return
        self.send_json(
            {
                "_id": commit.sha[:24],
                "id": repo.name,
                "modelId": repo.name,
                "sha": commit.sha,
                "private": repo.token is not None,
                "gated": False,
                "disabled": False,
                "tags": ["gguf"],
                "downloads": 0,
                "likes": 0,
                "lastModified": "2026-01-01T00:00:00.000Z",
                "createdAt": "2026-01-01T00:00:00.000Z",
                "cardData": {"license": "apache-2.0"},
                "siblings": [
                    {"rfilename": path} | self.sibling(repo, path, content)
                    for path, content in sorted(commit.files.items())
                ],
            }
        )

    def sibling(self, repo: Repo, path: str, content: Content) -> dict[str, object]:
        """What the hub adds with `?blobs=true`."""
        if "blobs" not in self.path or self.hub.plain_siblings:
            return {}
        entry = self.entry(repo, path, content)
        lfs = entry.get("lfs")
        more = {"lfs": {**lfs, "sha256": lfs["oid"]}} if isinstance(lfs, dict) else {}
        return {"blobId": entry["oid"], "size": entry["size"], **more}

    def entry(self, repo: Repo, path: str, content: Content) -> dict[str, object]:
        data, size = read(content), size_of(content)
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, object] = {"type": "file", "oid": blob, "size": size, "path": path}
        if size >= repo.lfs_from:
            sha = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": sha, "size": size, "pointerSize": 134}
        return entry

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name)
        if repo is None:
            return
        commit = repo.find(revision)
        if commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if path not in commit.files:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        content = commit.files[path]
        data, size = read(content), size_of(content)
        headers = {"X-Repo-Commit": commit.sha}
        if size < repo.lfs_from:
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            self.send_content(content, headers, etag=blob)
            return
        sha = hashlib.sha256(data).hexdigest()
        self.hub.cdn[sha] = content
        self.send_response(302)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("X-Linked-Etag", f'"{sha}"')
        self.send_header("X-Linked-Size", str(size))
        self.send_header("Location", f"{self.hub.cdn_url}/cdn/{sha}?signature=once")
        self.send_header("Content-Length", "0")
        self.end_headers()

    # -- answers -----------------------------------------------------------------------------

    def send_json(self, value: object) -> None:
        self.send_body(json.dumps(value).encode(), "application/json")

    def send_page(self, page: str) -> None:
        self.send_body(page.encode(), "text/html")

    def send_body(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(
        self,
        status: int,
        code: str = "",
        message: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        body = json.dumps({"error": message}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_content(
        self,
        content: Content,
        headers: Mapping[str, str] | None = None,
        *,
        etag: str = "",
        ranges: bool = True,
        cut: int | None = None,
    ) -> None:
        """A file, as a good server sends it; `cut` drops the connection after so many bytes."""
        size = size_of(content)
        etag = f'"{etag or hashlib.sha256(read(content)).hexdigest()}"'
        start, end, status = 0, size, 200
        asked = self.headers.get("Range", "")
        if ranges and asked.startswith("bytes=") and self.headers.get("If-Range", etag) == etag:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(size, int(last) + 1 if last else size)
            status = 206
            if start >= size:
                self.refuse(416, headers={"Content-Range": f"bytes */{size}"})
                return
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("ETag", etag)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        step = 1 << 16
        sent = 0
        data = None if isinstance(content, Hollow) else read(content)
        for at in range(start, end, step):
            till = min(at + step, end)
            piece = piece_of(content, at, till) if data is None else data[at:till]
            if cut is not None:
                piece = piece[: cut - sent]
            sent += len(piece)
            self.hub.count(len(piece))
            self.wfile.write(piece)
            if cut is not None and sent >= cut:
                self.wfile.flush()
                self.close_connection = True
                return


@dataclass
class LocalHub:
    server: ThreadingHTTPServer
    repos: dict[str, Repo] = field(default_factory=dict)
    plain: dict[str, Content] = field(default_factory=dict)
    """Files outside any repository, by path."""
    pages: dict[str, str] = field(default_factory=dict)
    """HTML pages by path: a package index."""
    cdn: dict[str, Content] = field(default_factory=dict)
    faults: dict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    """Part of a path → what goes wrong next there."""
    seen: list[Seen] = field(default_factory=list)
    plain_siblings: bool = False
    """Tells names alone beside a commit, whatever it is asked for."""
    sent: int = 0
    """Bytes of file content sent; counted before a client can have them."""
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def count(self, size: int) -> None:
        with self._counting:
            self.sent += size

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cdn_url(self) -> str:
        """The same server by another host name: credentials must not come along."""
        return f"http://localhost:{self.port}"

    def repo(self, name: str, **options: object) -> Repo:
        self.repos[name] = Repo(name, **options)  # type: ignore[arg-type]
        return self.repos[name]

    def fail(self, path: str, *faults: Fault) -> None:
        """Queue faults for requests whose path contains `path`."""
        self.faults[path].extend(faults)

    def requests(self, part: str) -> list[Seen]:
        return [seen for seen in self.seen if part in seen.path]


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Run a hub until the block ends."""
    handler = type("BoundHandler", (Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub = LocalHub(server)
    handler.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# -- faults ------------------------------------------------------------------------------------


def status(code: int, error: str = "", **headers: str) -> Fault:
    """Answer with a bad status; header names with _ for -."""

    def fault(handler: Handler) -> bool:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        handler.refuse(code, error, "injected", named)
        return True

    return fault


def instead(content: bytes, content_type: str = "text/html") -> Fault:
    """Answer 200 with other bytes: a login page, an LFS pointer, a flipped byte."""

    def fault(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)
        return True

    return fault


def _content(handler: Handler) -> Content:
    path = unquote(urlsplit(handler.path).path).strip("/")
    if path.startswith("cdn/"):
        return handler.hub.cdn[path.removeprefix("cdn/")]
    return handler.hub.plain[path]


def drop(after: int) -> Fault:
    """Send so many bytes, then close the connection."""

    def fault(handler: Handler) -> bool:
        handler.send_content(_content(handler), cut=after)
        return True

    return fault


def no_ranges(handler: Handler) -> bool:
    """Ignore Range: the whole file with 200."""
    handler.send_content(_content(handler), ranges=False)
    return True


def as_usual(handler: Handler) -> bool:
    """No fault: this request is answered well."""
    return False


def busy(for_s: float, fault: Fault) -> list[Fault]:
    """The same fault for any number of requests, for a time that begins with the first."""
    ends: list[float] = []

    def while_busy(handler: Handler) -> bool:
        if not ends:
            ends.append(time.monotonic() + for_s)
        return time.monotonic() < ends[0] and fault(handler)

    return [while_busy] * 10_000


def held(go_on: threading.Event) -> Fault:
    """Answer well, once the test says so."""

    def fault(handler: Handler) -> bool:
        go_on.wait()
        return False

    return fault


def stuck(end: threading.Event, after: int = 0) -> Fault:
    """Send the headers and so many bytes, then nothing, until the test ends the connection."""

    def fault(handler: Handler) -> bool:
        content = _content(handler)
        first, _, last = handler.headers["Range"].removeprefix("bytes=").partition("-")
        start, until = int(first), int(last) + 1
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{until - 1}/{size_of(content)}")
        handler.send_header("Content-Length", str(until - start))
        handler.end_headers()
        handler.hub.count(after)
        handler.wfile.write(piece_of(content, start, start + after))
        handler.wfile.flush()
        end.wait()
        handler.close_connection = True
        return True

    return fault
