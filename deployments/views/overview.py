"""The overview: what is live, what is under way, what needs somebody."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from deployments import actions, queries
from deployments.broker import activity
from deployments.views.hosts import machines
from deployments.views.page import form_only, page, person, show

PARTS = {
    "deployments": "overview/_deployments.html",
    "alarms": "overview/_alarms.html",
    "activity": "_activity.html",
    "memory": "overview/_memory.html",
}


@page
def overview(request: HttpRequest) -> HttpResponse:
    """Every deployment with its live generation."""
    me = person(request)
    part = request.GET.get("part", "")
    archived = "archived" in request.GET
    context: dict[str, object] = {"nav": "overview", "archived": archived}
    if part != "activity":
        rows = queries.deployments_overview(me, archived=archived)
        context |= {
            "rows": rows,
            "traffic": activity.lines(),
            "alarms": [alarm for row in rows for alarm in row.alarms],
            "failed": [row for row in rows if row.newest and row.newest.state == "failed"],
        }
        if not archived and not part:
            context["first_steps"] = queries.first_steps(me)
        if part in {"", "memory"}:
            context["machines"] = machines(
                queries.hosts(me), rows, queries.measured_memory(me, rows)
            )
    if part in {"", "activity"}:
        context["activity"] = queries.activity(me)
    return show(request, "overview/page.html", context, parts=PARTS)


@form_only
@page
def close_first_steps(request: HttpRequest) -> HttpResponse:
    """Take the list of first steps off this person's overview."""
    actions.close_first_steps(person(request))
    return redirect("overview")
