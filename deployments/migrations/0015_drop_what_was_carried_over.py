from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("deployments", "0014_carry_over")]

    operations = [
        migrations.RemoveField(
            model_name="generation",
            name="command",
        ),
        migrations.RemoveField(
            model_name="generation",
            name="model_report",
        ),
        migrations.RemoveField(
            model_name="generation",
            name="needs",
        ),
        migrations.RemoveField(
            model_name="generation",
            name="probe_report",
        ),
        migrations.RemoveField(
            model_name="generation",
            name="rendering",
        ),
        migrations.RemoveField(
            model_name="generation",
            name="renders",
        ),
        migrations.RemoveField(
            model_name="generation",
            name="template",
        ),
        migrations.DeleteModel(
            name="Browse",
        ),
        migrations.DeleteModel(
            name="Care",
        ),
    ]
