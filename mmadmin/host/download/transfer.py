"""One file on its way: segments over several connections, the hash behind them."""

from __future__ import annotations

import hashlib
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx2

from mmadmin.core.errors import Cancelled, DigestMismatch, SourceUnavailable
from mmadmin.core.store.disk import disk_full
from mmadmin.host.download.answers import (
    HEAD_BYTES,
    OK,
    PARTIAL,
    Remote,
    Retry,
    check_status,
    client,
    describe,
    wait_for,
)
from mmadmin.host.download.part import Part
from mmadmin.host.network import host_of, why_silent
from mmadmin.host.policy import Policy

CHUNK = 1 << 20


class WholeBody(Exception):
    """The source answers range requests with the whole file."""


class Transfer:
    """One file on its way: pulls segments over several connections, hashes behind them."""

    def __init__(
        self,
        remote: Remote,
        part: Part,
        policy: Policy,
        cancelled: Callable[[], bool],
        log: Callable[[str], None],
    ) -> None:
        self.remote, self.part, self.policy = remote, part, policy
        self.cancelled, self.log = cancelled, log
        self.stop = threading.Event()
        self.failures = 0
        """Rounds of failures in a row: connections that fail together count once."""
        self.resume_at = 0.0
        """No request is begun before (`time.monotonic`)."""
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

    def _pull(self, http: httpx2.Client, index: int) -> None:
        start, end = self.part.span(index)
        with self._answer(http, self._headers(start, end)) as response:
            if response.status_code == OK:
                self._check_length(response, response.headers.get("content-length"))
                if start == 0 and end == self.part.size:
                    self._receive(response, start, end)
                    self.part.finish(index)
                    return
                raise WholeBody
            span, _, total = response.headers.get("content-range", "").rpartition("/")
            self._check_length(response, total)
            if not span.replace("bytes ", "").startswith(f"{start}-"):
                raise Retry("the source sent another range than asked for")
            self._note_etag(response)
            self._receive(response, start, end)
        self.part.finish(index)

    def _pull_whole(self, http: httpx2.Client) -> None:
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
    def _answer(self, http: httpx2.Client, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        with http.stream("GET", self.remote.url, headers=headers) as response:
            raw = response.extensions["network_stream"].get_extra_info("socket")
            with self.lock:
                self.sockets.add(raw)
            try:
                if self.stop.is_set():
                    raise Cancelled(self.remote.label)
                if response.status_code == httpx2.codes.RANGE_NOT_SATISFIABLE:
                    self._check_length(response, response.headers.get("content-range", "/")[8:])
                check_status(response, self.remote.label, self.policy.wait_cap_s)
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise Retry("the source compressed the bytes although asked not to")
                yield response
            finally:
                with self.lock:
                    self.sockets.discard(raw)

    def _check_length(self, response: httpx2.Response, total: str | None) -> None:
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
    def _starts_at_zero(response: httpx2.Response) -> bool:
        return "bytes 0-" in response.headers.get("content-range", "")

    def _note_etag(self, response: httpx2.Response) -> None:
        etag = response.headers.get("etag", "")
        self.part.note_etag("" if etag.startswith("W/") else etag)

    def _receive(
        self,
        response: httpx2.Response,
        start: int,
        end: int,
        *,
        stream: Iterator[bytes] | None = None,
        first: bytes = b"",
    ) -> bytes:
        """Write bytes `start` to `end`; what came beyond is returned. Raises `Retry`."""
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
            raise Retry(f"the source closed the connection after {offset} bytes")

    def _check_pace(self, window_bytes: int) -> None:
        if window_bytes < self.policy.stall_bytes:
            raise Retry("the connection stalled")

    # -- the threads -----------------------------------------------------------------------

    def _work(self, http: httpx2.Client, todo: queue.SimpleQueue[int]) -> None:
        """One connection: take segments until none is left."""
        while not self.stop.is_set():
            try:
                index = todo.get_nowait()
            except queue.Empty:
                return
            try:
                self._try(lambda index=index: self._pull(http, index))  # type: ignore[misc]
            except WholeBody:
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
            self._pause()
            began_at = time.monotonic()
            try:
                pull()
            except (Retry, httpx2.TransportError, httpx2.StreamError) as error:
                self._after_failure(error, began_at)
            except (httpx2.RequestError, httpx2.InvalidURL) as error:  # redirects without an end
                raise SourceUnavailable(
                    f"{self.remote.label}: {type(error).__name__}",
                    remedy="check the source's address",
                ) from error
            except OSError as error:
                raise (
                    disk_full(error, doing=f"downloading {self.remote.label}") or error
                ) from error
            else:
                self.failures = 0
                return

    def _pause(self) -> None:
        """Wait until requests may be begun again; another connection may prolong it."""
        while (rest_s := self.resume_at - time.monotonic()) > 0:
            wait_for(rest_s, lambda: self.stop.is_set() or self.cancelled(), self.remote.label)

    def _after_failure(self, error: Exception, began_at: float) -> None:
        """Set the next pause, for all connections; raises when there were too many rounds.

        A request that was begun before the last failure belongs to that failure's round: four
        connections that meet a busy source use up one attempt, not four.
        """
        why = error.why if isinstance(error, Retry) else f"{type(error).__name__}: {error}"
        silence = why_silent(error, host_of(self.remote.url))
        if silence and silence.final:
            raise SourceUnavailable(
                f"{self.remote.label}: {silence.message}", remedy=silence.remedy
            ) from error
        asked_s = error.wait_s if isinstance(error, Retry) else None
        if self.stop.is_set():
            raise Cancelled(self.remote.label)
        with self.lock:
            now = time.monotonic()
            if began_at < self.resume_at:
                self.resume_at = max(self.resume_at, now + (asked_s or 0))
                return
            self.failures += 1
            failures = self.failures
            wait_s = asked_s
            if wait_s is None:
                wait_s = self.policy.backoff_s * 2 ** (failures - 1) * random.uniform(0.5, 1.5)  # noqa: S311
            self.resume_at = now + wait_s
        if failures >= self.policy.attempts:
            raise SourceUnavailable(
                f"{self.remote.label}: gave up after {self.policy.attempts} attempts: {why}",
                remedy="check the network and retry; what has arrived is kept",
            ) from error
        self.log(f"{self.remote.label}: {why}; trying again in {wait_s:.1f} s")

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
        reach, stall_s = self.remote.reach, self.policy.stall_s
        with client(self.remote.cert, stall_s=stall_s, reach=reach) as http:
            self._run_threads(http, progress)
            if not self.ranges and self.error is None:
                self.log(f"{self.remote.label}: the source cannot resume; fetching it in one go")
                self.stop.clear()
                self._run_threads(http, progress, whole=True)
        if self.error is not None:
            raise self.error
        return self.digest

    def _run_threads(
        self, http: httpx2.Client, progress: Callable[[int, int], None], *, whole: bool = False
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

    def _work_whole(self, http: httpx2.Client) -> None:
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
