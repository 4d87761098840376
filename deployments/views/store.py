"""The store page."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from deployments import storage
from deployments.views.page import page, person, show


@page
def store(request: HttpRequest) -> HttpResponse:
    """Sizes, what keeps each object, what a collection would free."""
    return show(
        request, "store/page.html", {"nav": "store", "store": storage.shelves(person(request))}
    )
