"""A replica's process by its start since boot, no longer by a time of day.

What was written before is not carried over: it was true only until the clock moved. Such a replica
counts as of unknown process until the watch has looked at it, which takes seconds.
"""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("deployments", "0001_initial")]

    operations = [
        migrations.RemoveField(model_name="replica", name="pid_started"),
        migrations.AddField(
            model_name="replica",
            name="started",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="replica",
            name="boot",
            field=models.CharField(blank=True, max_length=36),
        ),
    ]
