"""What a generation's engine was predicted to hold: previews of activations compare it with the host.

Generations that were built before have none; their previews say so.
"""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("deployments", "0003_usage_by_day")]

    operations = [
        migrations.AddField(
            model_name="generation",
            name="needs",
            field=models.JSONField(blank=True, null=True),
        ),
    ]
