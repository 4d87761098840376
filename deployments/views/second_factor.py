"""One's own second factor: set it up, keep recovery codes, turn it off."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, urlencode

import segno
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from deployments import actions
from deployments.accounts.middleware import MUST_ENROL
from deployments.accounts.passwords import confirm
from deployments.models import User
from deployments.panel import shown_once
from deployments.panel.forms import Confirmation, Enrolment
from deployments.views.page import blame, page, person, show
from mmadmin.core.errors import MmError

CODES = "recovery-codes"
ISSUER = "mmadmin"


@page
def enrol(request: HttpRequest) -> HttpResponse:
    """Show the key as a QR code and as text, and take the app's first code."""
    me = person(request)
    if me.second_factor_at is not None:
        return redirect("account")
    key = actions.second_factor_key(me)
    form = Enrolment(request.POST or None)
    status = 200
    if request.method == "POST":
        if form.is_valid():
            try:
                confirm(request, me, form.cleaned_data["current_password"])
                codes = actions.enrol_second_factor(me, form.cleaned_data["code"])
            except MmError as error:
                blame(form, error)
            else:
                request.session.pop(MUST_ENROL, None)
                return _show_once(me, codes)
        status = 422
    text = base32(key)
    context = {
        "nav": "account",
        "form": form,
        "secret": " ".join(text[at : at + 4] for at in range(0, len(text), 4)),
        "qr": segno.make(uri(me, text), error="m").svg_data_uri(scale=5, border=4, light="#fff"),
        "must": request.session.get(MUST_ENROL, False),
    }
    return _private(show(request, "account/second_factor.html", context, status=status))


@page
def codes(request: HttpRequest) -> HttpResponse:
    """The one page that shows recovery codes; loading it again leads to the account."""
    text = shown_once.take(person(request), CODES)
    if text is None:
        messages.info(request, "Recovery codes are shown only once. You can create new ones.")
        return redirect("account")
    context = {"nav": "account", "codes": json.loads(text)}
    return _private(show(request, "account/recovery_codes.html", context))


@page
def renew(request: HttpRequest) -> HttpResponse:
    """New recovery codes."""
    me = person(request)
    form = Confirmation(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            confirm(request, me, form.cleaned_data["current_password"])
            return _show_once(me, actions.renew_recovery_codes(me))
        except MmError as error:
            blame(form, error)
    return _ask(request, form, "renew")


@page
def turn_off(request: HttpRequest) -> HttpResponse:
    """Log in with the password alone again."""
    me = person(request)
    form = Confirmation(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            confirm(request, me, form.cleaned_data["current_password"])
            actions.reset_second_factor(me, me.get_username())
        except MmError as error:
            blame(form, error)
        else:
            messages.success(request, "Your second factor is off.")
            return redirect("account")
    return _ask(request, form, "off")


def _ask(request: HttpRequest, form: Confirmation, act: str) -> HttpResponse:
    context = {"nav": "account", "form": form, "act": act}
    status = 422 if form.errors else 200
    return show(request, "account/factor_confirm.html", context, status=status)


def _show_once(me: User, codes: list[str]) -> HttpResponse:
    shown_once.keep(me, CODES, json.dumps(codes))
    return redirect("recovery-codes")


def _private(answer: HttpResponse) -> HttpResponse:
    answer["Cache-Control"] = "no-store, private"
    return answer


def base32(key: str) -> str:
    """A hex key as authenticator apps take it."""
    return base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")


def uri(user: User, text: str) -> str:
    """The address in the QR code (Google's Key Uri Format)."""
    label = quote(f"{ISSUER}:{user.get_username()}")
    return f"otpauth://totp/{label}?{urlencode({'secret': text, 'issuer': ISSUER})}"
