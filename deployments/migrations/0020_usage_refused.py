"""Refused and cancelled requests are counted apart; what single requests tell is carried over."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.models import Count, F
from django.db.models.functions import TruncHour

NAMES = ("key_id", "deployment", "generation", "endpoint")


def carry_over(apps: Apps, _schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Take refusals out of the requests, as far as their records are still there."""
    event, bucket, day_row = (
        apps.get_model("deployments", name) for name in ("UsageEvent", "UsageBucket", "UsageDay")
    )
    days: dict[tuple[Any, ...], dict[str, int]] = defaultdict(
        lambda: {"refused": 0, "cancelled": 0}
    )
    rows = (
        event.objects.filter(outcome__in=("refused", "cancelled"))
        .order_by()
        .annotate(hour=TruncHour("at"))
        .values_list("hour", "outcome", *NAMES)
        .annotate(count=Count("pk"))
    )
    for hour, outcome, key_id, deployment, generation, endpoint, count in rows.iterator():
        bucket.objects.filter(
            hour=hour,
            key_id=key_id,
            deployment=deployment,
            generation=generation,
            endpoint=endpoint,
        ).update(**_changes({outcome: count}))
        day = hour.replace(hour=0)
        for which in (
            ("all", "", 0, ""),
            ("deployment", deployment, 0, ""),
            ("generation", deployment, generation, ""),
            ("key", "", 0, key_id),
        ):
            days[day, *which][outcome] += count
    for (day, of, deployment, generation, key_id), counts in days.items():
        day_row.objects.filter(
            day=day, of=of, deployment=deployment, generation=generation, key_id=key_id
        ).update(**_changes(counts))


def _changes(counts: dict[str, int]) -> dict[str, Any]:
    changes: dict[str, Any] = {name: F(name) + count for name, count in counts.items()}
    return changes | {"requests": F("requests") - counts.get("refused", 0)}


class Migration(migrations.Migration):
    dependencies = [("deployments", "0019_engines_on_sockets")]

    operations = [
        *(
            migrations.AddField(
                model_name=model,
                name=name,
                field=models.PositiveIntegerField(default=0),
            )
            for model in ("usagebucket", "usageday")
            for name in ("refused", "cancelled")
        ),
        migrations.RunPython(carry_over, migrations.RunPython.noop),
    ]
