"""Depots on the network: finding them, pulling over HTTP, serving this host's store read-only.

A depot's layout is static (`mmadmin.core.store.depot`): what `mm store push` puts into a folder can
be served by any web server. Transfers go on where they stopped (Range).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

import httpx2

from mmadmin.core.callbacks import Progress, Report, silent
from mmadmin.core.canonical import canonical
from mmadmin.core.errors import (
    Gated,
    InvalidInput,
    MmError,
    RateLimited,
    SourceUnavailable,
    Unauthorized,
)
from mmadmin.core.home import Home
from mmadmin.core.store import HashingWriter, Store
from mmadmin.core.store.claims import SigningKey, Trust
from mmadmin.core.store.depot import (
    SMALL_BYTES,
    Depot,
    Folder,
    WritableDepot,
    other_size,
)
from mmadmin.core.store.push import claim_of
from mmadmin.core.store.substitute import Substituter, trust_from_json

T = TypeVar("T")

TIMEOUT = httpx2.Timeout(10, read=30)
"""Seconds; a transfer that is silent for `read` is stalled and begun again where it stopped."""
ATTEMPTS = 5
PAUSE_S = 0.5
LONGEST_WAIT_S = 60


class Interrupted(SourceUnavailable):
    """A transfer that stopped in the middle; the part stays and is gone on with."""


class HttpDepot:
    """A depot behind HTTP(S)."""

    def __init__(self, url: str, *, token: str = "", pause_s: float = PAUSE_S) -> None:
        self.url = url.rstrip("/")
        self._pause_s = pause_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx2.Client(timeout=TIMEOUT, headers=headers, follow_redirects=True)

    @property
    def label(self) -> str:
        """Its address."""
        return self.url

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def read(self, path: str) -> bytes | None:
        """A small file; None when it is not there."""

        def once() -> bytes | None:
            with self._client.stream("GET", f"{self.url}/{path}") as answer:
                if answer.status_code == HTTPStatus.NOT_FOUND:
                    return None
                self._check(answer)
                data = b""
                for piece in answer.iter_bytes():
                    data += piece
                    if len(data) > SMALL_BYTES:
                        raise SourceUnavailable(f"{self.url}/{path} is larger than any record")
                return data

        return self._again(once)

    def fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        """Complete `part` by asking for the rest of it; its sha256, None when it is not there."""
        return self._again(lambda: self._fetch(path, part, size, progress))

    def _fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        have = part.stat().st_size if part.exists() else 0
        if have >= size:  # a part that is no part: begin again
            part.unlink(missing_ok=True)
            have = 0
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        with self._client.stream("GET", f"{self.url}/{path}", headers=headers) as answer:
            if answer.status_code == HTTPStatus.NOT_FOUND:
                return None
            self._check(answer)
            resume = answer.status_code == HTTPStatus.PARTIAL_CONTENT
            if resume and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise SourceUnavailable(f"{self.url} answered with another range than asked for")
            length = answer.headers.get("Content-Length", "")
            if length.isdigit() and int(length) != size - have * resume:
                raise other_size(self.url, path, size)
            with HashingWriter(part, resume=resume) as file:
                for piece in answer.iter_raw():
                    file.write(piece)
                    progress(file.size, size)
                    if file.size > size:
                        break
        if file.size < size:
            raise Interrupted(f"{self.url} ended {path} after {file.size} of {size} bytes")
        return file.sha256

    def _again(self, once: Callable[[], T]) -> T:
        """Try a few times; what stopped in the middle goes on there."""
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            try:
                return once()
            except RateLimited as error:
                wait = error.details["retry_after_s"]
                if last or wait > LONGEST_WAIT_S:
                    raise
                time.sleep(wait)
            except (httpx2.TransportError, Interrupted) as error:
                if last:
                    raise SourceUnavailable(
                        f"{self.url} does not answer: {error}",
                        remedy="try again later: what was transferred is kept",
                    ) from error
                time.sleep(self._pause_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _check(self, answer: httpx2.Response) -> None:
        status = answer.status_code
        if status == HTTPStatus.UNAUTHORIZED:
            raise Unauthorized(f"{self.url} wants credentials", remedy="give the depot's token")
        if status == HTTPStatus.FORBIDDEN:
            raise Gated(f"{self.url} refuses access", remedy="ask its owner for access")
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            after = answer.headers.get("Retry-After", "")
            raise RateLimited(
                f"{self.url} asks to wait", retry_after_s=int(after) if after.isdigit() else 1
            )
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise Interrupted(f"{self.url} answered {status}")
        if status not in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
            raise SourceUnavailable(f"{self.url} answered {status}")


def depot_at(address: str, *, token: str = "") -> Depot:
    """The depot at an address: `https://…`, `http://…`, `s3://…`, or a folder."""
    scheme = urlsplit(address).scheme
    if scheme in {"http", "https"}:
        return HttpDepot(address, token=token)
    return writable_depot_at(address)


def writable_depot_at(address: str) -> WritableDepot:
    """The depot at an address that can be pushed to: `s3://…` or a folder."""
    scheme = urlsplit(address).scheme
    if scheme == "s3":
        from mmadmin.host.s3_depot import S3Depot, bucket_at  # noqa: PLC0415 (its library is large)

        return S3Depot(bucket_at(address))
    if scheme in {"", "file"}:
        return Folder(Path(unquote(urlsplit(address).path) if scheme else address))
    if scheme in {"http", "https"}:
        raise InvalidInput(
            "nothing can be pushed over http",
            remedy="push to the folder that is served there, or to an s3:// address",
        )
    raise InvalidInput(
        f"{scheme}:// is no depot", remedy="give a folder, an http(s) or an s3 address"
    )


@contextmanager
def open_depots(home: Home, instead: str = "") -> Iterator[tuple[list[Depot], Trust]]:
    """The depots and the trust of `MM_HOME/substituters.json`; none without the file.

    `instead` is the address of a depot to use in place of the configured ones.
    """
    addresses: list[str] = []
    trust = Trust({})
    path = home.root / "substituters.json"
    if path.exists():
        addresses, trust = trust_from_json(path.read_text(encoding="utf-8"))
    with ExitStack() as stack:
        depots = [depot_at(address) for address in ([instead] if instead else addresses)]
        for depot in depots:
            if isinstance(depot, HttpDepot):
                stack.callback(depot.close)
        yield depots, trust


@contextmanager
def open_substituter(
    home: Home, store: Store, *, progress: Progress = silent, report: Report = silent
) -> Iterator[Substituter | None]:
    """What a build asks before it builds; None where no depot is configured."""
    with open_depots(home) as (depots, trust):
        yield Substituter(store, depots, trust, progress, report) if depots else None


# --- serving -----------------------------------------------------------------------------------

CLAIM = re.compile(r"/realisations/([0-9a-f]{64})\.json")
RECORD = re.compile(r"/objects/([0-9a-f]{64}-[A-Za-z0-9_][A-Za-z0-9._+=-]{0,127})\.json")
BLOB = re.compile(r"/blobs/sha256/([0-9a-f]{2})/(\1[0-9a-f]{62})")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


def serve(
    store_root: Path, address: tuple[str, int], *, signer: SigningKey | None = None
) -> ThreadingHTTPServer:
    """A server of a store, to be run with `serve_forever`; read-only, only the depot's layout.

    Claims are signed as they are asked for; without a `signer` there are none.
    """

    class Bound(_Handler):
        root = store_root
        key = signer

    return ThreadingHTTPServer(address, Bound)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "mmadmin"
    sys_version = ""
    timeout = 60
    root: Path
    key: SigningKey | None = None

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """Answer."""
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name)
        """Keep quiet: a depot's log would be as long as its transfers are many."""

    def _answer(self, *, body: bool) -> None:
        path = urlsplit(self.path).path
        store = Store(self.root)
        try:
            if found := BLOB.fullmatch(path):
                self._send_blob(store, found[2], body=body)
                return
            data = self._small(store, path)
        except MmError:  # damaged here: as good as absent for others
            data = None
        finally:
            store.close()
        if data is None:
            self._send(HTTPStatus.NOT_FOUND, b"not here\n", body=body)
        else:
            self._send(HTTPStatus.OK, data, body=body)

    def _small(self, store: Store, path: str) -> bytes | None:
        if (found := CLAIM.fullmatch(path)) and self.key:
            record = store.realisation(found[1])
            return self.key.sign(claim_of(store, record)).as_bytes() if record else None
        if found := RECORD.fullmatch(path):
            known = store.object(found[1])
            return canonical(store.record_of(known)) if known else None
        return None

    def _send(self, status: HTTPStatus, data: bytes, *, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _send_blob(self, store: Store, sha256: str, *, body: bool) -> None:
        for executable in (False, True):
            try:
                file = store.blob_path(sha256, executable=executable).open("rb")
            except FileNotFoundError:
                continue
            with file:
                self._send_file(file, sha256, body=body)
            return
        self._send(HTTPStatus.NOT_FOUND, b"not here\n", body=body)

    def _send_file(self, file: BinaryIO, sha256: str, *, body: bool) -> None:
        size = os.fstat(file.fileno()).st_size
        first, last, status = 0, size - 1, HTTPStatus.OK
        if found := RANGE.fullmatch(self.headers.get("Range", "")):
            first = int(found[1])
            last = min(int(found[2]), size - 1) if found[2] else size - 1
            if first >= size or last < first:
                self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status = HTTPStatus.PARTIAL_CONTENT
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{sha256}"')
        self.send_header("Content-Length", str(last - first + 1))
        if status == HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if body and size:
            self.connection.sendfile(file, first, last - first + 1)
