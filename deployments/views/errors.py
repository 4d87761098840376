"""Pages for what went wrong outside a view: unknown addresses, lost form tokens, bugs of ours."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from deployments.views.page import frame


def refused(
    request: HttpRequest,
    exception: Exception | None = None,  # noqa: ARG001 (Django calls it so)
) -> HttpResponse:
    """403."""
    return render(request, "403.html", frame(request), status=403)


def csrf_failure(
    request: HttpRequest,
    reason: str = "",  # noqa: ARG001 (Django calls it so)
) -> HttpResponse:
    """403 for a form whose token is missing or old."""
    context = {**frame(request), "form_expired": True}
    return render(request, "403.html", context, status=403)


def missing(
    request: HttpRequest,
    exception: Exception | None = None,  # noqa: ARG001 (Django calls it so)
) -> HttpResponse:
    """404."""
    return render(request, "404.html", frame(request), status=404)


def broken(request: HttpRequest) -> HttpResponse:
    """500: asks nothing of the database or the session, which may be what broke."""
    return render(request, "500.html", status=500)
