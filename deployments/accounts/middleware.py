"""Audit events name the client's address; who must set up a second factor does that first."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.utils.decorators import sync_and_async_middleware

from deployments.actions import acting_from
from mmadmin.core.errors import HTTP_STATUS, Refused

MUST_ENROL = "mm_must_enrol"
"""Session key: the person's role needs a second factor, and they have none yet."""
OPEN_TO_ALL = ("/account/second-factor/", "/logout/", "/login/", "/static/", "/healthz")

Answer = HttpResponseBase | Awaitable[HttpResponseBase]
Handler = Callable[[HttpRequest], Answer]


def client_address(request: HttpRequest) -> str | None:
    """The peer's address; None for a Unix socket or a test."""
    try:
        return str(ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")))
    except ValueError:
        return None


@sync_and_async_middleware
def AddressMiddleware(  # noqa: N802 (named as Django's own are)
    get_response: Handler,
) -> Handler:
    """Run the view with the client's address known to the actions."""
    if iscoroutinefunction(get_response):

        async def asynchronous(request: HttpRequest) -> HttpResponseBase:
            with acting_from(client_address(request)):
                answer = get_response(request)
                return await cast("Awaitable[HttpResponseBase]", answer)

        return asynchronous

    def synchronous(request: HttpRequest) -> Answer:
        with acting_from(client_address(request)):
            return get_response(request)

    return synchronous


@sync_and_async_middleware
def EnrolmentMiddleware(  # noqa: N802 (named as Django's own are)
    get_response: Handler,
) -> Handler:
    """Lead whoever must set up a second factor there; the API refuses them until then."""
    if iscoroutinefunction(get_response):

        async def asynchronous(request: HttpRequest) -> HttpResponseBase:
            if _is_closed(request) and await request.session.aget(MUST_ENROL):
                return _first_enrol(request)
            return await cast("Awaitable[HttpResponseBase]", get_response(request))

        return asynchronous

    def synchronous(request: HttpRequest) -> Answer:
        if _is_closed(request) and request.session.get(MUST_ENROL):
            return _first_enrol(request)
        return get_response(request)

    return synchronous


def _is_closed(request: HttpRequest) -> bool:
    logged_in = settings.SESSION_COOKIE_NAME in request.COOKIES
    return logged_in and not request.path.startswith(OPEN_TO_ALL)


def _first_enrol(request: HttpRequest) -> HttpResponseBase:
    if not request.path.startswith("/api/"):
        return redirect("second-factor")
    error = Refused("your role needs a second factor", remedy="log in to the panel to set it up")
    return JsonResponse({"error": error.as_json()}, status=HTTP_STATUS[error.code])
