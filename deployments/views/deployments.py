"""A deployment: its history, what is under way, and the acts on it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import groupby
from typing import Any, Literal, cast

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse

from deployments import actions, queries
from deployments.broker import activity
from deployments.models import Activation, ReportKind
from deployments.panel.forms import DeploymentSettings, OptionalReason, Reason
from deployments.queries.lookups import no_rollback_target
from deployments.views.model_report import model_tables
from deployments.views.page import (
    attempt,
    blame,
    form_only,
    number_of,
    operator,
    page,
    person,
    sentences,
    show,
)
from mmadmin.core.engines.probes import report_rows
from mmadmin.core.errors import Conflict, MmError, NotFound

PARTS = {
    "now": "deployment/_now.html",
    "under-way": "deployment/_under_way.html",
    "timeline": "deployment/_timeline.html",
}
ROWS = 20
"""Generations on a page of the history."""
TRIALS_SHOWN = 5
REASON_MAX = 1000
STARTABLE = frozenset({"built", "retired", "failed"})


@page
def deployment(request: HttpRequest, name: str) -> HttpResponse:
    """The deployment's page."""
    me = person(request)
    row = queries.deployment(me, name)
    part = request.GET.get("part", "")
    context: dict[str, object] = {"nav": "overview", "row": row, "startable": STARTABLE}
    if part in {"", "now"}:
        context["traffic"] = activity.lines()
    if part in {"", "timeline"}:
        page_number = number_of(request.GET.get("page"))
        context["history"] = queries.history(me, name, page=page_number, per_page=ROWS)
    return show(request, "deployment/page.html", context, parts=PARTS)


@page
def generation(request: HttpRequest, name: str, number: int) -> HttpResponse:
    """One generation: what it is, how it was built, how it went."""
    me = person(request)
    row = queries.deployment(me, name)
    it = queries.generation(me, name, number)
    reports = {kind: report.content for kind, report in queries.reports(me, it.generation).items()}
    command = shlex.join(map(str, reports.get(ReportKind.COMMAND) or []))
    probes = reports.get(ReportKind.PROBES) or {}
    context = {
        "nav": "overview",
        "row": row,
        "it": it,
        "startable": STARTABLE,
        "launch": command.replace(" --", " \\\n  --"),
        "reports": reports,
        "probes": report_rows(probes),
        "memory_rows": probes.get("memory", []),
        "renders": renders(reports.get(ReportKind.RENDERING)),
        "model_tables": model_tables(it.generation.spec_toml, reports.get(ReportKind.MODEL)),
        "trials": queries.trials(me, name=name, number=number).rows[:TRIALS_SHOWN],
        "said": queries.said(me, name, number),
    }
    parts = {"trial": "deployment/_trial.html"}
    return show(request, "deployment/generation.html", context, parts=parts)


def renders(report: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The conversations of a template's report, those that its patches change first."""
    rows = []
    for row in (report or {}).get("rows", []):
        lines = row["diff"].splitlines()[2:]
        rows.append(
            {
                **row,
                "added": sum(line.startswith("+") for line in lines),
                "removed": sum(line.startswith("-") for line in lines),
            }
        )
    return sorted(rows, key=lambda row: not row["changed"])


@page
def compare(request: HttpRequest, name: str) -> HttpResponse:
    """What differs between two generations; by default the live one and the one before."""
    me = person(request)
    row = queries.deployment(me, name)
    picked = [number_of(n) for n in request.GET.getlist("g")] or [
        number_of(request.GET.get("a"), default=0),
        number_of(request.GET.get("b"), default=0),
    ]
    if len(picked) != 2 or 0 in picked:  # noqa: PLR2004
        newest = [row.generations, row.generations - 1]
        if row.generations < 2:  # noqa: PLR2004
            raise NotFound(
                f"{name} has only one generation", remedy="build a second generation to compare"
            )
        picked = newest
    before, after = sorted(picked)
    if "swap" in request.GET:
        before, after = after, before
    rows = queries.diff(me, name, before, after)
    sections = [(key, list(found)) for key, found in groupby(rows, lambda found: found.section)]
    a, b = (queries.generation(me, name, number) for number in (before, after))
    context = {
        "nav": "overview",
        "row": row,
        "a": a,
        "b": b,
        "sides": (a, b),
        "sections": sections,
    }
    return show(request, "deployment/compare.html", context)


def _go(
    request: HttpRequest,
    *,
    name: str,
    number: int | None,
    kind: str,
    act: Callable[[str], Activation],
    needs_reason: bool,
) -> HttpResponse:
    """Show what an act will do and ask why; then do it and go to where it can be watched."""
    me = person(request)
    row = queries.deployment(me, name)
    form = (Reason if needs_reason else OptionalReason)(request.POST or None)
    status = 200
    if request.method == "POST":
        if form.is_valid():
            try:
                act(form.cleaned_data["reason"])
            except MmError as error:
                blame(form, error)
            else:
                messages.success(request, "Started. Progress is shown below.")
                return redirect("deployment", name=name)
        status = 422
    preview = queries.preview(me, name, number) if number is not None else None
    context = {
        "nav": "overview",
        "row": row,
        "form": form,
        "kind": kind,
        "target": queries.generation(me, name, number) if number is not None else None,
        "preview": preview,
        "changes": queries.differences(me, preview.live, preview.target)
        if preview is not None and preview.live is not None
        else [],
    }
    return show(request, "deployment/go.html", context, status=status)


@page
def activate(request: HttpRequest, name: str, number: int) -> HttpResponse:
    """Make a generation live."""
    me = operator(request)
    return _go(
        request,
        name=name,
        number=number,
        kind="activate",
        act=lambda reason: actions.activate(me, name, number, reason=reason),
        needs_reason=False,
    )


@page
def rollback(request: HttpRequest, name: str, number: int) -> HttpResponse:
    """Bring an earlier generation back."""
    me = operator(request)
    return _go(
        request,
        name=name,
        number=number,
        kind="rollback",
        act=lambda reason: actions.rollback(me, name, to=number, reason=reason),
        needs_reason=True,
    )


@page
def rollback_to_last(request: HttpRequest, name: str) -> HttpResponseBase:
    """Bring back what was live before; the next page shows which generation that is."""
    me = operator(request)
    of = queries.deployment(me, name).deployment
    target = of.rollback_target()
    if target is None:
        messages.error(request, sentences(Conflict(**no_rollback_target(of))))
        return redirect("deployment", name=name)
    return rollback(request, name=name, number=target.number)


@page
def stop(request: HttpRequest, name: str) -> HttpResponse:
    """Take the live generation down."""
    me = operator(request)
    return _go(
        request,
        name=name,
        number=None,
        kind="stop",
        act=lambda reason: actions.stop(me, name, reason=reason),
        needs_reason=True,
    )


def _reason_and_page(request: HttpRequest, name: str, number: int) -> tuple[str, str]:
    """The reason for a mark or a pin, and the page to return to."""
    kwargs: dict[str, Any] = {"name": name}
    if request.POST.get("from") == "generation":
        return request.POST.get("reason", "")[:REASON_MAX], reverse(
            "generation", kwargs=kwargs | {"number": number}
        )
    return "", reverse("deployment", kwargs=kwargs)


@form_only
@page
def pin(request: HttpRequest, name: str, number: int) -> HttpResponse:
    """Keep a generation, or let it go with its age."""
    on = request.POST.get("on") == "1"
    reason, back = _reason_and_page(request, name, number)
    return attempt(
        request,
        lambda: actions.pin(person(request), name, number, on, reason=reason),
        f"Generation {number} pinned. Its objects stay in the store."
        if on
        else f"Generation {number} unpinned.",
        back,
    )


@form_only
@page
def mark(request: HttpRequest, name: str, number: int) -> HttpResponse:
    """Mark a generation good or bad, or remove the mark."""
    word = cast("Literal['good', 'bad', '']", request.POST.get("mark", ""))
    reason, back = _reason_and_page(request, name, number)
    return attempt(
        request,
        lambda: actions.mark(person(request), name, number, word, reason=reason),
        f"Generation {number} marked {word}."
        if word
        else f"Generation {number} is no longer marked.",
        back,
    )


@page
def settings(request: HttpRequest, name: str) -> HttpResponse:
    """Change what is not part of a generation."""
    me = operator(request)
    of = queries.deployment(me, name).deployment
    now = {field: getattr(of, field) for field in DeploymentSettings.base_fields}
    form = DeploymentSettings(request.POST or None, initial=now)
    status = 200
    if request.method == "POST":
        if form.is_valid():
            try:
                actions.configure(me, name, **form.cleaned_data)
            except MmError as error:
                blame(form, error)
            else:
                messages.success(request, f"Settings of {name} saved.")
                return redirect("deployment", name=name)
        status = 422
    context = {"nav": "overview", "name": name, "form": form}
    return show(request, "deployment/settings.html", context, status=status)


@form_only
@page
def archive(request: HttpRequest, name: str) -> HttpResponse:
    """Put a deployment out of sight, or take it back."""
    on = request.POST.get("on") == "1"
    return attempt(
        request,
        lambda: actions.archive(person(request), name, on=on),
        f"{name} archived. Its history stays." if on else f"{name} restored from the archive.",
        reverse("deployment", kwargs={"name": name}),
    )


@page
def activation(request: HttpRequest, activation_id: int) -> HttpResponse:
    """One activation: its phases and its log."""
    me = person(request)
    it = queries.activation(me, activation_id)
    log = queries.build_log(me, activation_id=activation_id, limit=2000)
    context = {
        "nav": "overview",
        "it": it,
        "log": [("", chunk) for chunk in log],
        "last": log[-1].pk if log else 0,
    }
    return show(
        request,
        "deployment/activation.html",
        context,
        parts={"phases": "deployment/_phases_card.html"},
    )


@form_only
@page
def cancel_activation(request: HttpRequest, activation_id: int) -> HttpResponse:
    """Cancel an activation under way."""
    me = person(request)
    it = queries.activation(me, activation_id)
    return attempt(
        request,
        lambda: actions.cancel_activation(me, activation_id),
        "Cancelling. The previous generation stays live or is restored.",
        reverse("deployment", kwargs={"name": it.deployment.name}),
    )
