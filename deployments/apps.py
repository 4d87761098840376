"""The Django app of records, actions, jobs, pages and API."""

from importlib import import_module

from django.apps import AppConfig


class DeploymentsConfig(AppConfig):
    """The one app of the panel."""

    name = "deployments"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Make our Celery application the one that `queue` sends with; note logins."""
        import_module("mmadmin.celery").app.set_default()
        user_logged_in = import_module("django.contrib.auth").user_logged_in
        user_logged_in.connect(import_module("deployments.accounts.sessions").note_login)
