"""The audit log."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from deployments import queries
from deployments.views.page import number_of, page, person, show

VERBS = (
    ("deployment.", "deployments"),
    ("generation.", "generations"),
    ("build.", "builds"),
    ("activation.", "activations"),
    ("trial.", "trials"),
    ("key.", "client keys"),
    ("user.", "people"),
    ("token.", "API tokens"),
    ("session.", "logins"),
    ("second-factor.", "second factors"),
    ("host.", "hosts and stores"),
    ("policy.", "policy"),
)


@page
def audit(request: HttpRequest) -> HttpResponse:
    """Who did what, newest first."""
    search, verb, who = (request.GET.get(n, "").strip() for n in ("search", "verb", "who"))
    found = queries.audit(
        person(request), search=search, verb=verb, who=who, page=number_of(request.GET.get("page"))
    )
    context = {
        "nav": "audit",
        "found": found,
        "search": search,
        "verb": verb,
        "who": who,
        "verbs": VERBS,
    }
    return show(request, "audit/page.html", context, parts={"rows": "audit/_rows.html"})
