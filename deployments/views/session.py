"""Coming in and going out."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import login, views
from django.contrib.auth.forms import AuthenticationForm
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from deployments import actions
from deployments.accounts.middleware import MUST_ENROL
from deployments.actions import attempts
from deployments.models import User
from deployments.panel.forms import Code, Login
from deployments.views.page import sentences
from mmadmin.core.errors import HTTP_STATUS, TooMany

PENDING = "mm_pending"
"""Session key: whose password was right, and what follows once their code is."""
CODE_WITHIN = timedelta(minutes=5)


class LoginPage(views.LoginView):
    """Name and password; whoever tries too many is told when to try again."""

    template_name = "login.html"
    authentication_form = Login
    redirect_authenticated_user = True

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """The page knows which ways in there are."""
        sso = settings.OIDC_NAME if settings.OIDC_ISSUER else ""
        more = {"sso": sso, "passwords": not settings.SSO_ONLY}
        return {**super().get_context_data(**kwargs), **more}

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Log in, unless too many attempts were counted."""
        try:
            return super().post(request, *args, **kwargs)
        except TooMany as error:
            form = self.get_form_class()(request)
            context = self.get_context_data(form=form, waits=sentences(error))
            return _too_many(error, self.render_to_response(context))

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        """Let in who has no second factor; the others are asked for its code."""
        user = form.get_user()
        assert isinstance(user, User)  # noqa: S101 (AUTH_USER_MODEL)
        where = self.get_success_url()
        if user.second_factor_at is not None:
            self.request.session[PENDING] = {
                "user": user.pk,
                "since": timezone.now().isoformat(),
                "next": where,
            }
            return redirect("login-code")
        login(self.request, user)
        if actions.second_factor_required(user):
            self.request.session[MUST_ENROL] = True
            messages.info(self.request, "Your role needs a second factor. Set it up now.")
            return redirect("second-factor")
        return redirect(where)


def code(request: HttpRequest) -> HttpResponse:
    """The second step of a login by password."""
    pending = request.session.get(PENDING, {})
    since = datetime.fromisoformat(pending["since"]) if pending else None
    user = User.objects.filter(pk=pending.get("user"), is_active=True).first()
    if since is None or timezone.now() - since > CODE_WITHIN or user is None:
        return redirect("login")
    form = Code(request.POST or None)
    status = 200
    if request.method == "POST":
        status = 422
        if form.is_valid():
            name = user.get_username()
            try:
                attempts.begin_attempt(name)
            except TooMany as error:
                context = {"form": form, "waits": sentences(error)}
                return _too_many(error, render(request, "login_code.html", context))
            if actions.second_factor_fits(user, form.cleaned_data["code"]):
                attempts.attempt_succeeded(name)
                del request.session[PENDING]
                login(request, user, backend=settings.AUTHENTICATION_BACKENDS[0])
                return redirect(pending["next"])
            attempts.attempt_failed(name)
            form.add_error("code", "This code is not valid, or it was used already.")
    return render(request, "login_code.html", {"form": form}, status=status)


def _too_many(error: TooMany, answer: HttpResponse) -> HttpResponse:
    answer.status_code = HTTP_STATUS[error.code]
    answer["Retry-After"] = str(error.details["retry_after_s"])
    return answer


log_in = LoginPage.as_view()
logout = views.LogoutView.as_view()
