"""What every page shares: who is asking, how errors are shown, how a fragment is answered.

A page is rendered whole; the same view answers one of its fragments (`?part=name`, for htmx) or the
page's form alone (header `X-Sheet`, shown over another page).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, cast
from urllib.parse import urlsplit

from django.contrib import messages
from django.contrib.auth.views import redirect_to_login
from django.db import OperationalError
from django.forms import BaseForm
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render

from deployments import actions
from deployments.models import Role, User
from deployments.panel.fragments import fragment
from deployments.templatetags.mm import sentence
from mmadmin.core.errors import HTTP_STATUS, InvalidInput, MmError, NotFound, Refused, Unreachable

log = logging.getLogger(__name__)

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponseBase]


def person(request: HttpRequest) -> User:
    """Who is asking; pages are for people who are logged in."""
    return cast("User", request.user)


def operator(request: HttpRequest) -> User:
    """Who is asking, on a page that only operators are shown: others read why they are not."""
    actions.require(person(request), Role.OPERATOR)
    return person(request)


def admin(request: HttpRequest) -> User:
    """Who is asking, on a page that only admins are shown."""
    actions.require(person(request), Role.ADMIN)
    return person(request)


def page(view: View[P]) -> View[P]:
    """A page of the panel: for people who are logged in; expected errors become pages."""

    @wraps(view)
    def shown(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        try:
            return fragment(request, lambda: view(request, *args, **kwargs))
        except MmError as error:
            return failure(request, error)
        except OperationalError as error:
            log.warning("%s %s: the database: %s", request.method, request.path, error)
            unreachable = Unreachable(
                "the database is not responding", remedy="try again in a moment"
            )
            return failure(request, unreachable)

    @wraps(shown)
    def answered(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if request.user.is_authenticated:
            return shown(request, *args, **kwargs)
        return redirect_to_login(_open_page(request))

    answered.has_parts = True  # type: ignore[attr-defined]  # an open page may follow its fragments
    return cast("View[P]", answered)


def _open_page(request: HttpRequest) -> str:
    """The page to return to after logging in: for a form, the page on which it was."""
    if request.method in {"GET", "HEAD"}:
        return request.get_full_path()
    referrer = urlsplit(request.headers.get("Referer", ""))
    return f"{referrer.path or '/'}{'?' if referrer.query else ''}{referrer.query}"


def form_only(view: View[P]) -> View[P]:
    """An address that a form is sent to: opened like a page, it says so."""

    @wraps(view)
    def answered(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if request.method == "POST":
            return view(request, *args, **kwargs)
        error = InvalidInput("this address accepts forms only", remedy="go back and use the button")
        context = {"error": error, **frame(request)}
        refused = render(request, "error.html", context, status=405)
        refused["Allow"] = "POST"
        return refused

    return cast("View[P]", answered)


def failure(request: HttpRequest, error: MmError) -> HttpResponse:
    """A page about an error: the fact and the remedy."""
    template = {NotFound: "404.html", Refused: "403.html"}.get(type(error), "error.html")
    status = HTTP_STATUS.get(error.code, 400)
    return render(request, template, {"error": error, **frame(request)}, status=status)


def frame(request: HttpRequest) -> dict[str, Any]:
    """What the frame around a page needs to know: sheet or site, and what the person may do."""
    user = getattr(request, "user", None)
    me = user if isinstance(user, User) else None
    return {
        "layout": layout(request),
        "may_operate": me is not None and me.at_least(Role.OPERATOR),
        "may_admin": me is not None and me.at_least(Role.ADMIN),
    }


def layout(request: HttpRequest) -> str:
    """The frame that a page is put into: the whole site's, or none for a sheet."""
    return "_sheet.html" if request.headers.get("X-Sheet") else "page.html"


def show(
    request: HttpRequest,
    template: str,
    context: Mapping[str, Any],
    *,
    parts: Mapping[str, str] | None = None,
    status: int = 200,
) -> HttpResponse:
    """Answer the whole page, or the one fragment that was asked for."""
    wanted = request.GET.get("part")
    part = (parts or {}).get(wanted or "")
    if wanted and part is None:
        return HttpResponse("This page has no such part.", status=404, content_type="text/plain")
    answer = render(request, part or template, {**frame(request), **context}, status=status)
    answer["Cache-Control"] = "no-store"
    answer["Vary"] = "X-Sheet, HX-Request, Cookie"
    return answer


def attempt(request: HttpRequest, act: Callable[[], object], done: str, back: str) -> HttpResponse:
    """Do what a button asks for, say how it went, and go back to where the button was."""
    try:
        act()
    except MmError as error:
        messages.error(request, sentences(error))
    else:
        messages.success(request, done)
    return redirect(back)


def blame(form: BaseForm, error: MmError) -> None:
    """Put an error beside the form's field that it names, or above the form."""
    field = str(error.details.get("field", ""))
    form.add_error(field if field in form.fields else None, sentences(error))


def sentences(error: MmError) -> str:
    """An error's message and remedy as one or two sentences."""
    return " ".join(sentence(part) for part in (error.message, error.remedy) if part)


def number_of(text: str | None, *, default: int = 1) -> int:
    """A page number from an address; nonsense is the default."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else default  # noqa: PLR2004
