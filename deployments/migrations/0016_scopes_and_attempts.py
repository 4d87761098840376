from django.contrib.auth import BACKEND_SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.db import migrations, models

SCOPES = {
    "viewer": ["read"],
    "operator": ["read", "deploy"],
    "admin": ["read", "deploy", "keys", "admin"],
}
BACKENDS = {
    "django.contrib.auth.backends.ModelBackend": "deployments.accounts.passwords.Backend",
}


def give_scopes(apps, schema_editor):
    """Tokens from before scopes keep what their person's role could do."""
    for token in apps.get_model("deployments", "UserToken").objects.select_related("user"):
        role = "admin" if token.user.is_superuser else token.user.role
        token.scopes = SCOPES[role]
        token.save(update_fields=["scopes"])


def name_backend(apps, schema_editor):
    """Logins from before the counting backend stay: a session names the backend that let it in."""
    store = SessionStore()
    for session in apps.get_model("deployments", "Session").objects.all():
        data = store.decode(session.session_data)
        if data.get(BACKEND_SESSION_KEY) in BACKENDS:
            data[BACKEND_SESSION_KEY] = BACKENDS[data[BACKEND_SESSION_KEY]]
            session.session_data = store.encode(data)
            session.save(update_fields=["session_data"])


class Migration(migrations.Migration):
    dependencies = [("deployments", "0015_drop_what_was_carried_over")]

    operations = [
        migrations.AddField(
            model_name="usertoken",
            name="scopes",
            field=models.JSONField(default=list),
        ),
        migrations.CreateModel(
            name="LoginAttempts",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("subject", models.CharField(max_length=96, unique=True)),
                ("count", models.PositiveIntegerField(default=0)),
                ("until", models.DateTimeField(db_index=True)),
            ],
        ),
        migrations.RunPython(give_scopes, migrations.RunPython.noop, elidable=True),
        migrations.RunPython(name_backend, migrations.RunPython.noop, elidable=True),
    ]
