"""Builds: the list, one build with its steps and log, cancel and retry."""

from __future__ import annotations

from typing import cast

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from deployments import actions, queries
from deployments.drawing.graph import Node, draw
from deployments.models import Build, LogChunk
from deployments.views.page import attempt, form_only, number_of, page, person, sentences, show
from mmadmin.core.errors import MmError

PARTS = {"head": "build/_head.html", "steps": "build/_steps.html"}
LOG_CHUNKS_AT_FIRST = 300
"""The stream brings the rest."""


@page
def builds(request: HttpRequest) -> HttpResponse:
    """Every build, newest first."""
    name = request.GET.get("deployment", "")
    found = queries.builds(person(request), name=name, page=number_of(request.GET.get("page")))
    context = {"nav": "builds", "found": found, "name": name}
    return show(request, "build/list.html", context, parts={"rows": "build/_list.html"})


@page
def build(request: HttpRequest, build_id: int) -> HttpResponse:
    """One build."""
    me = person(request)
    it = queries.build(me, build_id)
    context: dict[str, object] = {"nav": "builds", "it": it, **_sums(it)}
    if not request.GET.get("part"):
        log = queries.build_log(me, build_id=build_id, limit=LOG_CHUNKS_AT_FIRST)
        context |= {"log": _named(log, it), "last": log[-1].pk if log else 0}
    return show(request, "build/page.html", context, parts=PARTS)


def _sums(it: Build) -> dict[str, object]:
    steps = list(it.steps.all())
    ended = [s for s in steps if s.state in {"cached", "substituted", "built"}]
    running = [s for s in steps if s.state == "running"]
    plan = it.plan if isinstance(it.plan, dict) else {}
    return {
        "steps": steps,
        "done": len(ended),
        "running": running,
        "to_fetch": sum(s.size_bytes for s in steps if s.state in {"waiting", "running"}),
        "plan": plan,
        "active": it.state in {"queued", "running"},
        "crowded": it.crowded_out_by() if it.state == "queued" else 0,
        "graph": draw(cast("list[Node]", steps)),
    }


def _named(log: list[LogChunk], it: Build) -> list[tuple[str, LogChunk]]:
    """Each chunk with the name of its step where another step's lines begin."""
    names = {step.pk: step.name for step in it.steps.all()}
    named: list[tuple[str, LogChunk]] = []
    before: int | None = None
    for chunk in log:
        named.append((names.get(chunk.step_id or 0, "") if chunk.step_id != before else "", chunk))
        before = chunk.step_id
    return named


@page
def log(request: HttpRequest, build_id: int) -> HttpResponse:
    """The whole log as a text file."""
    me = person(request)
    queries.build(me, build_id)
    after, pieces = 0, []
    while chunks := queries.build_log(me, build_id=build_id, after_id=after, limit=5000):
        pieces += [
            chunk.text if chunk.text.endswith("\n") else f"{chunk.text}\n" for chunk in chunks
        ]
        after = chunks[-1].pk
    answer = HttpResponse("".join(pieces), content_type="text/plain; charset=utf-8")
    answer["Content-Disposition"] = f'attachment; filename="build-{build_id}.log"'
    return answer


@form_only
@page
def cancel(request: HttpRequest, build_id: int) -> HttpResponse:
    """End a build under way."""
    return attempt(
        request,
        lambda: actions.cancel_build(person(request), build_id),
        "Cancelling the build. Finished steps stay in the store.",
        reverse("build", kwargs={"build_id": build_id}),
    )


@form_only
@page
def retry(request: HttpRequest, build_id: int) -> HttpResponse:
    """Build again what failed."""
    try:
        build_id = actions.retry_build(person(request), build_id).pk
    except MmError as error:
        messages.error(request, sentences(error))
    return redirect("build", build_id=build_id)


@form_only
@page
def deploy_plan(request: HttpRequest, build_id: int) -> HttpResponse:
    """Build what a plan showed."""
    me = person(request)
    it = queries.build(me, build_id)
    generation = actions.deploy(
        me,
        it.spec_toml,
        reason=request.POST.get("reason", "").strip(),
        activate=request.POST.get("activate") == "on",
    )
    newest = queries.builds(me, name=generation.deployment.name).rows[0]
    return redirect("build", build_id=newest.pk)
