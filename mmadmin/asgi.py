"""The panel as an ASGI application."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mmadmin.settings")
_panel = get_asgi_application()

from django.conf import settings  # noqa: E402 (Django is set up above)

import mmadmin.celery  # noqa: E402, F401 (loaded now, not at somebody's first click)
from deployments.panel.admission import InTurn  # noqa: E402
from deployments.panel.public_scheme import PublicScheme  # noqa: E402
from mmadmin.gate.open_files import raise_limit  # noqa: E402

raise_limit()
application = InTurn(PublicScheme(_panel, settings.PUBLIC_ORIGIN))
