"""Usage by day: rows for what months of the books add up to, filled from the hours that are there.

And indexes with which the hours of one key or one deployment are found.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from typing import Any

from django.db import migrations, models

SUMS = (
    "requests",
    "failed",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "ttft_ms",
    "duration_ms",
)
BATCH = 2000


def fill(apps: Any, _schema_editor: Any) -> None:
    """Add the hours up, a day at a time."""
    hours, days = (apps.get_model("deployments", name) for name in ("UsageBucket", "UsageDay"))
    day: datetime | None = None
    sums: dict[tuple[str, str, int, str], list[int]] = {}
    for hour, key_id, deployment, generation, *values in (
        hours.objects.order_by("hour")
        .values_list("hour", "key_id", "deployment", "generation", *SUMS)
        .iterator(BATCH)
    ):
        if hour.replace(hour=0) != day:
            _write(days, day, sums)
            day, sums = hour.replace(hour=0), defaultdict(lambda: [0] * len(SUMS))
        for which in (
            ("all", "", 0, ""),
            ("deployment", deployment, 0, ""),
            ("generation", deployment, generation, ""),
            ("key", "", 0, key_id),
        ):
            sums[which] = [a + b for a, b in zip(sums[which], values, strict=True)]
    _write(days, day, sums)


def _write(
    days: Any, day: datetime | None, sums: dict[tuple[str, str, int, str], list[int]]
) -> None:
    days.objects.bulk_create(
        (
            days(
                day=day,
                of=of,
                deployment=deployment,
                generation=generation,
                key_id=key_id,
                **dict(zip(SUMS, values, strict=True)),
            )
            for (of, deployment, generation, key_id), values in sums.items()
        ),
        batch_size=BATCH,
    )


class Migration(migrations.Migration):
    dependencies = [("deployments", "0002_replica_process")]

    operations = [
        migrations.AddIndex(
            model_name="usagebucket",
            index=models.Index(fields=["key_id", "hour"], name="bucket_of_key"),
        ),
        migrations.AddIndex(
            model_name="usagebucket",
            index=models.Index(fields=["deployment", "hour"], name="bucket_of_deployment"),
        ),
        migrations.CreateModel(
            name="UsageDay",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("day", models.DateTimeField()),
                ("of", models.CharField(max_length=16)),
                ("deployment", models.CharField(blank=True, max_length=63)),
                ("generation", models.PositiveIntegerField(default=0)),
                ("key_id", models.CharField(blank=True, max_length=16)),
                ("requests", models.PositiveIntegerField(default=0)),
                ("failed", models.PositiveIntegerField(default=0)),
                ("prompt_tokens", models.PositiveBigIntegerField(default=0)),
                ("completion_tokens", models.PositiveBigIntegerField(default=0)),
                ("cached_tokens", models.PositiveBigIntegerField(default=0)),
                ("reasoning_tokens", models.PositiveBigIntegerField(default=0)),
                ("ttft_ms", models.PositiveBigIntegerField(default=0)),
                ("duration_ms", models.PositiveBigIntegerField(default=0)),
            ],
            options={"ordering": ["-day"]},
        ),
        migrations.AddConstraint(
            model_name="usageday",
            constraint=models.UniqueConstraint(
                fields=("of", "day", "deployment", "generation", "key_id"), name="one_row_a_day"
            ),
        ),
        migrations.RunPython(fill, migrations.RunPython.noop),
    ]
