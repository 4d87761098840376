"""Binary caches on the network: behind any static web server, or in a bucket.

Both are reached through obstore, which repeats requests that fail for the moment, with growing
pauses; a broken transfer resumes where it stopped. Large files are sent to a bucket in parts
and appear when they are whole; what breaks off in this process is taken back. A folder is not
reached through obstore: see `core.store.binary_cache.FolderCache`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, NotSupportedError
from obstore.store import HTTPStore

from mmadmin.core.callbacks import Progress, Report, silent
from mmadmin.core.errors import InvalidInput, MmError, SourceUnavailable
from mmadmin.core.home import Home
from mmadmin.core.store import HashingWriter, Store
from mmadmin.core.store.attestations import Trust
from mmadmin.core.store.binary_cache import (
    SMALL_BYTES,
    BinaryCache,
    FolderCache,
    WritableBinaryCache,
    damaged,
    other_size,
)
from mmadmin.core.store.substitute import Substituter, substituters_from_json
from mmadmin.host.bucket import FORM, Bucket, bucket_at
from mmadmin.host.cache_refusals import (
    bucket_refusal,
    first_line,
    is_miss,
    starts_beyond_end,
    status_of,
    web_refusal,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

ATTEMPTS = 5
"""How often a transfer resumes where it broke, besides what the library repeats."""
PAUSE_S = 0.25
LONGEST_PAUSE_S = 15
RETRIES = 5
RETRY_FOR_S = 180
SILENCE_S = 30
"""A download that is silent for this long is stalled; it resumes where it stopped."""
PART_BYTES = 16 << 20
"""Larger files are sent in parts of at least this size."""
MOST_PARTS = 9_000
"""S3 takes 10,000 parts a file."""
PARTS_AT_ONCE = 4
PART_TIMEOUT_S = 600
"""For one part: four at once then fit a line of 1 Mbit/s."""
READ_BYTES = 256 << 10
"""What is lost at most when a transfer breaks."""
CLIENT: ClientConfig = {"connect_timeout": "10s", "user_agent": "mmadmin"}
READING: ClientConfig = {**CLIENT, "timeout": "30d", "read_timeout": f"{SILENCE_S}s"}
WRITING: ClientConfig = {**CLIENT, "timeout": f"{PART_TIMEOUT_S}s"}

FAILURES = (BaseError, FileNotFoundError, ValueError)
"""What the library raises."""


class RemoteCache:
    """A binary cache to pull from; a `binary_cache.BinaryCache`."""

    def __init__(
        self,
        label: str,
        reader: ObjectStore,
        refusal: Callable[[Exception], MmError],
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.label = label
        self._reader = reader
        self._refusal = refusal
        self._pause_s = pause_s

    def read(self, path: str) -> bytes | None:
        """A small file; None when it is not there."""
        try:
            answer = obstore.get(self._reader, path)
            data = answer.bytes() if answer.meta["size"] <= SMALL_BYTES else None
        except FAILURES as error:
            if is_miss(error):
                return None
            raise self._refusal(error) from None
        if data is None:
            raise SourceUnavailable(f"{self.label}/{path} is larger than any record")
        return bytes(data)

    def fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        """Complete `part` by asking for the rest of it; its sha256, None when it is not there."""
        for attempt in range(ATTEMPTS):
            try:
                return self._fetch(path, part, size, progress)
            except _Interrupted as interrupted:
                if attempt == ATTEMPTS - 1:
                    raise SourceUnavailable(
                        f"{self.label} broke off {path} {ATTEMPTS} times: {interrupted}",
                        remedy="try again later: what was transferred is kept",
                    ) from None
                time.sleep(self._pause_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        have = part.stat().st_size if part.exists() else 0
        if have >= size:  # not a part of it: begin again
            have = 0
        try:
            answer = self._get_from(path, have)
        except NotSupportedError:  # a server without Range: the whole file again
            have = 0
            answer = self._get_from(path, have)
        if answer is None:
            return None
        if answer.meta["size"] != size:
            raise other_size(self.label, path, size)
        with HashingWriter(part, resume=bool(have)) as file:
            pieces = iter(answer.stream(min_chunk_size=READ_BYTES))
            while (piece := _next(pieces)) is not None:
                file.write(piece)
                progress(file.size, size)
        return file.sha256

    def _get_from(self, path: str, offset: int) -> Any | None:
        """The answer of a request for a file from an offset on; None when it is not there."""
        try:
            options: Any = {"range": {"offset": offset}} if offset else None
            return obstore.get(self._reader, path, options=options)
        except NotSupportedError:
            raise
        except FAILURES as error:
            if is_miss(error):
                return None
            if starts_beyond_end(error):
                raise other_size(self.label, path, offset) from None
            raise self._refusal(error) from None


class BucketCache(RemoteCache):
    """A binary cache in a bucket; a `binary_cache.WritableBinaryCache`."""

    def __init__(
        self, bucket: Bucket, *, pause_s: float = PAUSE_S, part_bytes: int = PART_BYTES
    ) -> None:
        self.bucket = bucket
        self._part_bytes = part_bytes
        authorities = _authorities("AWS_CA_BUNDLE")
        retry = _retries(pause_s)
        try:
            reader = bucket.open({**READING, **authorities}, retry)
            self._writer = bucket.open({**WRITING, **authorities}, retry)
        except FAILURES as error:
            raise InvalidInput(
                f"{bucket.label} cannot be used as it is configured: {first_line(error)}",
                remedy=f"check the AWS_* variables, and {FORM}",
            ) from None
        super().__init__(
            bucket.label,
            reader,
            lambda error: bucket_refusal(error, bucket.name, bucket.label, bucket.endpoint),
            pause_s=pause_s,
        )

    def has(self, path: str, size: int) -> bool:
        """True when a file of that size is there."""
        try:
            return obstore.head(self._reader, path)["size"] == size
        except FileNotFoundError:
            return False
        except FAILURES as error:
            raise self._refusal(self._explained(error, path)) from None

    def _explained(self, error: Exception, path: str) -> Exception:
        """The error of a GET in place of that of a HEAD, whose answer has no body that says why."""
        if status_of(error) in {HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN}:
            try:
                obstore.get(self._reader, path, options={"range": (0, 1)})
            except FAILURES as fuller:
                if not isinstance(fuller, FileNotFoundError):
                    return fuller
        return error

    def write(self, path: str, data: bytes) -> None:
        """Put a small file there: a bucket shows it whole or not at all."""
        self._put(path, data)

    def put(self, path: str, source: Path, sha256: str, progress: Progress) -> None:
        """Put a large file there; it appears when it is whole, and only if it has that digest."""
        size = source.stat().st_size
        if size <= self._part_bytes:
            data = source.read_bytes()
            if hashlib.sha256(data).hexdigest() != sha256:
                raise damaged(source)
            self._put(path, data)
            progress(size, size)
            return
        part = max(self._part_bytes, -(-size // MOST_PARTS))
        self._put(path, _pieces(source, size, sha256, progress), part)

    def _put(self, path: str, data: bytes | Iterator[bytes], part: int = PART_BYTES) -> None:
        try:
            obstore.put(
                self._writer,
                path,
                data,
                use_multipart=not isinstance(data, bytes),
                chunk_size=part,
                max_concurrency=PARTS_AT_ONCE,
            )
        except FAILURES as error:
            if isinstance(error, OSError) and not status_of(error):
                raise  # the file that was to be sent cannot be read
            raise self._refusal(error) from None


class _Interrupted(Exception):
    """A transfer that stopped in the middle."""


def _next(pieces: Iterator[bytes]) -> bytes | None:
    try:
        return next(pieces, None)
    except FAILURES as error:
        raise _Interrupted(first_line(error)) from None


def _pieces(source: Path, size: int, sha256: str, progress: Progress) -> Iterator[bytes]:
    """A file in pieces; raises after the last, so that a damaged file never appears."""
    digest = hashlib.sha256()
    done = 0
    with source.open("rb", buffering=0) as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
            done += len(piece)
            yield piece
            progress(done, size)
    if digest.hexdigest() != sha256:
        raise damaged(source)


def _retries(pause_s: float) -> RetryConfig:
    return {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_FOR_S),
        "backoff": {
            "init_backoff": timedelta(seconds=pause_s),
            "max_backoff": timedelta(seconds=min(LONGEST_PAUSE_S, pause_s * 60)),
            "base": 2,
        },
    }


def _authorities(variable: str) -> ClientConfig:
    """Further authorities to trust, from the file that an environment variable names."""
    path = os.environ.get(variable, "")
    try:
        return {"root_certificate": Path(path).read_bytes()} if path else {}
    except OSError as error:
        raise InvalidInput(f"{variable} {path}: {error.strerror}") from None


def web_cache(address: str, *, pause_s: float = PAUSE_S) -> RemoteCache:
    """The cache behind an `http://` or `https://` address.

    A login in the address is sent to that host only and appears in no message; a redirect from
    https to http is refused.
    """
    from mmadmin.host.index import without_login

    url, headers = without_login(address.rstrip("/"))
    client: ClientConfig = {
        **READING,
        **_authorities("SSL_CERT_FILE"),
        "allow_http": url.startswith("http://"),
        "default_headers": headers,
    }
    try:
        store = HTTPStore(url, client_options=client, retry_config=_retries(pause_s))
    except FAILURES as error:
        raise InvalidInput(f"{url} cannot be used: {first_line(error)}") from None
    return RemoteCache(url, store, lambda error: web_refusal(error, url), pause_s=pause_s)


def cache_at(address: str) -> BinaryCache:
    """The cache at an address: `https://…`, `http://…`, `s3://…`, or a folder."""
    if urlsplit(address).scheme in {"http", "https"}:
        return web_cache(address)
    return writable_cache_at(address)


def writable_cache_at(address: str) -> WritableBinaryCache:
    """The cache at an address that can be pushed to: `s3://…` or a folder."""
    scheme = urlsplit(address).scheme
    if scheme == "s3":
        return BucketCache(bucket_at(address))
    if scheme in {"", "file"}:
        return FolderCache(Path(unquote(urlsplit(address).path) if scheme else address))
    if scheme in {"http", "https"}:
        raise InvalidInput(
            "nothing can be pushed over http",
            remedy="push to the folder that is served there, or to an s3:// address",
        )
    raise InvalidInput(
        f"{scheme}:// is not the address of a binary cache",
        remedy="give a folder, an http(s) or an s3 address",
    )


def configured_caches(home: Home) -> tuple[list[BinaryCache], Trust]:
    """The caches and the trust of `MM_HOME/substituters.json`; none without the file."""
    path = home.root / "substituters.json"
    if not path.exists():
        return [], Trust({})
    addresses, trust = substituters_from_json(path.read_text(encoding="utf-8"))
    return [cache_at(address) for address in addresses], trust


def configured_substituter(
    home: Home, store: Store, *, progress: Progress = silent, report: Report = silent
) -> Substituter | None:
    """What a build asks before it builds; None where no cache is configured."""
    caches, trust = configured_caches(home)
    return Substituter(store, caches, trust, progress, report) if caches else None
