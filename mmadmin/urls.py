"""The panel's addresses: pages, API, Django's own admin."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.templatetags.static import static
from django.urls import URLPattern, URLResolver, include, path

from deployments.admin import site
from deployments.api import api, missing


def healthz(_request: HttpRequest) -> HttpResponse:
    """Say that this process answers; asks nothing of database or broker."""
    return HttpResponse("ok\n", content_type="text/plain")


def favicon(_request: HttpRequest) -> HttpResponse:
    """Lead browsers to the icon, which they also ask for where no page names one."""
    return redirect(static("mark.svg"), permanent=True)


urlpatterns: list[URLPattern | URLResolver] = [
    path("healthz", healthz),
    path("favicon.ico", favicon),
    path("admin/", site.urls),
    path("api/v1/", api.urls),
    path("api/<path:rest>", missing),
    path("", include("deployments.panel.urls")),
]

handler400 = "deployments.views.errors.unreadable"
handler403 = "deployments.views.errors.refused"
handler404 = "deployments.views.errors.missing"
handler500 = "deployments.views.errors.broken"
