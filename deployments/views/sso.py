"""Coming in by an identity provider: there and back."""

from __future__ import annotations

import logging

import requests
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from mozilla_django_oidc.views import (  # type: ignore[import-untyped]
    OIDCAuthenticationCallbackView,
    OIDCAuthenticationRequestView,
)

from deployments.accounts.oidc import setting
from deployments.views.page import sentences
from mmadmin.core.errors import MmError

log = logging.getLogger(__name__)


def _only_where_configured() -> None:
    if not settings.OIDC_ISSUER:
        raise Http404


class Leave(OIDCAuthenticationRequestView):  # type: ignore[misc]
    """Send the person to the provider."""

    get_settings = staticmethod(setting)

    def __init__(self, **_: object) -> None:
        """Ask nothing yet."""

    def get(self, request: HttpRequest) -> HttpResponseBase:
        """Go there, with a fresh state, nonce and proof key."""
        _only_where_configured()
        try:
            super().__init__()
            answer: HttpResponseBase = super().get(request)
        except MmError as error:
            log.warning("%s", error)
            messages.error(request, sentences(error))
            return redirect("login")
        return answer


class Return(OIDCAuthenticationCallbackView):  # type: ignore[misc]
    """Take the person back, or say why not."""

    get_settings = staticmethod(setting)

    def get(self, request: HttpRequest) -> HttpResponseBase:
        """Exchange the code, check the token, log in."""
        _only_where_configured()
        try:
            answer: HttpResponseBase = super().get(request)
        except (SuspiciousOperation, requests.RequestException, MmError) as error:
            log.warning("a login by the identity provider failed: %s", error)
            return self.login_failure()
        return answer

    def login_failure(self) -> HttpResponseBase:
        """Back to the login page."""
        messages.error(
            self.request,
            f"{settings.OIDC_NAME} rejected the login, or your account here is deactivated. "
            "Try again, or ask an admin.",
        )
        return redirect("login")


leave = Leave.as_view()
come_back = Return.as_view()
