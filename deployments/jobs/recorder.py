"""What a running job reports: log lines, progress, heartbeat, and the cancel flag.

The job's own thread only appends to buffers. One thread a job writes them to the database at most
`TICK_S` late, extends the lease, and learns whether the job was cancelled or lost. Each of its
writes is fenced.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic

from django.db import DatabaseError, InterfaceError, OperationalError, connection

from deployments.broker import feed
from deployments.jobs import lease, states
from deployments.jobs.lease import J
from deployments.models import LogChunk
from mmadmin.core.errors import Cancelled, MmError
from mmadmin.core.generations.lifecycle import JobState

log = logging.getLogger(__name__)

TICK_S = 0.4
CHUNK_CHARACTERS = 64_000
"""A longer burst of lines becomes several chunks."""


class Ended(Exception):
    """The job failed, cleaned up over several attempts, and its record says of what."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("message", ""))
        self.error = error

    @property
    def state(self) -> JobState:
        """How the job ends."""
        by_code = {"cancelled": JobState.CANCELLED, "errored": JobState.ERRORED}
        return by_code.get(str(self.error.get("code")), JobState.FAILED)


class Sleeps(Exception):
    """The job rests: its worker lets go of it for a while."""


class Parent:
    """The worker that this pool process belongs to: when it is gone, so must our jobs be."""

    pid: int | None = None

    @classmethod
    def is_gone(cls) -> bool:
        """True when a worker started this process and does not run any more."""
        return cls.pid is not None and os.getppid() != cls.pid


class Recorder(Generic[J]):
    """What a job in progress reports, and what it must ask. Its methods are thread-safe."""

    def __init__(self, job: J) -> None:
        self.job: J = job
        self._lines: dict[int | None, list[str]] = {}
        self._progress: dict[int, tuple[int, int, str]] = {}
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._cancel = threading.Event()
        self._lost = threading.Event()
        self._deaf = False
        self._extended = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, name=f"recorder-{job.noun}-{job.pk}", daemon=True
        )

    # --- the job's side

    def log(self, line: str, step_id: int | None = None) -> None:
        """Add a line to the step's log, or to the job's own."""
        if not self.job.has_log:
            log.info("%s %s: %s", self.job.noun, self.job.pk, line)
            return
        with self._mutex:
            self._lines.setdefault(step_id, []).append(line)

    def progress(self, step_id: int, done: int, total: int, unit: str) -> None:
        """Say how far a step is, or (0) the whole job; only the newest is written."""
        with self._mutex:
            self._progress[step_id] = (done, total, unit)

    def cancelled(self) -> bool:
        """True once the job must end: a person cancelled it, or it is no longer ours."""
        return self._cancel.is_set() or self._lost.is_set()

    def check(self) -> None:
        """Raise `LeaseLost` or `Cancelled` when the job must end."""
        if self._lost.is_set():
            raise lease.lost(self.job)
        if self._cancel.is_set():
            raise Cancelled("cancelled by a person")

    def wait(self, seconds: float) -> None:
        """Sleep, but not past a cancel. Raises as `check` does."""
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._stop.wait(min(left, 0.1))

    def phase(self, name: str) -> None:
        """Say what the job does now."""
        lease.write(self.job, phase=name)
        feed.announce_job(self.job)

    def ignore_cancel(self) -> None:
        """From here on the job only undoes or finishes: a cancel comes too late."""
        self._deaf = True
        self._cancel.clear()

    def heed_cancel(self) -> None:
        """From here on a cancel counts again, one of meanwhile too."""
        self._deaf = False
        self._cancel_if_asked()

    @property
    def is_lost(self) -> bool:
        """True when the lease went to another worker."""
        return self._lost.is_set()

    # --- the thread's side

    def start(self) -> None:
        """Begin to write and to extend the lease."""
        self._cancel_if_asked()
        self._thread.start()

    def abandon(self) -> None:
        """Write nothing more: the lease runs out, and another worker goes on."""
        self._lost.set()

    def stop(self) -> None:
        """Write what is left and end the thread."""
        self._stop.set()
        self._thread.join()

    def flush(self) -> None:
        """Write the buffers now. Raises `LeaseLost`."""
        with self._mutex:
            lines, self._lines = self._lines, {}
            progress, self._progress = self._progress, {}
        if not lines and not progress:
            return
        try:
            with lease.fenced(self.job):
                LogChunk.objects.bulk_create(self._chunks(lines))
                for step_id, (done, total, unit) in progress.items():
                    self.job.note_progress(step_id, done, total, unit)
        except DatabaseError:
            with self._mutex:
                for key, kept in lines.items():
                    self._lines[key] = kept + self._lines.get(key, [])
                self._progress = progress | self._progress
            raise
        self._extended = time.monotonic()
        feed.announce_job(self.job)

    def _chunks(self, lines: dict[int | None, list[str]]) -> Iterator[LogChunk]:
        of_job = {f"{self.job.noun}_id": self.job.pk}
        for step_id, of_step in lines.items():
            text = "".join(f"{line}\n" for line in of_step).replace("\0", "")
            for start in range(0, len(text), CHUNK_CHARACTERS):
                chunk = text[start : start + CHUNK_CHARACTERS]
                yield LogChunk(step_id=step_id, text=chunk, **of_job)

    def _run(self) -> None:
        try:
            while not self._stop.wait(TICK_S):
                self._tick()
                if self._lost.is_set():
                    return
            self._tick()
        finally:
            connection.close()

    def _tick(self) -> None:
        try:
            if Parent.is_gone():
                lease.release(self.job)
                self._lost.set()
                return
            self.flush()
            if time.monotonic() - self._extended > lease.HEARTBEAT_S:
                lease.extend(self.job)
                self._extended = time.monotonic()
            self._cancel_if_asked()
        except MmError:
            self._lost.set()
        except DatabaseError as error:
            log.warning("%s %s: database: %s", self.job.noun, self.job.pk, error)
            connection.close()
            if time.monotonic() - self._extended > lease.LEASE_S:
                self._lost.set()

    def _cancel_if_asked(self) -> None:
        asked = type(self.job).objects.filter(
            pk=self.job.pk, fence=self.job.fence, cancel_requested_at__isnull=False
        )
        if not self._deaf and asked.exists():
            self._cancel.set()


@contextmanager
def recording(model: type[J], job_id: int) -> Iterator[Recorder[J] | None]:
    """Claim the job, record it while the block runs, and record how the block ended.

    Yields None when the job is not ours to do. An `MmError` of the block fails the job;
    any other exception is our bug: logged with its traceback, the job is `errored`.
    """
    job = lease.claim(model, job_id)
    if job is None:
        yield None
        return
    recorder = Recorder(job)
    recorder.start()
    state, error, rests = JobState.SUCCEEDED, None, False
    try:
        yield recorder
    except Sleeps:
        rests = True
    except Cancelled as cancelled:
        state, error = JobState.CANCELLED, cancelled.as_json()
    except (OperationalError, InterfaceError) as gone:
        # nothing can be written now: whoever finds the database again goes on from the record
        log.warning("%s %s: the database is gone: %s", model.noun, job_id, gone)
        connection.close()
        recorder.abandon()
        return
    except Ended as ended:
        state, error = ended.state, ended.error
    except MmError as failed:
        state, error = JobState.FAILED, failed.as_json()
    except Exception as bug:
        log.exception("%s %s", model.noun, job_id)
        state, error = JobState.ERRORED, states.bug(bug)
    finally:
        recorder.stop()
    if recorder.is_lost:
        log.warning("%s %s went to another worker", model.noun, job_id)
    elif rests:
        lease.sleep(recorder.job)
    else:
        lease.end(job, state, error)
