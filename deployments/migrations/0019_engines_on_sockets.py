from datetime import timedelta
from typing import Any

from django.db import migrations, models
from django.db.models import F
from django.utils import timezone

ACTIVE = ("starting", "probing", "ready", "draining")
HOLD = timedelta(minutes=20)


def keep_the_port(apps: Any, schema_editor: Any) -> None:
    """Note of each engine that it listens on a TCP port; the watch restarts it on a socket.

    Until then nothing is routed to it: the gate holds the requests.
    """
    found = apps.get_model("deployments", "Replica").objects.filter(state__in=ACTIVE)
    for replica in found:
        replica.launch = replica.launch | {"port": replica.port}
        replica.save(update_fields=["launch"])
    deployments = apps.get_model("deployments", "Deployment").objects
    served = found.filter(state="ready", trial=None, generation__deployment__live=F("generation"))
    deployments.filter(pk__in=[row.generation.deployment_id for row in served]).update(
        hold_until=timezone.now() + HOLD
    )
    found.filter(state="ready").update(state="starting")
    settle(schema_editor)


def settle(schema_editor: Any) -> None:
    """PostgreSQL alters no table whose rows still have deferred checks to come."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("SET CONSTRAINTS ALL IMMEDIATE")


def restore_the_port(apps: Any, schema_editor: Any) -> None:
    """The port that was noted, or one that no other engine of the host has."""
    for replica in apps.get_model("deployments", "Replica").objects.all():
        replica.port = replica.launch.get("port", 30_000 + replica.pk % 30_000)
        replica.save(update_fields=["port"])
    settle(schema_editor)


class Migration(migrations.Migration):
    dependencies = [("deployments", "0018_source_policy")]

    operations = [
        migrations.RemoveConstraint(model_name="replica", name="one_replica_a_port"),
        migrations.AlterField(
            model_name="replica", name="port", field=models.PositiveIntegerField(default=0)
        ),
        migrations.RunPython(keep_the_port, restore_the_port),
        migrations.RemoveField(model_name="replica", name="port"),
    ]
