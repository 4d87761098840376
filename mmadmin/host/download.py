"""Downloads by expected sha256: resumable, verified, polite.

A download is known by the digest it must have, not by where it comes from. Its bytes lie in the
store's `downloads/<sha256>.part`, the list of finished segments beside it in `.state`; both outlive
the build that wanted them, and the process. Promises:

- killed at any byte, the next attempt fetches only the segments that were not finished;
- the whole file is hashed while it arrives, by a second thread that follows the written prefix;
- nothing is handed over whose size and sha256 are not as pinned; bytes with another digest are
  kept under their true one, so that correcting a pin downloads nothing;
- 401, 403, 404 and 429 are told apart and explained; the first three are never retried;
  Retry-After is honoured up to a cap; a stalled connection is replaced;
- a credential goes to the host it belongs to, never into a message.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import queue
import random
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path

import certifi
import httpx

from mmadmin.core.errors import (
    Cancelled,
    DigestMismatch,
    DiskFull,
    Gated,
    RateLimited,
    SourceMissing,
    SourceUnavailable,
    Unauthorized,
)
from mmadmin.host.policy import Policy

CHUNK = 1 << 20
HEAD_BYTES = 512
MOST_SEGMENTS = 1024
OK, PARTIAL = 200, 206
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
AGENT = "mmadmin"


@dataclass(frozen=True, slots=True)
class Remote:
    """Where the bytes can be had."""

    url: str
    label: str
    """Named in messages and logs; holds no credential."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent to the URL's own host only; a redirect elsewhere drops `Authorization`."""
    cert: str = ""
    """Path of a further CA bundle."""


class _Retry(Exception):
    """Try again after `wait_s` (None: by back-off); `why` is said in the end."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.wait_s = wait_s


class _WholeBody(Exception):
    """The source answers range requests with the whole file."""


def no_progress(_done: int, _total: int) -> None:
    """Progress that nobody wants."""


def no_log(_line: str) -> None:
    """Log lines that nobody wants."""


def never() -> bool:
    """Not cancelled."""
    return False


def tls(cert: str = "") -> ssl.SSLContext:
    """Trust the system's and certifi's authorities, and `cert` if given."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    if cert:
        context.load_verify_locations(cert)
    return context


def client(cert: str = "", *, stall_s: float = 60.0) -> httpx.Client:
    """An HTTP client as all our downloads use it."""
    return httpx.Client(
        verify=tls(cert),
        follow_redirects=True,
        timeout=httpx.Timeout(30.0, read=stall_s),
        headers={"User-Agent": AGENT, "Accept-Encoding": "identity"},
    )


def describe(head: bytes) -> str:
    """In words what a file that starts like this really is, or "" when nothing is wrong."""
    start = head.lstrip()[:HEAD_BYTES].lower()
    if head.startswith(LFS_POINTER):
        return "a Git-LFS pointer, not the file itself"
    if start.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "a web page, not the file"
    return ""


def refusal(status: int, label: str, reason: str = "") -> SourceUnavailable:
    """The error for an HTTP status that no retry mends."""
    said = f" ({reason})" if reason else ""
    if status == httpx.codes.UNAUTHORIZED:
        return Unauthorized(
            f"{label}: the source answers 401, it wants a login{said}",
            remedy="give a token that may read it (HF_TOKEN), or check the name",
            status=status,
        )
    if status == httpx.codes.FORBIDDEN:
        return Gated(
            f"{label}: the source answers 403, access is not granted{said}",
            remedy="accept its licence on its page with the account that the token belongs to",
            status=status,
        )
    if status in (httpx.codes.NOT_FOUND, httpx.codes.GONE):
        return SourceMissing(
            f"{label}: the source answers {status}, it does not exist there{said}",
            remedy="check repository, revision and file name; it may have been renamed or removed",
            status=status,
        )
    return SourceUnavailable(
        f"{label}: the source answers {status}{said}", remedy="try again later", status=status
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for (number or HTTP date), or None."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    if value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def check_status(response: httpx.Response, label: str, wait_cap_s: float) -> None:
    """Raise what a bad status means: a refusal for good, or `_Retry`."""
    status = response.status_code
    if status in (OK, PARTIAL):
        return
    wait = retry_after(response.headers)
    if status == httpx.codes.TOO_MANY_REQUESTS and (wait or 0) > wait_cap_s:
        raise RateLimited(
            f"{label}: the source asks to wait {wait:.0f} s (429)",
            remedy="try again later, or give a token with a higher limit",
            status=status,
            retry_after_s=int(wait or 0),
        )
    if status in (408, 425, 429) or status >= httpx.codes.INTERNAL_SERVER_ERROR:
        if wait is not None:
            wait = min(wait, wait_cap_s) * random.uniform(1.0, 1.1)  # noqa: S311 (jitter)
        raise _Retry(f"the source answers {status}", wait)
    raise refusal(status, label, response.headers.get("x-error-message", ""))


def wait_for(seconds: float, cancelled: Callable[[], bool], label: str) -> None:
    """Sleep, but notice a cancellation within a fifth of a second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if cancelled():
            raise Cancelled(f"download of {label} was cancelled")
        time.sleep(min(0.2, max(0.0, end - time.monotonic())))


@contextmanager
def _locked(
    path: Path, label: str, cancelled: Callable[[], bool], log: Callable[[str], None]
) -> Iterator[None]:
    """One transfer of one digest at a time on this host; the others wait for its bytes."""
    told = False
    while True:
        with path.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and path.stat().st_ino == os.fstat(handle.fileno()).st_ino:
                    try:
                        yield
                    finally:
                        path.unlink(missing_ok=True)
                    return
            except BlockingIOError:
                if not told:
                    log(f"waiting for another download of {label}")
                    told = True
        wait_for(0.1, cancelled, label)


class _Part:
    """The bytes so far and which segments of them are finished."""

    def __init__(self, folder: Path, sha256: str, size: int, segment_bytes: int) -> None:
        self.path = folder / f"{sha256}.part"
        self.state = folder / f"{sha256}.state"
        self.size = size
        self.segment = segment_bytes
        self.etag = ""
        self.done: set[int] = set()
        self._changed = threading.Condition()
        self._load()
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if size:
                os.posix_fallocate(self.fd, 0, size)
            os.ftruncate(self.fd, size)
        except OSError as error:
            os.close(self.fd)
            raise disk_error(error, folder, size) from error

    @property
    def count(self) -> int:
        return -(-self.size // self.segment)

    def span(self, index: int) -> tuple[int, int]:
        """Start and end (exclusive) of a segment, bytes."""
        start = index * self.segment
        return start, min(self.size, start + self.segment)

    def missing(self) -> list[int]:
        return [index for index in range(self.count) if index not in self.done]

    def prefix(self) -> int:
        """Bytes from the start that are finished without a gap."""
        index = 0
        while index in self.done:
            index += 1
        return min(self.size, index * self.segment)

    def finish(self, index: int) -> None:
        """A segment is on the disk: say so durably."""
        os.fdatasync(self.fd)
        with self._changed:
            self.done.add(index)
            self._save()
            self._changed.notify_all()

    def forget(self, etag: str) -> None:
        """Start over: the source has changed, or cannot resume."""
        with self._changed:
            self.done.clear()
            self.etag = etag
            self._save()

    def note_etag(self, etag: str) -> None:
        with self._changed:
            if etag != self.etag:
                self.etag = etag
                self._save()

    def wait_beyond(self, offset: int, timeout: float) -> int:
        """Wait until more than `offset` bytes are finished from the start; how many they are."""
        with self._changed:
            self._changed.wait_for(lambda: self.prefix() > offset, timeout)
            return self.prefix()

    def _load(self) -> None:
        try:
            state = json.loads(self.state.read_text())
            same = state["size"] == self.size and self.path.stat().st_size == self.size
            if same:
                self.segment = int(state["segment"])
                self.etag = str(state["etag"])
                self.done = {int(index) for index in state["done"] if 0 <= index < self.count}
        except (OSError, ValueError, KeyError, TypeError):
            self.done = set()  # no state, or a torn one: fetch all again

    def _save(self) -> None:
        state = {
            "size": self.size,
            "segment": self.segment,
            "etag": self.etag,
            "done": sorted(self.done),
        }
        fresh = self.state.with_suffix(".state.new")
        with fresh.open("w") as handle:
            json.dump(state, handle)
            handle.flush()
            os.fsync(handle.fileno())
        fresh.replace(self.state)

    def close(self) -> None:
        os.close(self.fd)


def disk_error(error: OSError, folder: Path, need: int) -> DiskFull | OSError:
    """`DiskFull` when that is what an OSError means, else the error itself."""
    free = shutil.disk_usage(folder).free
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"disk full: need {need} bytes, have {free}",
            remedy="free space on the store's disk and retry; what is there is kept",
            need_bytes=need,
            have_bytes=free,
        )
    return error


class _Transfer:
    """One file on its way: pulls segments over several connections, hashes behind them."""

    def __init__(
        self,
        remote: Remote,
        part: _Part,
        policy: Policy,
        cancelled: Callable[[], bool],
        log: Callable[[str], None],
    ) -> None:
        self.remote, self.part, self.policy = remote, part, policy
        self.cancelled, self.log = cancelled, log
        self.stop = threading.Event()
        self.failures = 0
        self.error: BaseException | None = None
        self.got = sum(end - start for start, end in map(part.span, part.done))
        self.sockets: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.ranges = True
        self.digest = ""

    # -- reading one segment ---------------------------------------------------------------

    def _headers(self, start: int, end: int) -> dict[str, str]:
        headers = {**self.remote.headers, "Range": f"bytes={start}-{end - 1}"}
        if self.part.etag:
            headers["If-Range"] = self.part.etag
        return headers

    def _pull(self, http: httpx.Client, index: int) -> None:
        start, end = self.part.span(index)
        with self._answer(http, self._headers(start, end)) as response:
            if response.status_code == OK:
                self._check_length(response, response.headers.get("content-length"))
                if start == 0 and end == self.part.size:
                    self._receive(response, start, end)
                    self.part.finish(index)
                    return
                raise _WholeBody
            span, _, total = response.headers.get("content-range", "").rpartition("/")
            self._check_length(response, total)
            if not span.replace("bytes ", "").startswith(f"{start}-"):
                raise _Retry("the source sent another range than asked for")
            self._note_etag(response)
            self._receive(response, start, end)
        self.part.finish(index)

    def _pull_whole(self, http: httpx.Client) -> None:
        """The source cannot resume: the whole file in one go, segment by segment."""
        with self._answer(http, dict(self.remote.headers)) as response:
            self._check_length(response, response.headers.get("content-length"))
            self.part.forget("")
            self.got = 0
            stream = response.iter_raw(CHUNK)
            rest = b""
            for index in range(self.part.count):
                start, end = self.part.span(index)
                rest = self._receive(response, start, end, stream=stream, first=rest)
                self.part.finish(index)

    @contextmanager
    def _answer(self, http: httpx.Client, headers: dict[str, str]) -> Iterator[httpx.Response]:
        with http.stream("GET", self.remote.url, headers=headers) as response:
            raw = response.extensions["network_stream"].get_extra_info("socket")
            with self.lock:
                self.sockets.add(raw)
            try:
                if self.stop.is_set():
                    raise Cancelled(self.remote.label)
                if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                    self._check_length(response, response.headers.get("content-range", "/")[8:])
                check_status(response, self.remote.label, self.policy.wait_cap_s)
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise _Retry("the source compressed the bytes although asked not to")
                yield response
            finally:
                with self.lock:
                    self.sockets.discard(raw)

    def _check_length(self, response: httpx.Response, total: str | None) -> None:
        """Refuse a source whose file has another length than the pin says, before the transfer."""
        html = response.headers.get("content-type", "").startswith("text/html")
        if total is None or not total.isdigit():
            if not html:
                return
        elif int(total) == self.part.size:
            return
        head = next(response.iter_raw(HEAD_BYTES), b"")
        if response.status_code == PARTIAL and not head.startswith(b"<"):
            head = head if self._starts_at_zero(response) else b""
        what = describe(head) or f"{total} bytes where the pin says {self.part.size}"
        raise DigestMismatch(
            f"{self.remote.label}: the source has {what}",
            remedy="check the source's address; if the file was replaced, update the lock",
            size=total,
            pinned_size=self.part.size,
        )

    @staticmethod
    def _starts_at_zero(response: httpx.Response) -> bool:
        return "bytes 0-" in response.headers.get("content-range", "")

    def _note_etag(self, response: httpx.Response) -> None:
        etag = response.headers.get("etag", "")
        self.part.note_etag("" if etag.startswith("W/") else etag)

    def _receive(
        self,
        response: httpx.Response,
        start: int,
        end: int,
        *,
        stream: Iterator[bytes] | None = None,
        first: bytes = b"",
    ) -> bytes:
        """Write bytes `start` to `end`; what came beyond is returned. Raises `_Retry`."""
        offset, window_at, window_bytes = start, time.monotonic(), 0
        pieces = response.iter_raw(CHUNK) if stream is None else stream
        piece = first
        try:
            while offset < end:
                piece = piece or next(pieces, b"")
                window_bytes += len(piece)
                if time.monotonic() - window_at > self.policy.stall_s:
                    self._check_pace(window_bytes)
                    window_at, window_bytes = time.monotonic(), 0
                self._check_going(piece, offset)
                use = piece[: end - offset]
                os.pwrite(self.part.fd, use, offset)
                offset += len(use)
                piece = piece[len(use) :]
                with self.lock:
                    self.got += len(use)
        except BaseException:
            with self.lock:
                self.got -= offset - start
            raise
        return piece

    def _check_going(self, piece: bytes, offset: int) -> None:
        if self.stop.is_set():
            raise Cancelled(self.remote.label)
        if not piece:
            raise _Retry(f"the source closed the connection after {offset} bytes")

    def _check_pace(self, window_bytes: int) -> None:
        if window_bytes < self.policy.stall_bytes:
            raise _Retry("the connection stalled")

    # -- the threads -----------------------------------------------------------------------

    def _work(self, http: httpx.Client, todo: queue.SimpleQueue[int]) -> None:
        """One connection: take segments until none is left."""
        while not self.stop.is_set():
            try:
                index = todo.get_nowait()
            except queue.Empty:
                return
            try:
                self._try(lambda index=index: self._pull(http, index))  # type: ignore[misc]
            except _WholeBody:
                self.ranges = False
                self.stop.set()
            except BaseException as error:  # noqa: BLE001 (carried to the calling thread)
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.stop.is_set() and isinstance(error, Cancelled):
            return  # a thread that ends because another one has already failed
        with self.lock:
            if self.error is None:
                self.error = error
        self.stop.set()

    def _try(self, pull: Callable[[], None]) -> None:
        """Repeat one pull until it works, or the patience for the whole file is used up."""
        while True:
            try:
                pull()
            except (_Retry, httpx.TransportError, httpx.StreamError) as error:
                self._again(error)
            except (httpx.RequestError, httpx.InvalidURL) as error:  # redirects without an end
                raise SourceUnavailable(
                    f"{self.remote.label}: {type(error).__name__}",
                    remedy="check the source's address",
                ) from error
            except OSError as error:
                raise disk_error(error, self.part.path.parent, self.part.size) from error
            else:
                self.failures = 0
                return

    def _again(self, error: Exception) -> None:
        why = error.why if isinstance(error, _Retry) else f"{type(error).__name__}: {error}"
        self.failures += 1
        if self.stop.is_set():
            raise Cancelled(self.remote.label)
        if self.failures >= self.policy.attempts:
            raise SourceUnavailable(
                f"{self.remote.label}: gave up after {self.failures} attempts: {why}",
                remedy="check the network and retry; what has arrived is kept",
            ) from error
        wait = error.wait_s if isinstance(error, _Retry) else None
        if wait is None:
            wait = self.policy.backoff_s * 2 ** (self.failures - 1) * random.uniform(0.5, 1.5)  # noqa: S311
        self.log(f"{self.remote.label}: {why}; trying again in {wait:.1f} s")
        wait_for(wait, lambda: self.stop.is_set() or self.cancelled(), self.remote.label)

    def _hash(self) -> None:
        """Follow the finished prefix and hash it; the bytes are still in the page cache."""
        digest, offset = hashlib.sha256(), 0
        while offset < self.part.size and not self.stop.is_set():
            ready = self.part.wait_beyond(offset, 0.2)
            while offset < ready:
                piece = os.pread(self.part.fd, min(CHUNK, ready - offset), offset)
                digest.update(piece)
                offset += len(piece)
        if offset == self.part.size:
            self.digest = digest.hexdigest()

    def run(self, progress: Callable[[int, int], None]) -> str:
        """Fetch what is missing; the sha256 of the whole file."""
        with client(self.remote.cert, stall_s=self.policy.stall_s) as http:
            self._run_threads(http, progress)
            if not self.ranges and self.error is None:
                self.log(f"{self.remote.label}: the source cannot resume; fetching it in one go")
                self.stop.clear()
                self._run_threads(http, progress, whole=True)
        if self.error is not None:
            raise self.error
        return self.digest

    def _run_threads(
        self, http: httpx.Client, progress: Callable[[int, int], None], *, whole: bool = False
    ) -> None:
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in self.part.missing():
            todo.put(index)
        workers = [
            threading.Thread(target=self._work, args=(http, todo), daemon=True)
            for _ in range(min(self.policy.connections, todo.qsize()))
        ]
        if whole:
            self.part.forget("")
            workers = [threading.Thread(target=self._work_whole, args=(http,), daemon=True)]
        threads = [*workers, threading.Thread(target=self._hash, daemon=True)]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) and not self.stop.is_set():
                if self.cancelled():
                    self._fail(Cancelled(f"download of {self.remote.label} was cancelled"))
                progress(self.got, self.part.size)
                threads[-1].join(0.1)
        finally:
            if any(thread.is_alive() for thread in threads):
                self.stop.set()
                self._hang_up()
            for thread in threads:
                thread.join(10)
        progress(self.got, self.part.size)

    def _work_whole(self, http: httpx.Client) -> None:
        try:
            self._try(lambda: self._pull_whole(http))
        except BaseException as error:  # noqa: BLE001 (carried to the calling thread)
            self._fail(error)

    def _hang_up(self) -> None:
        """Wake the threads that sit in a read."""
        with self.lock:
            for raw in self.sockets:
                with suppress(OSError):
                    raw.shutdown(socket.SHUT_RDWR)


def download(
    remote: Remote,
    to: Path,
    sha256: str,
    size: int,
    *,
    folder: Path,
    policy: Policy | None = None,
    progress: Callable[[int, int], None] = no_progress,
    cancelled: Callable[[], bool] = never,
    log: Callable[[str], None] = no_log,
    already: Callable[[], bool] = never,
) -> None:
    """Have the bytes with this digest at `to` (moved there, never copied, on one file system).

    `folder` is the store's `downloads/`. `already` is asked once it is our turn: True when another
    transfer has brought the bytes meanwhile and `to` is there. Blocking; may be killed and called
    again at any time.
    Raises `DigestMismatch`, `SourceUnavailable` and its kinds, `DiskFull`, `Cancelled`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{sha256}.lock", remote.label, cancelled, log):
        if already():
            return
        part = _Part(folder, sha256, size, _segment_bytes(policy or Policy(), size))
        try:
            transfer = _Transfer(remote, part, policy or Policy(), cancelled, log)
            if part.done:
                log(f"{remote.label}: {transfer.got} of {size} bytes are here already")
            found = transfer.run(progress)
            if found != sha256:
                _keep_as(part, found, folder)
                _refuse(remote, part, sha256, found, folder)
            os.fsync(part.fd)
        finally:
            part.close()
        move(part.path, to)
        part.state.unlink(missing_ok=True)


def _segment_bytes(policy: Policy, size: int) -> int:
    """The policy's, or more for a huge file: each segment is a request, and hubs count those."""
    return max(policy.segment_bytes, -(-size // MOST_SEGMENTS))


def _keep_as(part: _Part, found: str, folder: Path) -> None:
    """Keep mismatching bytes under their true digest: a corrected pin then needs no transfer."""
    part.path.replace(folder / f"{found}.part")
    part.state.replace(folder / f"{found}.state")


def _refuse(remote: Remote, part: _Part, sha256: str, found: str, folder: Path) -> None:
    head = os.pread(part.fd, HEAD_BYTES, 0)
    what = describe(head) or f"sha256 {found}"
    raise DigestMismatch(
        f"{remote.label}: the source has {what}; the pin says sha256 {sha256}",
        remedy="if the source was replaced on purpose, update the lock; its bytes are kept",
        expected=sha256,
        actual=found,
        path=str(folder / f"{found}.part"),
    )


def move(source: Path, to: Path) -> None:
    """Rename, or copy and remove where `to` lies on another file system."""
    try:
        source.replace(to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, to)
        source.unlink()


def copy_hashed(
    source: Path,
    to: Path,
    *,
    progress: Callable[[int, int], None] = no_progress,
    cancelled: Callable[[], bool] = never,
) -> str:
    """Copy a local file in one pass, hashing in a second thread; its sha256.

    Raises `SourceMissing`, `DiskFull`, `Cancelled`.
    """
    pieces: queue.Queue[bytes] = queue.Queue(maxsize=8)
    digest = hashlib.sha256()

    def consume() -> None:
        while piece := pieces.get():
            digest.update(piece)

    try:
        total = source.stat().st_size
        reader = source.open("rb")
    except OSError as error:
        raise SourceMissing(
            f"{source}: {error.strerror}", remedy="check the path and its permissions"
        ) from error
    hasher = threading.Thread(target=consume, daemon=True)
    hasher.start()
    done = 0
    try:
        with reader, to.open("wb") as writer:
            while piece := reader.read(4 * CHUNK):
                if cancelled():
                    raise Cancelled(f"copying {source.name} was cancelled")
                pieces.put(piece)
                writer.write(piece)
                done += len(piece)
                progress(done, total)
    except OSError as error:
        raise disk_error(error, to.parent, total) from error
    finally:
        pieces.put(b"")
        hasher.join()
    return digest.hexdigest()
