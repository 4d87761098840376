"""Client keys: the list, creating one (shown once), and everything that can be done to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from deployments import actions, queries
from deployments.models import ClientKey
from deployments.panel import shown_once
from deployments.panel.forms import IssueKey
from deployments.views.page import (
    admin,
    attempt,
    blame,
    form_only,
    number_of,
    page,
    person,
    sentences,
    show,
)
from deployments.views.usage import charts, of_key
from mmadmin.core.errors import MmError

STATES = (
    ("", "all"),
    ("active", "active"),
    ("suspended", "suspended"),
    ("expired", "expired"),
    ("revoked", "revoked"),
)


@page
def keys(request: HttpRequest) -> HttpResponse:
    """The list, newest first, with search."""
    search, state = request.GET.get("search", "").strip(), request.GET.get("state", "")
    me = person(request)
    found = queries.keys(me, search=search, state=state, page=number_of(request.GET.get("page")))
    limited = [k.key_id for k in found.rows if k.tokens_per_day or k.tokens_per_month]
    context = {
        "nav": "keys",
        "found": found,
        "search": search,
        "state": state,
        "states": STATES,
        "spent": queries.budgets(me, limited),
    }
    return show(request, "keys/list.html", context, parts={"rows": "keys/_rows.html"})


@page
def issue(request: HttpRequest) -> HttpResponse:
    """Ask whom a key is for, then create it."""
    me = admin(request)
    form = IssueKey(request.POST or None, deployments=_names(request))
    status = 200
    if request.method == "POST":
        if form.is_valid():
            try:
                key, text = actions.issue_key(me, **form.wanted())
            except MmError as error:
                blame(form, error)
            else:
                shown_once.keep(me, key.key_id, text)
                return redirect("created-key", key_id=key.key_id)
        status = 422
    return show(request, "keys/issue.html", {"nav": "keys", "form": form}, status=status)


def _names(request: HttpRequest) -> list[str]:
    return queries.deployment_names(person(request))


@page
def created(request: HttpRequest, key_id: str) -> HttpResponse:
    """The one page that shows a key's text; loading it again leads to the key."""
    me = admin(request)
    key = queries.key(me, key_id)
    text = shown_once.take(me, key_id)
    if text is None:
        messages.info(request, "A key is shown only once. If you lost it, rotate the key.")
        return redirect("key", key_id=key_id)
    rows = queries.deployments_overview(person(request))
    usable = [r for r in rows if not key.deployments or r.deployment.name in key.deployments]
    live = [r for r in usable if r.live] or usable
    context = {
        "nav": "keys",
        "key": key,
        "text": text,
        "gate": gate_url(request),
        "model": live[0].deployment.public_name if live else "MODEL",
    }
    answer = show(request, "keys/once.html", context)
    answer["Cache-Control"] = "no-store, private"
    return answer


def gate_url(request: HttpRequest) -> str:
    """Where clients send their requests: the public origin, else this host at the gate's port."""
    if settings.GATE_ORIGIN:
        return f"{settings.GATE_ORIGIN.rstrip('/')}/v1"
    host = request.get_host().rsplit(":", 1)[0] if ":" in request.get_host() else request.get_host()
    return f"http://{host}:{settings.PORTS.gate}/v1"


@page
def key(request: HttpRequest, key_id: str) -> HttpResponse:
    """One key: what it may do, what was done to it."""
    me = person(request)
    context = {
        "nav": "keys",
        "key": queries.key(me, key_id),
        "events": queries.key_events(me, key_id),
        "spent": queries.budgets(me, [key_id]),
        "charts": charts(me, of_key(key_id))[:2],
    }
    return show(request, "keys/key.html", context)


@page
def edit(request: HttpRequest, key_id: str) -> HttpResponse:
    """Change whom a key is for and what it may do."""
    me = admin(request)
    found = queries.key(me, key_id)
    initial = {name: getattr(found, name) or None for name in IssueKey.base_fields}
    form = IssueKey(request.POST or None, initial=initial, deployments=_names(request))
    status = 200
    if request.method == "POST":
        if form.is_valid():
            try:
                _change(request, found, form.wanted())
            except MmError as error:
                blame(form, error)
            else:
                return redirect("key", key_id=key_id)
        status = 422
    return show(
        request, "keys/edit.html", {"nav": "keys", "form": form, "key": found}, status=status
    )


def _change(request: HttpRequest, found: ClientKey, wanted: Mapping[str, Any]) -> None:
    """Write only what differs, so that the audit log says what was changed."""
    changes = {name: value for name, value in wanted.items() if value != getattr(found, name)}
    if not changes:
        messages.info(request, "No changes.")
        return
    actions.edit_key(person(request), found.key_id, **changes)
    messages.success(request, "Key updated.")


@page
def confirm(request: HttpRequest, key_id: str, act: str) -> HttpResponse:
    """Ask before a key is revoked, suspended or rotated, saying what will happen; then do it."""
    me = admin(request)
    found = queries.key(me, key_id)
    if request.method != "POST":
        return show(request, "keys/confirm.html", {"nav": "keys", "key": found, "act": act})
    if act == "rotate":
        try:
            successor, text = actions.rotate_key(me, key_id)
        except MmError as error:
            messages.error(request, sentences(error))
            return redirect("key", key_id=key_id)
        shown_once.keep(me, successor.key_id, text)
        return redirect("created-key", key_id=successor.key_id)
    back = reverse("key", kwargs={"key_id": key_id})
    if act == "revoke":
        return attempt(
            request, lambda: actions.revoke_key(me, key_id), f"{found} permanently revoked.", back
        )
    return attempt(
        request, lambda: actions.suspend_key(me, key_id, on=True), f"{found} suspended.", back
    )


@form_only
@page
def resume(request: HttpRequest, key_id: str) -> HttpResponse:
    """Let a suspended key work again."""
    return attempt(
        request,
        lambda: actions.suspend_key(person(request), key_id, on=False),
        "Key resumed.",
        reverse("key", kwargs={"key_id": key_id}),
    )
