"""Binary caches of every kind to push to and pull from, and ways to damage them."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mmadmin.core.callbacks import Progress
from mmadmin.core.store.binary_cache import BinaryCache, FolderCache, WritableBinaryCache

if TYPE_CHECKING:  # the core's tests know no other room
    from mmadmin.host.bucket import Bucket

PART_BYTES = 5 << 20
"""The smallest part that S3 takes."""
CANARY = "a-secret-that-must-not-be-seen"
_numbers = itertools.count(1)


class FolderFiles:
    """The files of a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def paths(self, below: str) -> list[str]:
        found = (self.root / below).rglob("*")
        return sorted(str(path.relative_to(self.root)) for path in found if path.is_file())

    def replace(self, path: str, data: bytes) -> None:
        (self.root / path).write_bytes(data)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()


class BucketFiles:
    """The files of a bucket, by another library than ours."""

    def __init__(self, bucket: Bucket) -> None:
        import boto3

        self.client = boto3.client("s3", endpoint_url=bucket.endpoint, region_name=bucket.region)
        self.bucket = bucket.name
        self.prefix = f"{bucket.prefix}/" if bucket.prefix else ""
        self.client.create_bucket(Bucket=self.bucket)

    def paths(self, below: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.prefix}{below}")
        return [one["Key"].removeprefix(self.prefix) for one in found.get("Contents", [])]

    def replace(self, path: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}{path}", Body=data)

    def remove(self, path: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}{path}")

    def unfinished(self) -> list[str]:
        """Uploads that were begun and neither completed nor taken back."""
        found = self.client.list_multipart_uploads(Bucket=self.bucket)
        return [one["Key"] for one in found.get("Uploads", [])]


class Watched:
    """A cache that keeps what was fetched and sent."""

    def __init__(
        self, reader: BinaryCache, writer: WritableBinaryCache, files: FolderFiles | BucketFiles
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.files = files
        self.fetched: list[str] = []
        self.sent: list[str] = []

    @property
    def label(self) -> str:
        return self.reader.label

    def read(self, path: str) -> bytes | None:
        return self.reader.read(path)

    def fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        self.fetched.append(path)
        return self.reader.fetch(path, part, size, progress)

    def has(self, path: str, size: int) -> bool:
        return self.writer.has(path, size)

    def put(self, path: str, source: Path, sha256: str, progress: Progress) -> None:
        self.sent.append(path)
        self.writer.put(path, source, sha256, progress)

    def write(self, path: str, data: bytes) -> None:
        self.sent.append(path)
        self.writer.write(path, data)


def folder_cache(root: Path) -> Watched:
    """A folder."""
    folder = FolderCache(root)
    return Watched(folder, folder, FolderFiles(root))


@contextmanager
def http_cache(root: Path) -> Iterator[Watched]:
    """A folder that is pushed to directly and pulled from over HTTP."""
    from mmadmin.host.binary_caches import web_cache

    with running(static(root, ranges=True)) as url:
        reader = web_cache(url, pause_s=0.001)
        yield Watched(reader, FolderCache(root), FolderFiles(root))


def bucket_cache(endpoint: str, prefix: str = "team/models") -> Watched:
    """A new bucket of a server."""
    from mmadmin.host.binary_caches import BucketCache
    from mmadmin.host.bucket import Bucket

    bucket = Bucket(f"bucket-{next(_numbers)}", prefix, endpoint, "us-east-1")
    files = BucketFiles(bucket)
    cache = BucketCache(bucket, pause_s=0.001, part_bytes=PART_BYTES)
    return Watched(cache, cache, files)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of a real S3 server on this machine."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, with credentials in the environment and nothing else of Amazon's there."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    return s3_endpoint


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """The server's address while it runs."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Refusing:
    """What every answer of a server is."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


def static(
    root: Path,
    *,
    ranges: bool,
    cut: Callable[[int], int | None] = lambda _: None,
    refusing: Refusing | None = None,
    seen: list[str] | None = None,
) -> ThreadingHTTPServer:
    """A web server of a folder, which an S3 library takes for a bucket too.

    `cut(n)` is how many bytes the n-th answer really sends. `asked` are the ranges asked for,
    `seen` the logins that were sent.
    """

    class Handler(BaseHTTPRequestHandler):
        asked: list[str] = []  # noqa: RUF012 (one a server)
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self.asked.append(self.headers.get("Range", ""))
            if seen is not None:
                seen.append(self.headers.get("Authorization", ""))
            if refusing:
                self.send_response(refusing.status)
                for name, value in refusing.headers.items():
                    self.send_header(name, value)
                self.body(refusing.body)
                return
            path = root / self.path.lstrip("/")
            if not path.is_file():
                self.send_response(404)
                self.body(b"")
                return
            data = path.read_bytes()
            first = 0
            if ranges and "Range" in self.headers:
                begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
                first = int(begin)
                data = data[: int(end) + 1 if end else len(data)]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            else:
                self.send_response(200)
            self.send_header("ETag", '"content"')
            self.send_header("Last-Modified", "Mon, 30 Nov 2026 12:00:00 GMT")
            self.body(data[first:], cut(len(self.asked)))

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 (their names)

        def body(self, data: bytes, count: int | None = None) -> None:
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data if count is None else data[:count])
            if count is not None:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = Handler.asked  # type: ignore[attr-defined]
    return server
