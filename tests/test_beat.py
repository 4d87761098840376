"""Beat runs what is due, whatever the clock said before."""

from __future__ import annotations

import shelve
from datetime import timedelta
from pathlib import Path

import pytest
from celery import Celery

from mmadmin import beat
from mmadmin.beat import Scheduler


@pytest.fixture
def app() -> Celery:
    """Two tasks with long intervals."""
    app = Celery("test", broker="memory://", set_as_current=False)
    app.conf.timezone = "UTC"
    app.conf.beat_schedule = {
        name: {"task": name, "schedule": 3600.0} for name in ("sweep", "publish")
    }
    return app


def run(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What it sends in a few rounds."""
    sent: list[str] = []
    monkeypatch.setattr(scheduler, "apply_entry", lambda entry, **_: sent.append(entry.name))
    for _ in range(6):
        scheduler.tick()
    return sorted(name for name in sent if not name.startswith("celery."))


def opened(app: Celery, path: Path) -> Scheduler:
    """A scheduler over its file."""
    return Scheduler(app=app, schedule_filename=str(path), lazy=False)


def test_a_last_run_in_the_future_is_due(
    app: Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a clock that was wrong by a day; then each waits for its interval again."""
    path = tmp_path / "schedule"
    opened(app, path).close()
    with shelve.open(str(path), writeback=True) as kept:
        for entry in kept["entries"].values():
            entry.last_run_at += timedelta(days=1)
    scheduler = opened(app, path)
    assert run(scheduler, monkeypatch) == ["publish", "sweep"]
    assert run(scheduler, monkeypatch) == []
    scheduler.close()


def test_a_clock_that_is_set_back_delays_nothing(
    app: Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, too."""
    scheduler = opened(app, tmp_path / "schedule")
    assert run(scheduler, monkeypatch) == []
    for entry in scheduler.schedule.values():
        entry.last_run_at += timedelta(days=1)
    monkeypatch.setattr(beat, "_clock_ahead_s", lambda: 0.0)
    assert run(scheduler, monkeypatch) == ["publish", "sweep"]
    scheduler.close()
