"""Beat's scheduler: a task that last ran "in the future" is due.

Celery's own waits until the clock has caught up: after a clock was set back, no task would run, for
as long as the clock had been wrong.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from celery.beat import PersistentScheduler

TOLERANCE_S = 1.0
LONG_AGO = timedelta(days=365)


class Scheduler(PersistentScheduler):
    """`PersistentScheduler` that also survives a clock that was set back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._clock_ahead_s = _clock_ahead_s()
        super().__init__(*args, **options)

    def populate_heap(self, *args: Any, **options: Any) -> None:
        """Plan the next runs, those of tasks with a last run in the future at once."""
        now = self.app.now()
        for entry in self.schedule.values():
            if entry.last_run_at is not None and entry.last_run_at > now:
                entry.last_run_at = now - LONG_AGO
        super().populate_heap(*args, **options)

    def tick(self, *args: Any, **options: Any) -> Any:
        """Run what is due; plan again when the clock was set back since the last time."""
        ahead_s = _clock_ahead_s()
        if ahead_s < self._clock_ahead_s - TOLERANCE_S:
            self._heap = None
        self._clock_ahead_s = ahead_s
        return super().tick(*args, **options)


def _clock_ahead_s() -> float:
    """The clock against one that nobody can set."""
    return time.time() - time.monotonic()
