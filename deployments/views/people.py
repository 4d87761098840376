"""People: who may come in and what they may do; one's own password and API tokens."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from deployments import actions, queries
from deployments.accounts.passwords import confirm
from deployments.models import Role
from deployments.panel import shown_once
from deployments.panel.forms import FirstPassword, NewPassword, NewToken, NewUser, RequiredFactor
from deployments.views.page import admin, attempt, blame, form_only, number_of, page, person, show
from mmadmin.core.errors import MmError

ROLES = (
    (Role.VIEWER, "viewer", "read-only; does not see keys or the audit log"),
    (Role.OPERATOR, "operator", "can also deploy, activate and roll back"),
    (Role.ADMIN, "admin", "can also manage keys and people"),
)
OWN_SHOWN = 10
"""Logins and tokens on a page of one's account."""


@page
def people(request: HttpRequest) -> HttpResponse:
    """Everybody with an account."""
    me = admin(request)
    search = request.GET.get("search", "")
    found = queries.users(me, search=search, page=number_of(request.GET.get("page")))
    required = {"roles": queries.second_factor_roles(me)}
    context = {
        "nav": "people",
        "found": found,
        "search": search,
        "roles": ROLES,
        "required": RequiredFactor(initial=required),
    }
    return show(request, "people/list.html", context)


@page
def new(request: HttpRequest) -> HttpResponse:
    """Let somebody in."""
    me = admin(request)
    form = NewUser(request.POST or None)
    status = 200
    if request.method == "POST":
        if form.is_valid():
            try:
                user = actions.create_user(me, **form.cleaned_data)
            except MmError as error:
                blame(form, error)
            else:
                messages.success(request, f"{user} can now log in.")
                return redirect("people")
        status = 422
    return show(request, "people/new.html", {"nav": "people", "form": form}, status=status)


@form_only
@page
def role(request: HttpRequest, username: str) -> HttpResponse:
    """Change what somebody may do."""
    word = request.POST.get("role", "")
    return attempt(
        request,
        lambda: actions.set_role(person(request), username, word),
        f"{username} now has the role {word}.",
        reverse("people"),
    )


@form_only
@page
def active(request: HttpRequest, username: str) -> HttpResponse:
    """Switch an account off or on."""
    on = request.POST.get("on") == "1"
    return attempt(
        request,
        lambda: actions.set_user_active(person(request), username, on=on),
        f"{username} {'has been reactivated' if on else 'has been deactivated'}.",
        reverse("people"),
    )


@page
def password(request: HttpRequest, username: str) -> HttpResponse:
    """Set somebody's password; their sessions end."""
    me = admin(request)
    queries.user(me, username)
    form = FirstPassword(request.POST or None)
    status = 200
    if request.method == "POST":
        if form.is_valid():
            try:
                actions.set_password(me, username, form.cleaned_data["password"])
            except MmError as error:
                blame(form, error)
            else:
                messages.success(request, f"{username} now has a new password.")
                return redirect("people")
        status = 422
    context = {"nav": "people", "form": form, "username": username}
    return show(request, "people/password.html", context, status=status)


@form_only
@page
def require_factor(request: HttpRequest) -> HttpResponse:
    """Say which roles need a second factor."""
    me = admin(request)
    form = RequiredFactor(request.POST)
    if not form.is_valid():
        messages.error(request, "Choose roles from the list.")
        return redirect("people")
    roles = form.cleaned_data["roles"]
    return attempt(
        request, lambda: actions.require_second_factor(me, roles), "Saved.", reverse("people")
    )


@page
def reset_factor(request: HttpRequest, username: str) -> HttpResponse:
    """Ask, then turn somebody's second factor off: they lost their phone."""
    me = admin(request)
    if request.method == "POST":
        return attempt(
            request,
            lambda: actions.reset_second_factor(me, username),
            f"The second factor of {username} is off.",
            reverse("people"),
        )
    return show(request, "people/reset_factor.html", {"nav": "people", "username": username})


@page
def account(request: HttpRequest) -> HttpResponse:
    """One's own account: password and API tokens."""
    me = person(request)
    form = NewPassword(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            confirm(request, me, form.cleaned_data["current_password"])
            user = actions.set_password(me, me.get_username(), form.cleaned_data["password"])
        except MmError as error:
            blame(form, error)
        else:
            update_session_auth_hash(request, user)
            messages.success(
                request, "Password changed. Your other sessions and your API tokens have ended."
            )
            return redirect("account")
    context = {
        "nav": "account",
        "form": form,
        "tokens": queries.tokens(me, page=number_of(request.GET.get("tokens")), per_page=OWN_SHOWN),
        "sessions": queries.sessions(
            me, page=number_of(request.GET.get("logins")), per_page=OWN_SHOWN
        ),
        "present": request.session.session_key,
        "recovery_left": me.recovery_codes.count(),
    }
    status = 422 if form.errors else 200
    return show(request, "account/page.html", context, status=status)


@page
def new_token(request: HttpRequest) -> HttpResponse:
    """Create a personal API token."""
    me = person(request)
    form = NewToken(
        request.POST or None, scopes=actions.scopes_for(me), password=me.has_usable_password()
    )
    status = 200
    if request.method == "POST":
        if form.is_valid():
            try:
                confirm(request, me, form.cleaned_data.get("current_password", ""))
                token, text = actions.issue_token(me, **form.wanted())
            except MmError as error:
                blame(form, error)
            else:
                shown_once.keep(me, token.token_id, text)
                return redirect("created-token", token_id=token.token_id)
        status = 422
    context = {"nav": "account", "form": form}
    return show(request, "account/new_token.html", context, status=status)


@page
def created_token(request: HttpRequest, token_id: str) -> HttpResponse:
    """The one page that shows a token's text; loading it again leads to the account."""
    text = shown_once.take(person(request), token_id)
    if text is None:
        messages.info(request, "A token is shown only once. If you lost it, create a new one.")
        return redirect("account")
    context = {"nav": "account", "text": text, "origin": request.build_absolute_uri("/")}
    answer = show(request, "account/token.html", context)
    answer["Cache-Control"] = "no-store, private"
    return answer


@form_only
@page
def revoke_token(request: HttpRequest, token_id: str) -> HttpResponse:
    """End a personal token."""
    return attempt(
        request,
        lambda: actions.revoke_token(person(request), token_id),
        "Token revoked.",
        reverse("account"),
    )


@form_only
@page
def end_session(request: HttpRequest, public_id: str) -> HttpResponse:
    """End one of one's own logins."""
    return attempt(
        request,
        lambda: actions.end_session(person(request), public_id),
        "Session ended.",
        reverse("account"),
    )


@form_only
@page
def end_sessions(request: HttpRequest) -> HttpResponse:
    """End all of one's own logins but this one."""
    present = request.session.session_key or ""
    return attempt(
        request,
        lambda: actions.end_other_sessions(person(request), present),
        "All other sessions have been ended.",
        reverse("account"),
    )
