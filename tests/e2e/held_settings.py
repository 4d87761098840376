"""The product's settings for a worker that minds holds (see `holds`)."""

from mmadmin.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.e2e.holds.Holds"]  # noqa: F405
