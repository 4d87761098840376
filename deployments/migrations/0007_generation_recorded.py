"""What a generation's model says about itself, and what its template renders: for its differences.

Generations that were built before have neither; what is not known is compared with nothing.
"""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("deployments", "0006_replica_work")]

    operations = [
        migrations.AddField(
            model_name="generation",
            name="model_report",
            field=models.JSONField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="generation",
            name="renders",
            field=models.JSONField(blank=True, null=True),
        ),
    ]
