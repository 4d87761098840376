"""The policy of sources. It allows no folder of a host by itself; nothing that was built is lost.

Generations stay as they are: activating one fetches nothing. For each folder that a live
generation's file names, a request is left for the admins, in the name of who deployed it: granting
it lets operators deploy from there again. No rule is made unasked: a deployment file may have named
a folder that nobody should read from.
"""

import tomllib
from pathlib import PurePosixPath

import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models


PLACES = (("model", "path"), ("model", "mmproj"), ("engine", "path"), ("template", "file"))


def _folders(spec_toml):
    """The folders that a deployment file names."""
    try:
        document = tomllib.loads(spec_toml)
    except ValueError:
        return
    for table, key in PLACES:
        value = document.get(table, {}).get(key) if isinstance(document.get(table), dict) else ""
        if isinstance(value, str) and value.startswith("/"):
            yield str(PurePosixPath(value).parent)


def ask_for_folders(apps, schema_editor):
    requests = apps.get_model("deployments", "PolicyRequest").objects
    deployments = apps.get_model("deployments", "Deployment").objects.filter(live__isnull=False)
    for deployment in deployments.select_related("live").order_by("pk"):
        live = deployment.live
        for folder in sorted(set(_folders(live.spec_toml))):
            if len(folder) <= 255 and ".." not in PurePosixPath(folder).parts:
                reason = f"{deployment.name}/{live.number}, which is live, takes a file from there"
                requests.get_or_create(
                    kind="folder",
                    pattern=folder,
                    state="waiting",
                    defaults={"reason": reason, "by_id": live.author_id},
                )


class Migration(migrations.Migration):
    dependencies = [
        ("deployments", "0017_host_holder"),
    ]

    operations = [
        migrations.AddField(
            model_name="build",
            name="on_host",
            field=models.BooleanField(default=False),
        ),
        migrations.CreateModel(
            name="PolicyRequest",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("kind", models.CharField(max_length=16)),
                ("pattern", models.CharField(max_length=255)),
                ("reason", models.TextField()),
                ("at", models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("waiting", "Waiting"),
                            ("granted", "Granted"),
                            ("refused", "Refused"),
                        ],
                        default="waiting",
                        max_length=16,
                    ),
                ),
                ("answer", models.TextField(blank=True)),
                ("answered_at", models.DateTimeField(blank=True, null=True)),
                (
                    "answered_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "by",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("state", "waiting")),
                        fields=("kind", "pattern"),
                        name="one_waiting_request_a_pattern",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="PolicyRule",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("kind", models.CharField(max_length=16)),
                ("pattern", models.CharField(max_length=255)),
                ("allow", models.BooleanField()),
                ("reason", models.TextField(blank=True)),
                ("at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "by",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["kind", "pattern"],
                "constraints": [
                    models.UniqueConstraint(fields=("kind", "pattern"), name="one_rule_a_pattern")
                ],
            },
        ),
        migrations.RunPython(ask_for_folders, migrations.RunPython.noop),
    ]
