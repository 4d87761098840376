"""Logging in with an identity provider (OpenID Connect), where `MM_OIDC_ISSUER` names one.

mozilla-django-oidc does the code flow with state, nonce and PKCE, and checks signatures. Here its
settings are found by the provider's own discovery document, and what it leaves open is checked:
issuer, audience, lifetime, and that the user's details belong to the token. People are known by
issuer and subject, never by an address or a name that they may choose themselves.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jwt
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.exceptions import SuspiciousOperation
from django.http import HttpRequest
from mozilla_django_oidc.auth import (  # type: ignore[import-untyped]
    OIDCAuthenticationBackend,
)
from mozilla_django_oidc.utils import import_from_settings  # type: ignore[import-untyped]

from deployments import actions
from deployments.models import Role, User
from mmadmin.core.errors import Unreachable

TIMEOUT_S = 10
KNOWN_FOR_S = 3600
ALGORITHMS = ("RS256", "ES256", "PS256", "RS384", "RS512", "ES384", "ES512")
ENDPOINTS = {
    "OIDC_OP_AUTHORIZATION_ENDPOINT": "authorization_endpoint",
    "OIDC_OP_TOKEN_ENDPOINT": "token_endpoint",
    "OIDC_OP_USER_ENDPOINT": "userinfo_endpoint",
    "OIDC_OP_JWKS_ENDPOINT": "jwks_uri",
}
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_known: dict[str, tuple[float, dict[str, Any]]] = {}


def provider() -> dict[str, Any]:
    """What the provider says about itself, asked once an hour. Raises `Unreachable`."""
    issuer = settings.OIDC_ISSUER
    asked_at, found = _known.get(issuer, (0.0, {}))
    if found and time.monotonic() - asked_at < KNOWN_FOR_S:
        return found
    where = urlsplit(issuer)
    if where.scheme != "https" and where.hostname not in LOOPBACK:
        raise Unreachable(
            f"the identity provider {issuer} is not asked over plain HTTP",
            remedy="set MM_OIDC_ISSUER to its https:// address",
        )
    address = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
    try:
        told: dict[str, Any] = httpx2.get(address, timeout=TIMEOUT_S).raise_for_status().json()
        named = told["issuer"]
        missing = [name for name in ENDPOINTS.values() if name not in told]
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        raise Unreachable(
            f"the identity provider does not answer at {address}: {error}",
            remedy="try again, or log in with a password",
        ) from error
    if named != issuer or missing:
        wrong = f"calls itself {named}" if named != issuer else f"names no {', '.join(missing)}"
        raise Unreachable(
            f"the identity provider at {issuer} {wrong}", remedy="correct MM_OIDC_ISSUER"
        )
    _known[issuer] = (time.monotonic(), told)
    return told


def algorithm() -> str:
    """How the provider signs: the first that we take of those that it names."""
    named = provider().get("id_token_signing_alg_values_supported", ALGORITHMS[:1])
    return next((known for known in ALGORITHMS if known in named), ALGORITHMS[0])


def setting(attr: str, *default: Any) -> Any:
    """A setting as mozilla-django-oidc names it."""
    if attr in ENDPOINTS:
        return provider()[ENDPOINTS[attr]]
    if attr == "OIDC_RP_SIGN_ALGO":
        return algorithm()
    own = {
        "OIDC_RP_CLIENT_ID": settings.OIDC_CLIENT_ID,
        "OIDC_RP_CLIENT_SECRET": settings.OIDC_CLIENT_SECRET,  # MM_OIDC_CLIENT_SECRET
        "OIDC_RP_SCOPES": settings.OIDC_SCOPES,
        "OIDC_USE_PKCE": True,
        "OIDC_TIMEOUT": TIMEOUT_S,
        "OIDC_AUTHENTICATION_CALLBACK_URL": "oidc-callback",
        "LOGIN_REDIRECT_URL_FAILURE": settings.LOGIN_URL,
    }
    return own[attr] if attr in own else import_from_settings(attr, *default)


class Backend(OIDCAuthenticationBackend):  # type: ignore[misc]
    """People whom the identity provider vouches for."""

    get_settings = staticmethod(setting)

    def __init__(self) -> None:
        """Ask nothing yet: a session is looked up without the provider."""
        self.UserModel = get_user_model()

    def __getattr__(self, name: str) -> Any:
        """The library's settings, when they are needed."""
        if not name.startswith("OIDC_"):
            raise AttributeError(name)
        return setting(name, None)

    def authenticate(self, request: HttpRequest | None, **kwargs: Any) -> User | None:
        """Only for our own callback, which holds the nonce; a password form has none."""
        if not kwargs.get("nonce"):
            return None
        found: User | None = super().authenticate(request, **kwargs)
        return found

    def verify_token(self, token: Any, **kwargs: Any) -> dict[str, Any]:
        """Signature and nonce, then issuer, audience and lifetime."""
        try:
            payload: dict[str, Any] = super().verify_token(token, **kwargs)
        except (jwt.PyJWTError, KeyError, TypeError, ValueError) as error:
            raise SuspiciousOperation(f"the token is not sound: {error}") from error
        audience = payload.get("aud")
        named = audience if isinstance(audience, list) else [audience]
        if payload.get("iss") != settings.OIDC_ISSUER:
            raise SuspiciousOperation("the token comes from another issuer")
        if settings.OIDC_CLIENT_ID not in named or (
            len(named) > 1 and payload.get("azp") != settings.OIDC_CLIENT_ID
        ):
            raise SuspiciousOperation("the token is meant for somebody else")
        if not payload.get("exp") or not payload.get("sub"):
            raise SuspiciousOperation("the token has no end or no subject")
        return payload

    def get_or_create_user(
        self, access_token: str, id_token: str, payload: dict[str, Any]
    ) -> User | None:
        """The person of the token, with the role that their groups give."""
        told = self.get_userinfo(access_token, id_token, payload)
        if not isinstance(told, dict) or told.get("sub") != payload["sub"]:
            raise SuspiciousOperation("the details are not those of the token's person")
        claims = {**payload, **told}
        email = str(claims.get("email") or "")
        return actions.arrive(
            f"{settings.OIDC_ISSUER}#{payload['sub']}",
            name=str(claims.get("preferred_username") or email or claims.get("name") or ""),
            email=email,
            role=role_of(claims),
        )


def role_of(claims: dict[str, Any]) -> Role | None:
    """What the person's groups give; None where no group is mapped to a role."""
    if not (settings.OIDC_ADMINS or settings.OIDC_OPERATORS):
        return None
    value: Any = claims
    for part in settings.OIDC_ROLES_CLAIM.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    groups = {value} if isinstance(value, str) else set(map(str, value or []))
    if groups & set(settings.OIDC_ADMINS):
        return Role.ADMIN
    return Role.OPERATOR if groups & set(settings.OIDC_OPERATORS) else Role.VIEWER
