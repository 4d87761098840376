"""Coming in and going out."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth import views as auth
from django.http import HttpRequest, HttpResponse

from deployments.panel.forms import Login
from deployments.views.page import sentences
from mmadmin.core.errors import HTTP_STATUS, TooMany


class LoginPage(auth.LoginView):
    """Name and password; whoever tries too many is told when to try again."""

    template_name = "login.html"
    authentication_form = Login
    redirect_authenticated_user = True

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """The page knows whether there is another way in."""
        sso = settings.OIDC_NAME if settings.OIDC_ISSUER else ""
        return {**super().get_context_data(**kwargs), "sso": sso}

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Log in, unless too many attempts were counted."""
        try:
            return super().post(request, *args, **kwargs)
        except TooMany as error:
            form = self.get_form_class()(request)
            context = self.get_context_data(form=form, waits=sentences(error))
            answer = self.render_to_response(context, status=HTTP_STATUS[error.code])
            answer["Retry-After"] = str(error.details["retry_after_s"])
            return answer


login = LoginPage.as_view()
logout = auth.LogoutView.as_view()
