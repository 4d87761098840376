"""A new deployment, or the next generation of one: the file, a plan of it, the build."""

from __future__ import annotations

from typing import Any

import tomlkit
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from deployments import actions, queries
from deployments.panel import spec_form
from deployments.panel.forms import Deploy
from deployments.views.page import blame, form_only, number_of, operator, page, person, show
from mmadmin.core import catalog
from mmadmin.core.catalog import DEFAULT_ENGINE
from mmadmin.core.errors import MmError
from mmadmin.core.spec.first_file import first_file, first_name


@page
def new(request: HttpRequest, name: str = "") -> HttpResponse:
    """The editor: from an empty file, a catalog entry, or a deployment's newest file."""
    me = operator(request)
    row = queries.deployment(me, name) if name else None
    if request.method == "POST":
        form = Deploy(request.POST)
        if form.is_valid():
            try:
                return _send(request, form)
            except MmError as error:
                blame(form, error)
                return _editor(request, form, row, status=422, error=error)
        return _editor(request, form, row, status=422)
    chosen = next((e for e in queries.catalog(me) if e.slug == request.GET.get("from")), None)
    text = chosen.text if chosen else _from_hub(request)
    if row is not None:
        generation = row.live or row.newest
        number = number_of(request.GET.get("generation"), default=0)
        if number:
            generation = queries.generation(me, name, number).generation
        text = generation.spec_toml if generation else ""
    return _editor(request, Deploy(initial={"spec_toml": text}), row, chosen=chosen)


def _from_hub(request: HttpRequest) -> str:
    """A first file for a set that was chosen from a hub repository; empty when none was."""
    repo = request.GET.get("repo", "")
    if not repo:
        return ""
    kind = request.GET.get("engine") or DEFAULT_ENGINE
    known = {field.name for field in catalog.engine(kind).tables.model}
    named = {key: request.GET.get(key, "") for key in ("quant", "folder") if key in known}
    model: dict[str, Any] = {
        "source": "hub",
        "repo": repo,
        "revision": request.GET.get("commit") or "main",
        **{key: value for key, value in named.items() if value},
    }
    engines = (tomlkit.parse(e.text).unwrap()["engine"] for e in queries.catalog(person(request)))
    engine: dict[str, Any] = next(
        (one for one in engines if one.get("kind", DEFAULT_ENGINE) == kind), {"kind": kind}
    )
    return first_file(first_name(repo), model, engine)


@form_only
@page
def fields(request: HttpRequest) -> HttpResponse:
    """Bring form and file in line: from the one that was changed to the other."""
    operator(request)
    text = request.POST.get("spec_toml", "")
    from_form = request.POST.get("direction") == "form"
    context: dict[str, object] = {"from_form": from_form}
    try:
        before = text
        if from_form:
            text = spec_form.write(text, request.POST.dict())
        if not from_form or spec_form.sources(before) != spec_form.sources(text):
            context["sections"] = spec_form.sections(text, _warned(request, text))
        context["problem"] = spec_form.problem(text)
    except MmError as error:
        context["problem"] = error
    return show(request, "editing/_synced.html", {**context, "text": text})


def _warned(request: HttpRequest, text: str) -> dict[str, str]:
    """What the rules have warned the deployment of that the file names."""
    name = spec_form.read(text).get("name")
    return queries.warnings(person(request), str(name)) if name else {}


def _send(request: HttpRequest, form: Deploy) -> HttpResponse:
    """Plan or build what the form holds, and go to where it can be watched."""
    me = person(request)
    answers = form.cleaned_data
    if "plan" in request.POST:
        return redirect("build", build_id=actions.plan(me, answers["spec_toml"]).pk)
    generation = actions.deploy(
        me, answers["spec_toml"], reason=answers["reason"], activate=answers["activate"]
    )
    build = queries.builds(me, name=generation.deployment.name).rows[0]
    return redirect("build", build_id=build.pk)


def _editor(
    request: HttpRequest,
    form: Deploy,
    row: queries.DeploymentRow | None,
    *,
    chosen: queries.Entry | None = None,
    status: int = 200,
    error: MmError | None = None,
) -> HttpResponse:
    text = str(form["spec_toml"].value() or "")
    try:
        sections = spec_form.sections(text, _warned(request, text))
    except MmError:
        sections = []
    context = {
        "sections": sections,
        "problem": spec_form.problem(text) if text.strip() and not form.errors else None,
        "nav": "new" if row is None else "overview",
        "form": form,
        "row": row,
        "catalog": queries.catalog(person(request)),
        "hosts": queries.hosts(person(request)),
        "chosen": chosen,
        "error": error,
    }
    return show(request, "editing/page.html", context, status=status)
