"""Rows of the old tables become host tasks, columns of generations become reports, and back.

Ids of tasks are new: nothing but their own pages named the old ones. A report keeps the time when
its generation was built; which job made it was not recorded. `[keep] days`, which was read by
nobody, comes from the newest deployment file.
"""

import tomllib
from heapq import merge

from django.db import migrations

KINDS = {
    "gc-preview": "store-preview",
    "gc": "store-collect",
    "verify": "store-verify",
    "verify-contents": "store-verify-contents",
    "doctor": "doctor",
}
REPORTS = (
    "command",
    "template",
    "rendering",
    "renders",
    "model_report",
    "needs",
    "probe_report",
)
JOB = (
    "state",
    "host_id",
    "actor_id",
    "fence",
    "holder",
    "lease_expires_at",
    "attempts",
    "max_attempts",
    "cancel_requested_at",
    "error",
    "enqueued_at",
    "created_at",
    "started_at",
    "ended_at",
    "result",
)
CARE = ("progress_done", "progress_total")
AT_ONCE = 100
"""Rows in memory: a report may have hundreds of kilobytes."""


def _fields(row, names):
    return {name: getattr(row, name) for name in names}


def _searches(apps):
    for row in apps.get_model("deployments", "Browse").objects.order_by("pk").iterator(AT_ONCE):
        params = _fields(row, ("repo", "revision", "options"))
        yield _fields(row, JOB) | {"kind": "hub-search", "params": params}


def _cares(apps):
    for row in apps.get_model("deployments", "Care").objects.order_by("pk").iterator(AT_ONCE):
        yield _fields(row, (*JOB, *CARE)) | {"kind": KINDS[row.kind]}


def tasks(apps, schema_editor):
    """One task a row, oldest first, so that the newest of each kind stays the newest."""
    task = apps.get_model("deployments", "HostTask")
    for fields in merge(_searches(apps), _cares(apps), key=lambda fields: fields["created_at"]):
        task.objects.create(**fields)


def tasks_back(apps, schema_editor):
    """The same, to the old tables; kinds that came later are lost."""
    browse = apps.get_model("deployments", "Browse")
    care = apps.get_model("deployments", "Care")
    back = {new: old for old, new in KINDS.items()}
    for row in apps.get_model("deployments", "HostTask").objects.order_by("pk").iterator(AT_ONCE):
        if row.kind == "hub-search":
            browse.objects.create(**_fields(row, JOB), **row.params)
        elif row.kind in back:
            care.objects.create(**_fields(row, (*JOB, *CARE)), kind=back[row.kind])


def reports(apps, schema_editor):
    """One report a column that holds something."""
    report = apps.get_model("deployments", "GenerationReport")
    rows = apps.get_model("deployments", "Generation").objects.only(
        "created_at", "built_at", *REPORTS
    )
    for row in rows.order_by("pk").iterator(AT_ONCE):
        report.objects.bulk_create(
            report(
                generation=row,
                kind=kind,
                data=getattr(row, kind),
                made_by="an earlier version",
                at=row.built_at or row.created_at,
            )
            for kind in REPORTS
            if getattr(row, kind) is not None
        )


def reports_back(apps, schema_editor):
    """The same, to the old columns; what lies in the store stays there."""
    generation = apps.get_model("deployments", "Generation")
    rows = apps.get_model("deployments", "GenerationReport").objects.filter(object_name="")
    for row in rows.filter(kind__in=REPORTS).iterator(AT_ONCE):
        generation.objects.filter(pk=row.generation_id).update(**{row.kind: row.data})


def keep_days(apps, schema_editor):
    """What the newest deployment file of each deployment says."""
    generation = apps.get_model("deployments", "Generation")
    for deployment in apps.get_model("deployments", "Deployment").objects.all():
        newest = generation.objects.filter(deployment=deployment).order_by("-number").first()
        try:
            days = tomllib.loads(newest.spec_toml)["keep"]["days"] if newest else None
        except (tomllib.TOMLDecodeError, KeyError, TypeError):
            continue
        if isinstance(days, int) and days >= 0:
            deployment.keep_days = days
            deployment.save(update_fields=["keep_days"])


class Migration(migrations.Migration):
    dependencies = [("deployments", "0013_host_tasks_and_reports")]

    operations = [
        migrations.RunPython(tasks, tasks_back),
        migrations.RunPython(reports, reports_back),
        migrations.RunPython(keep_days, migrations.RunPython.noop),
    ]
