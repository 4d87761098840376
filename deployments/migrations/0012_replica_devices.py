from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("deployments", "0011_step_waits_for"),
    ]

    operations = [
        migrations.AddField(
            model_name="replica",
            name="devices",
            field=models.JSONField(blank=True, null=True),
        ),
    ]
