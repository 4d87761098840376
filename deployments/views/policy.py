"""The policy page: which sources deployments may use, and requests for exceptions."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from deployments import actions, queries
from deployments.panel.forms import Answer, Described, Exceptional, PolicyRuleForm
from deployments.views.page import (
    admin,
    attempt,
    blame,
    form_only,
    number_of,
    operator,
    page,
    person,
    show,
)
from mmadmin.core.errors import MmError

KINDS = (
    ("hub", "Hub repositories", "The most specific rule that matches decides."),
    ("index", "Python packages", "By name, or by name==version."),
    ("address", "Addresses", "Private addresses need their exact name, address or network."),
    ("folder", "Folders of the host", "With everything below them. MM_HOME is never read."),
    ("digest", "Contents", "By SHA-256, wherever they come from."),
)


@page
def policy(request: HttpRequest) -> HttpResponse:
    """Every rule that holds, and what was asked of the admins."""
    me = operator(request)
    rows = queries.policy(me)
    context = {
        "nav": "policy",
        "kinds": [
            (kind, title, about, [row for row in rows if row.rule.kind == kind])
            for kind, title, about in KINDS
        ],
        "found": queries.requests(me, page=number_of(request.GET.get("page"))),
    }
    return show(request, "policy/page.html", context)


@page
def add(request: HttpRequest) -> HttpResponse:
    """Make a rule."""
    me = admin(request)
    form = PolicyRuleForm(request.POST or None, initial=_asked(request))

    def act() -> None:
        answers = form.cleaned_data
        allow = answers["effect"] == "allow"
        rule = actions.set_rule(
            me, answers["kind"], answers["pattern"], allow=allow, reason=answers["reason"]
        )
        messages.success(request, f"Saved: {rule}.")

    return _form(request, form, act, "policy/add.html")


@page
def ask(request: HttpRequest) -> HttpResponse:
    """Ask the admins for an exception."""
    me = operator(request)
    form = Exceptional(request.POST or None, initial=_asked(request))

    def act() -> None:
        answers = form.cleaned_data
        actions.request_exception(me, answers["kind"], answers["pattern"], reason=answers["reason"])
        messages.success(request, "Sent to the admins. The answer appears on this page.")

    return _form(request, form, act, "policy/ask.html")


@page
def answer(request: HttpRequest, request_id: int, act: str) -> HttpResponse:
    """Grant a request, or refuse it."""
    me = admin(request)
    form = Answer(request.POST or None, grant=act == "grant")
    asked = queries.exception(me, request_id)

    def done() -> None:
        grant, reason = act == "grant", form.cleaned_data["reason"]
        actions.answer_request(me, request_id, grant=grant, reason=reason)
        messages.success(request, f"{'Granted' if grant else 'Refused'}: {asked}.")

    return _form(request, form, done, "policy/answer.html", asked=asked, act=act)


@form_only
@page
def remove(request: HttpRequest) -> HttpResponse:
    """Take a rule back."""
    kind, pattern = request.POST.get("kind", ""), request.POST.get("pattern", "")
    return attempt(
        request,
        lambda: actions.remove_rule(person(request), kind, pattern),
        f"Removed the rule for {kind} {pattern}.",
        reverse("policy"),
    )


def _asked(request: HttpRequest) -> dict[str, str]:
    """Kind and pattern from a link that leads here from a refusal."""
    return {name: request.GET[name] for name in ("kind", "pattern") if name in request.GET}


def _form(
    request: HttpRequest, form: Described, save: Callable[[], None], template: str, **more: object
) -> HttpResponse:
    """Show the form, or do what it asks for and go back to the policy."""
    if request.method == "POST":
        if form.is_valid():
            try:
                save()
            except MmError as error:
                blame(form, error)
            else:
                return redirect("policy")
        return show(request, template, {"nav": "policy", "form": form, **more}, status=422)
    return show(request, template, {"nav": "policy", "form": form, **more})
