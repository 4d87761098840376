"""The store page: what lies there, and the care for it."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from deployments import actions, queries
from deployments.models import CareKind
from deployments.queries import storage
from deployments.views.page import attempt, form_only, operator, page, person, show
from mmadmin.core.errors import NotFound

OF_STORE = (CareKind.PREVIEW, CareKind.COLLECT, CareKind.VERIFY, CareKind.READ)
PARTS = {
    "care": "store/_care.html",
    "sums": "store/_sums.html",
    "objects": "store/_objects.html",
}
TITLES = {
    CareKind.PREVIEW: "Cleanup preview",
    CareKind.COLLECT: "Collection",
    CareKind.VERIFY: "Verification",
    CareKind.READ: "Content verification",
}


@page
def store(request: HttpRequest) -> HttpResponse:
    """Sizes, what keeps each object, what a collection would free."""
    me = person(request)
    newest = queries.cares(me)
    under_care = [(TITLES[kind], newest[kind]) for kind in OF_STORE if kind in newest]
    context: dict[str, object] = {
        "nav": "store",
        "cares": sorted(under_care, key=lambda named: -named[1].pk),
        "active": any(care.active for _, care in under_care),
    }
    if request.GET.get("part") != "care":
        context["store"] = storage.shelves(me)
    return show(request, "store/page.html", context, parts=PARTS)


@page
def care(request: HttpRequest, kind: str) -> HttpResponse:
    """Ask whether, then have the host's worker do it."""
    me = operator(request)
    if kind not in OF_STORE:
        raise NotFound(f"there is no care {kind} for a store")
    if request.method == "POST":
        return attempt(
            request,
            lambda: actions.care(me, kind),
            "Started. Progress is shown below.",
            reverse("store"),
        )
    context = {"nav": "store", "kind": kind, "title": TITLES[CareKind(kind)]}
    return show(request, "store/confirm.html", context)


@form_only
@page
def cancel(request: HttpRequest, care_id: int) -> HttpResponse:
    """Cancel care under way."""
    return attempt(
        request,
        lambda: actions.cancel_care(person(request), care_id),
        "Cancelling.",
        reverse("store"),
    )
