"""Serving this host's store to others over HTTP, read-only, with the layout of a binary cache."""

from __future__ import annotations

import os
import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from mmadmin.core.canonical import canonical
from mmadmin.core.errors import MmError
from mmadmin.core.store import Store
from mmadmin.core.store.attestations import SigningKey
from mmadmin.core.store.push import attestation_of

ATTESTATION = re.compile(r"/realisations/([0-9a-f]{64})\.json")
RECORD = re.compile(r"/objects/([0-9a-f]{64}-[A-Za-z0-9_][A-Za-z0-9._+=-]{0,127})\.json")
BLOB = re.compile(r"/blobs/sha256/([0-9a-f]{2})/(\1[0-9a-f]{62})")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


def serve(
    store_root: Path, address: tuple[str, int], *, signer: SigningKey | None = None
) -> ThreadingHTTPServer:
    """A server of a store, to be run with `serve_forever`; read-only, only the cache's layout.

    Attestations are signed on request; without a `signer` there are none.
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
        """Keep quiet: a cache's log would be as long as its transfers are many."""

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
        if (found := ATTESTATION.fullmatch(path)) and self.key:
            record = store.realisation(found[1])
            return self.key.sign(attestation_of(store, record)).as_bytes() if record else None
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
