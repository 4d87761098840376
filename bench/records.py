"""Reads and publications with years of records: `make bench-records`.

Fills an empty SQLite database with 1,000,000 usage events, a month of hourly sums of 100 keys, and
10,000 client keys, then times the queries of the usage pages and one publication to the gate.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

EVENTS = 1_000_000
KEYS = 10_000
HOURS = 24 * 29


def main() -> int:
    """Fill, measure, print JSON: milliseconds."""
    with tempfile.TemporaryDirectory(prefix="mm-records-") as folder:
        os.environ["MM_HOME"] = folder
        os.environ["DATABASE_URL"] = f"sqlite:///{Path(folder) / 'db.sqlite3'}"
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        import django  # noqa: PLC0415 (the environment comes first)

        django.setup()
        print(json.dumps(measure(), indent=2))
    return 0


def fill() -> None:
    """The records."""
    from django.core.management import call_command  # noqa: PLC0415
    from django.utils import timezone  # noqa: PLC0415

    from deployments.models import (  # noqa: PLC0415
        ClientKey,
        Deployment,
        Host,
        UsageBucket,
        UsageDay,
        UsageEvent,
    )
    from tests.panel.seed import days_of  # noqa: PLC0415

    call_command("migrate", verbosity=0)
    now = timezone.now()
    host = Host.objects.create(name="local")
    for n in range(5):
        Deployment.objects.create(name=f"d{n}", public_name=f"d{n}", host=host)
    for start in range(0, EVENTS, 20_000):
        UsageEvent.objects.bulk_create(
            UsageEvent(
                id=f"r{n}",
                at=now - timedelta(seconds=n * 2.5),
                key_id=f"k{n % 500}",
                deployment=f"d{n % 5}",
                generation=n % 9,
                endpoint="chat",
                status=200,
                outcome="ok",
                prompt_tokens=100,
                completion_tokens=50,
                ttft_ms=200,
                tokens_per_s_milli=9000,
            )
            for n in range(start, start + 20_000)
        )
    hour = now.replace(minute=0, second=0, microsecond=0)
    buckets = [
        UsageBucket(
            hour=hour - timedelta(hours=h),
            key_id=f"k{k}",
            deployment=f"d{k % 5}",
            generation=1,
            endpoint="chat",
            requests=14,
            prompt_tokens=1400,
            completion_tokens=700,
        )
        for h in range(HOURS)
        for k in range(100)
    ]
    UsageBucket.objects.bulk_create(buckets, batch_size=5000)
    UsageDay.objects.bulk_create(days_of(buckets), batch_size=5000)
    ClientKey.objects.bulk_create(
        ClientKey(key_id=f"k{n}", digest="0" * 64, owner=f"owner {n}") for n in range(KEYS)
    )


def measure() -> dict[str, int]:
    """Milliseconds, the median of five, by what was asked."""
    fill()
    from django.utils import timezone  # noqa: PLC0415

    from deployments import queries  # noqa: PLC0415
    from deployments.broker import feed  # noqa: PLC0415
    from deployments.models import User  # noqa: PLC0415

    me = User.objects.create(username="me", role="admin")
    now = timezone.now()
    month = {"since": now - timedelta(days=30), "until": now}
    asked: dict[str, Callable[[], object]] = {
        "overview": lambda: queries.deployments_overview(me),
        "usage, 30 days by hour": lambda: queries.usage(me, by="hour", **month),
        "usage, 30 days by day": lambda: queries.usage(me, by="day", **month),
        "usage, 30 days by key": lambda: queries.usage(me, by="key", **month),
        "usage of one key, by hour": lambda: queries.usage(me, key_id="k3", by="hour", **month),
        "budgets of 50 keys": lambda: queries.budgets(me, [f"k{n}" for n in range(50)]),
        "newest requests": lambda: queries.usage_events(me),
        "requests of one key": lambda: queries.usage_events(me, key_id="k3"),
        "a page of keys": lambda: queries.keys(me),
        "a search among keys": lambda: queries.keys(me, search="owner 99"),
        "snapshot published": feed.publish_snapshot,
    }
    return {name: timed(what) for name, what in asked.items()}


def timed(what: Callable[[], object]) -> int:
    """The median of five, milliseconds."""
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        what()
        taken.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(taken))


if __name__ == "__main__":
    sys.exit(main())
