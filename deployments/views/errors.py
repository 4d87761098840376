"""Pages for what went wrong outside a view: addresses, bodies, lost form tokens, bugs of ours."""

from __future__ import annotations

from django.conf import settings
from django.core.exceptions import DisallowedHost, RequestDataTooBig
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render

from deployments.views.page import frame
from mmadmin.core.errors import InvalidInput

HOST_CHARACTERS = 255


def unreadable(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """400, and 413 for a body that is too large; for programs in the API's shape."""
    if isinstance(exception, RequestDataTooBig):
        most = settings.DATA_UPLOAD_MAX_MEMORY_SIZE / 1_000_000
        error = InvalidInput(
            f"the request is larger than {most:.1f} MB",
            remedy="send a smaller file or note",
        )
        status = 413
    elif isinstance(exception, DisallowedHost):
        host = request.headers.get("Host", "")[:HOST_CHARACTERS]
        error = InvalidInput(
            f"this panel does not answer to the host name {host!r}",
            remedy="use the address that `mm status` prints, or add the name on the machine: "
            "`mm set MM_ALLOWED_HOSTS=NAME`, then `mm up`",
            host=host,
        )
        status = 400
    else:
        error = InvalidInput("the request is malformed", remedy="reload the page and try again")
        status = 400
    if request.path.startswith("/api/"):
        return JsonResponse({"error": error.as_json()}, status=status)
    return render(request, "error.html", {"error": error, **frame(request)}, status=status)


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
