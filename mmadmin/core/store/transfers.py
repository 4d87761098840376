"""Moving many files between a store and a cache: small ones several at once, one progress for all.

A small file costs a journey, not a transfer: one after another, thousands of them take minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from mmadmin.core.callbacks import Progress

AT_ONCE = 8
ALONE_BYTES = 8 << 20
"""Larger files are moved one after another: they fill the line by themselves."""


@contextmanager
def several_at_once() -> Iterator[ThreadPoolExecutor]:
    """Threads to move small files in; what was not begun when something failed is left."""
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cache")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class Meter:
    """One progress over many files, whichever threads move them."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[Progress]:
        """The progress of one file. One that starts again counts from where it is."""
        counted = 0

        def of_this(done: int, _size: int) -> None:
            nonlocal counted
            with self._lock:
                self._done += done - counted
                counted = done
                self._progress(self._done, self._total)

        yield of_this
