"""The Django app of records, actions, jobs, pages and API."""

from importlib import import_module

from django.apps import AppConfig


class DeploymentsConfig(AppConfig):
    """The one app of the panel."""

    name = "deployments"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Make our Celery application the one that `queue` sends with, in every process."""
        import_module("mmadmin.celery").app.set_default()
