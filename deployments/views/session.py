"""Coming in and going out. Guessing passwords is slowed down, by name and by address."""

from __future__ import annotations

import hashlib
from typing import Any

from django.conf import settings
from django.contrib.auth import views as auth
from django.contrib.auth.forms import AuthenticationForm
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from deployments.accounts.middleware import client_address
from deployments.panel.forms import Login

TRIES = 8
"""Wrong passwords for one name from one address before it has to wait."""
TRIES_OF_ADDRESS = 40
"""Wrong passwords from one address, whatever the names."""
FORGOTTEN_AFTER_S = 15 * 60
TOO_MANY = 429


class LoginPage(auth.LoginView):
    """Name and password; too many wrong ones have to wait a quarter of an hour."""

    template_name = "login.html"
    authentication_form = Login
    redirect_authenticated_user = True

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """The page knows whether there is another way in."""
        sso = settings.OIDC_NAME if settings.OIDC_ISSUER else ""
        return {**super().get_context_data(**kwargs), "sso": sso}

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Look at the counts before the password is."""
        if any(cache.get(name, 0) >= most for name, most in _counts(request)):
            form = self.get_form_class()(request)
            context = self.get_context_data(form=form, waits=True)
            return self.render_to_response(context, status=TOO_MANY)
        return super().post(request, *args, **kwargs)

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        """Count what was wrong."""
        for name, _ in _counts(self.request):
            cache.add(name, 0, FORGOTTEN_AFTER_S)
            cache.incr(name)
        return super().form_invalid(form)

    def form_valid(self, form: AuthenticationForm) -> HttpResponseBase:  # type: ignore[override]
        """Who knew the password is no guesser."""
        cache.delete(_counts(self.request)[0][0])
        return super().form_valid(form)


def _counts(request: HttpRequest) -> list[tuple[str, int]]:
    """The counters that a try belongs to, each with its limit."""
    address = client_address(request) or "local"
    name = request.POST.get("username", "").casefold()
    both = hashlib.sha256(f"{name}\0{address}".encode()).hexdigest()[:32]
    return [(f"login:{both}", TRIES), (f"login:{address}", TRIES_OF_ADDRESS)]


login = LoginPage.as_view()
logout = auth.LogoutView.as_view()
