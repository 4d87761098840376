"""Audit events that a request writes name the client's address."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from deployments.actions import acting_from

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
