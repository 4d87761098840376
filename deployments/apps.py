"""The Django app of records, actions, jobs, pages and API."""

from django.apps import AppConfig


class DeploymentsConfig(AppConfig):
    """The one app of the panel."""

    name = "deployments"
    default_auto_field = "django.db.models.BigAutoField"
