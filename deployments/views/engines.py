"""An engine's own log, and what was measured of each generation."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from deployments import queries
from deployments.queries.engine_log import engine_log
from deployments.views.page import number_of, operator, page, person, show


@page
def log(request: HttpRequest, name: str, number: int) -> HttpResponse:
    """The end of an engine log; `?download` as a text file."""
    me = operator(request)
    found = engine_log(me, name, number)
    if "download" in request.GET:
        answer = HttpResponse(found.text, content_type="text/plain; charset=utf-8")
        answer["Content-Disposition"] = f'attachment; filename="{found.replica.uid}.log"'
        return answer
    context = {
        "nav": "overview",
        "row": queries.deployment(me, name),
        "number": number,
        "found": found,
        "log": [("", found)] if found.text else [],
        "last": 0,
        "poll": True,
    }
    return show(request, "deployment/engine_log.html", context, parts={"lines": "_log_view.html"})


@page
def measured(request: HttpRequest, name: str) -> HttpResponse:
    """Speed, memory and use of a deployment's generations, side by side."""
    me = person(request)
    found = queries.measured(me, name, page=number_of(request.GET.get("page")))
    answers = [row.answer_tokens_per_s_milli or 0 for row in found.rows]
    prompts = [row.prompt_tokens_per_s_milli or 0 for row in found.rows]
    context = {
        "nav": "overview",
        "row": queries.deployment(me, name),
        "found": found,
        "best_answer": max(answers, default=0),
        "best_prompt": max(prompts, default=0),
    }
    return show(request, "deployment/measured.html", context)
