"""Depots in S3-compatible buckets: `s3://<bucket>/<prefix>`, with the layout of every depot.

Credentials come from the environment and are never in an address. Requests that fail for the
moment are repeated by the library; a transfer that breaks goes on where it stopped. Large files
are sent in parts and appear when they are whole; what breaks off in this process is taken back.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from mmadmin.core.callbacks import Progress
from mmadmin.core.errors import InvalidInput, MmError, SourceUnavailable
from mmadmin.core.store import HashingWriter
from mmadmin.core.store.depot import SMALL_BYTES, damaged, other_size
from mmadmin.host.s3_refusals import first_line, is_miss, refusal, status_of

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

ATTEMPTS = 5
"""So often is a transfer begun again where it broke, beside what the library repeats."""
PAUSE_S = 0.25
LONGEST_PAUSE_S = 15
RETRIES = 5
RETRY_FOR_S = 180
SILENCE_S = 30
"""A download that is silent for so long is stalled, and begun again where it stopped."""
PART_BYTES = 16 << 20
"""Larger files are sent in parts of at least this size."""
MOST_PARTS = 9_000
"""S3 takes 10,000 parts a file."""
PARTS_AT_ONCE = 4
PART_TIMEOUT_S = 600
"""A part may take so long: four at once go over a line of 1 Mbit/s."""
READ_BYTES = 256 << 10
"""At most so much is lost when a transfer breaks."""

BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/-]*")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
REGION = "us-east-1"
"""Amazon's first, and what other services take for theirs."""
FORM = "write s3://BUCKET/PREFIX, with ?endpoint=https://…&region=… where it is not Amazon's"

FAILURES = (BaseError, FileNotFoundError, ValueError)
"""What the library raises."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What an `s3://` address says."""

    name: str
    prefix: str
    endpoint: str = ""
    """Empty: Amazon's, of the region."""
    region: str = REGION

    @property
    def label(self) -> str:
        """What a person calls it."""
        return "s3://" + "/".join(part for part in (self.name, self.prefix) if part)


def bucket_at(address: str, env: Mapping[str, str] = os.environ) -> Bucket:
    """The bucket that an address names; `InvalidInput` for any other address.

    The endpoint may come from the address or from the environment.
    """
    parts = urlsplit(address)
    if parts.username is not None or parts.password is not None:
        raise InvalidInput(
            "an address of a depot must hold no credentials",
            remedy="put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    asked = parse_qsl(parts.query, keep_blank_values=True)
    given = dict(asked)
    if unknown := sorted(given.keys() - {"endpoint", "region"}):
        raise InvalidInput(f"an s3 address has no {unknown[0]!r}", remedy=FORM)
    prefix = unquote(parts.path).strip("/")
    doubtful = len(given) != len(asked) or bool(parts.fragment) or "//" in prefix
    if doubtful or not BUCKET.fullmatch(parts.netloc) or not PREFIX.fullmatch(prefix):
        raise InvalidInput("that is no address of a bucket", remedy=FORM)
    endpoint = (given.get("endpoint") or _first(env, ENDPOINTS)).rstrip("/")
    url = urlsplit(endpoint)
    if endpoint and (url.scheme not in {"http", "https"} or not url.hostname or url.username):
        raise InvalidInput(
            "the endpoint is no http(s) address", remedy="write https://s3.example.org"
        )
    region = given.get("region") or _first(env, REGIONS) or REGION
    return Bucket(parts.netloc, prefix, endpoint, region)


def _first(env: Mapping[str, str], names: Sequence[str]) -> str:
    """The first variable that is set; one that is set to nothing is not."""
    return next((env[name] for name in names if env.get(name)), "")


class S3Depot:
    """A depot in a bucket; a `depot.WritableDepot`."""

    def __init__(
        self, bucket: Bucket, *, pause_s: float = PAUSE_S, part_bytes: int = PART_BYTES
    ) -> None:
        self.bucket = bucket
        self._pause_s = pause_s
        self._part_bytes = part_bytes
        self._reader = self._store({"timeout": "30d", "read_timeout": f"{SILENCE_S}s"})
        self._writer = self._store({"timeout": f"{PART_TIMEOUT_S}s"})

    def _store(self, timeouts: ClientConfig) -> S3Store:
        client: ClientConfig = {"connect_timeout": "10s", "user_agent": "mmadmin", **timeouts}
        config: S3Config = {"region": self.bucket.region}
        if self.bucket.endpoint:
            config["aws_endpoint_url_s3"] = self.bucket.endpoint
            client["allow_http"] = self.bucket.endpoint.startswith("http://")
        if authorities := os.environ.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = _certificates(Path(authorities))
        retry: RetryConfig = {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_FOR_S),
            "backoff": {
                "init_backoff": timedelta(seconds=self._pause_s),
                "max_backoff": timedelta(seconds=min(LONGEST_PAUSE_S, self._pause_s * 60)),
                "base": 2,
            },
        }
        try:
            return S3Store(
                self.bucket.name,
                prefix=self.bucket.prefix or None,
                config=config,
                client_options=client,
                retry_config=retry,
            )
        except FAILURES as error:
            raise InvalidInput(
                f"{self.label} cannot be used as it is configured: {first_line(error)}",
                remedy=f"look at the AWS_* variables, and {FORM}",
            ) from None

    @property
    def label(self) -> str:
        """Bucket and prefix."""
        return self.bucket.label

    # --- reading -------------------------------------------------------------------------------

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
            except _Broken as broken:
                if attempt == ATTEMPTS - 1:
                    raise SourceUnavailable(
                        f"{self.label} broke off {path} {ATTEMPTS} times: {broken}",
                        remedy="try again later: what was transferred is kept",
                    ) from None
                time.sleep(self._pause_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _fetch(self, path: str, part: Path, size: int, progress: Progress) -> str | None:
        have = part.stat().st_size if part.exists() else 0
        if have >= size:  # a part that is no part: begin again
            part.unlink(missing_ok=True)
            have = 0
        try:
            options: Any = {"range": {"offset": have}} if have else None
            answer = obstore.get(self._reader, path, options=options)
        except FAILURES as error:
            if is_miss(error):
                return None
            if status_of(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise other_size(self.label, path, size) from None
            raise self._refusal(error) from None
        if answer.meta["size"] != size:
            raise other_size(self.label, path, size)
        with HashingWriter(part, resume=bool(have)) as file:
            pieces = iter(answer.stream(min_chunk_size=READ_BYTES))
            while (piece := _next(pieces)) is not None:
                file.write(piece)
                progress(file.size, size)
        return file.sha256

    # --- writing -------------------------------------------------------------------------------

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

    def _refusal(self, error: Exception) -> MmError:
        return refusal(error, self.bucket.name, self.label, self.bucket.endpoint)


class _Broken(Exception):
    """A transfer that stopped in the middle."""


def _next(pieces: Iterator[bytes]) -> bytes | None:
    try:
        return next(pieces, None)
    except FAILURES as error:
        raise _Broken(first_line(error)) from None


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


def _certificates(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"AWS_CA_BUNDLE {path}: {error.strerror}") from None
