"""Searching a hub repository: its sets with sizes and licence, and whether each fits, per host."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from deployments import actions, queries
from deployments.models import TaskKind
from deployments.views.page import form_only, operator, page, sentences, show
from mmadmin.core.errors import MmError, NotFound


@form_only
@page
def start(request: HttpRequest) -> HttpResponse:
    """Ask a worker to search, and go to where the answer appears."""
    me = operator(request)
    try:
        task = actions.search_hub(
            me, request.POST.get("repo", ""), revision=request.POST.get("revision") or "main"
        )
    except MmError as error:
        messages.error(request, sentences(error))
        return redirect("new-deployment")
    return redirect("hub-search", task_id=task.pk)


@page
def found(request: HttpRequest, task_id: int) -> HttpResponse:
    """What the worker found."""
    it = queries.host_task(operator(request), task_id)
    if it.kind != TaskKind.HUB_SEARCH:
        raise NotFound(f"task {task_id} is not a hub search")
    result: dict[str, Any] = it.result or {}
    context = {
        "nav": "overview",
        "it": it,
        "active": it.active,
        "found": result,
        "offers": [_offer(result, offer) for offer in result.get("offers", [])],
        "broken": [s for s in result.get("sets", []) if s.get("missing")],
    }
    return show(request, "editing/hub_search.html", context, parts={"found": "editing/_found.html"})


def _offer(found: dict[str, Any], offer: dict[str, Any]) -> dict[str, Any]:
    """An offer with the best answer of each host, and where its button leads."""
    best: dict[str, dict[str, Any]] = {}
    for answer in offer.get("fit", []):
        known = best.get(answer["host"])
        if known is None or (answer["ok"] and not known["ok"]):
            best[answer["host"]] = answer
    choice = {
        "repo": found.get("repo", ""),
        "commit": found.get("commit", ""),
        "engine": offer.get("engine", ""),
        "quant": offer.get("quant") or "",
        "folder": str(offer.get("name", "")).rpartition("/")[0],
    }
    return {
        **offer,
        "hosts": list(best.values()),
        "fits": any(answer["ok"] for answer in best.values()),
        "href": f"{reverse('new-deployment')}?{urlencode(choice)}",
    }
