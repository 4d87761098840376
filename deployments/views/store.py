"""The store page: what lies there; what it would free, its collection and verification."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from deployments import actions, queries
from deployments.models import TaskKind
from deployments.queries import storage
from deployments.views.page import attempt, form_only, operator, page, person, show
from mmadmin.core.errors import NotFound

OF_STORE = (
    TaskKind.STORE_PREVIEW,
    TaskKind.STORE_COLLECT,
    TaskKind.STORE_VERIFY,
    TaskKind.STORE_VERIFY_CONTENTS,
)
PARTS = {
    "tasks": "store/_tasks.html",
    "sums": "store/_sums.html",
    "objects": "store/_objects.html",
}
TITLES = {
    TaskKind.STORE_PREVIEW: "Cleanup preview",
    TaskKind.STORE_COLLECT: "Collection",
    TaskKind.STORE_VERIFY: "Verification",
    TaskKind.STORE_VERIFY_CONTENTS: "Content verification",
}


@page
def store(request: HttpRequest) -> HttpResponse:
    """Sizes, what keeps each object, what a collection would free."""
    me = person(request)
    newest = queries.host_tasks(me)
    shown = [(TITLES[kind], newest[kind]) for kind in OF_STORE if kind in newest]
    context: dict[str, object] = {
        "nav": "store",
        "tasks": sorted(shown, key=lambda named: -named[1].pk),
        "active": any(task.active for _, task in shown),
    }
    if request.GET.get("part") != "tasks":
        context["store"] = storage.shelves(me)
    return show(request, "store/page.html", context, parts=PARTS)


@page
def start(request: HttpRequest, kind: str) -> HttpResponse:
    """Ask whether, then have the host's worker do it."""
    me = operator(request)
    if kind not in OF_STORE:
        raise NotFound(f"{kind} is not a task of the store")
    if request.method == "POST":
        return attempt(
            request,
            lambda: actions.start_task(me, kind),
            "Started. Progress is shown below.",
            reverse("store"),
        )
    context = {"nav": "store", "kind": kind, "title": TITLES[TaskKind(kind)]}
    return show(request, "store/confirm.html", context)


@form_only
@page
def cancel(request: HttpRequest, task_id: int) -> HttpResponse:
    """Cancel what is under way."""
    return attempt(
        request,
        lambda: actions.cancel_task(person(request), task_id),
        "Cancelling.",
        reverse("store"),
    )
