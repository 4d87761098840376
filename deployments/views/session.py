"""Coming in and going out."""

from __future__ import annotations

from django.contrib.auth import views as auth

from deployments.forms import Login

login = auth.LoginView.as_view(
    template_name="login.html", authentication_form=Login, redirect_authenticated_user=True
)
logout = auth.LogoutView.as_view()
