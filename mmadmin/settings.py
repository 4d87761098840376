"""The one settings file: every value comes from the environment or from `MM_HOME`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dj_database_url

from mmadmin.core.home import DEFAULT_BIND, Home, Ports
from mmadmin.core.variables import REMEMBERED

BASE_DIR = Path(__file__).resolve().parent.parent
HOME = Home.from_env()
PORTS = Ports.from_env()
BIND = os.environ.get("MM_BIND") or DEFAULT_BIND


def secret(name: str) -> str:
    """A secret: `NAME_FILE` or `NAME` in the environment, else its file in `MM_HOME/secrets`."""
    upper = name if name in REMEMBERED else f"MM_{name.upper()}"
    if path := os.environ.get(f"{upper}_FILE"):
        return Path(path).read_text(encoding="utf-8").strip()
    if value := os.environ.get(upper):
        return value
    path_in_home = HOME.secret_file(name)
    return path_in_home.read_text(encoding="utf-8").strip() if path_in_home.exists() else ""


for _name, _variable in REMEMBERED.items():
    if _variable.secret and not os.environ.get(_name) and (_value := secret(_name)):
        os.environ[_name] = _value  # for the libraries and rooms that read it


def allowed_hosts(origin: str, named: list[str], bind: str) -> list[str]:
    """The names that the panel answers to: loopback, those of its origin and those that are named.

    With neither origin nor names, those of this machine as well, as far as the panel listens there.
    """
    found = [*LOOPBACK_NAMES, *(name.lower() for name in named)]
    if host := urlsplit(origin).hostname:
        found.append(f"[{host}]" if ":" in host else host)
    if not host and not named and bind not in LOOPBACK_NAMES:
        found += _machine_names(bind)
    return list(dict.fromkeys(found))


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def _machine_names(bind: str) -> list[str]:
    """Host names of this machine, and the addresses that the panel listens on."""
    name = socket.gethostname().lower()
    addresses = [bind]
    if bind in {"0.0.0.0", "::"}:  # noqa: S104 (compared only)
        import psutil  # noqa: PLC0415 (only where the panel listens on all addresses)

        ours = {socket.AF_INET, socket.AF_INET6}
        each = (found for card in psutil.net_if_addrs().values() for found in card)
        addresses = [found.address.partition("%")[0] for found in each if found.family in ours]
    found = [f"[{address}]" if ":" in address else address for address in addresses]
    return [name, name.partition(".")[0], f"{name.partition('.')[0]}.local", *found]


def listed(name: str) -> list[str]:
    """A variable that holds several words, with commas."""
    return [word.strip() for word in os.environ.get(name, "").split(",") if word.strip()]


def database(url: str) -> dict[str, Any]:
    """A database as Django is told of it."""
    found: dict[str, Any] = {
        "OPTIONS": {},
        **dj_database_url.parse(url, conn_max_age=60, conn_health_checks=True),
    }
    if found["ENGINE"] == "django.db.backends.sqlite3":
        found["OPTIONS"] = {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        }
    return found


DEBUG = os.environ.get("MM_DEBUG") == "1"
SECRET_KEY = secret("django_secret_key") or "not-set-up"
KEY_PEPPER = secret("key_pepper").encode()
ENGINE_MASTER = secret("engine_master").encode()
PUBLIC_ORIGIN = os.environ.get("PUBLIC_ORIGIN", "")
ALLOWED_HOSTS = allowed_hosts(PUBLIC_ORIGIN, listed("MM_ALLOWED_HOSTS"), BIND)
CSRF_TRUSTED_ORIGINS = [PUBLIC_ORIGIN] if PUBLIC_ORIGIN else []
CSRF_FAILURE_VIEW = "deployments.views.errors.csrf_failure"
GATE_ORIGIN = os.environ.get("MM_GATE_ORIGIN", "")
"""Where clients find the gate, for ready snippets. Empty = the panel's host, the gate's port."""
GATE_URL = os.environ.get("MM_GATE_URL") or f"http://127.0.0.1:{PORTS.gate}"
"""Where the panel itself finds the gate, for the playground."""

INSTALLED_APPS = [
    "django.contrib.admin.apps.SimpleAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "csp",
    "ninja",
    "deployments",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "deployments.accounts.middleware.AddressMiddleware",
    "deployments.accounts.middleware.EnrolmentMiddleware",
]
ROOT_URLCONF = "mmadmin.urls"
ASGI_APPLICATION = "mmadmin.asgi.application"
AUTH_USER_MODEL = "deployments.User"
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "/login/"
PASSWORD_CHARACTERS = 12
AUTH_PASSWORD_VALIDATORS = [
    {
        "NAME": "django.contrib.auth.password_validation.MinimumLengthValidator",
        "OPTIONS": {"min_length": PASSWORD_CHARACTERS},
    },
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]

OIDC_ISSUER = os.environ.get("MM_OIDC_ISSUER", "")
"""The identity provider; empty = people log in with passwords only."""
OIDC_CLIENT_ID = os.environ.get("MM_OIDC_CLIENT_ID", "")
OIDC_CLIENT_SECRET = secret("oidc_client_secret")
OIDC_NAME = os.environ.get("MM_OIDC_NAME") or "single sign-on"
OIDC_SCOPES = os.environ.get("MM_OIDC_SCOPES") or "openid email profile"
OIDC_ROLES_CLAIM = os.environ.get("MM_OIDC_ROLES_CLAIM") or "groups"
OIDC_ADMINS = listed("MM_OIDC_ADMINS")
OIDC_OPERATORS = listed("MM_OIDC_OPERATORS")
SSO_ONLY = bool(OIDC_ISSUER) and os.environ.get("MM_SSO_ONLY") == "1"
"""Passwords let nobody in."""
AUTHENTICATION_BACKENDS = ["deployments.accounts.passwords.Backend"]
if OIDC_ISSUER:
    AUTHENTICATION_BACKENDS.append("deployments.accounts.oidc.Backend")

TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "OPTIONS": {
            "loaders": [
                (
                    "django.template.loaders.cached.Loader",
                    [
                        "deployments.panel.template_loader.Loader",
                        "django.template.loaders.app_directories.Loader",
                    ],
                )
            ],
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {"default": database(os.environ.get("DATABASE_URL") or f"sqlite:///{HOME.database}")}

CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
        "LOCATION": HOME.root / "cache",
    }
}

API_RPM = int(os.environ.get("MM_API_RPM") or 600)
"""Requests of one token to the API in a minute."""

REDIS_URL = os.environ.get("REDIS_URL") or HOME.broker_url
HOST_NAME = os.environ.get("MM_HOST_NAME") or "local"
"""The host that this machine's worker works for."""

BUILDS_AT_ONCE = int(os.environ.get("MM_BUILDS_AT_ONCE") or 2)
"""Builds that may run at once on a host; more wait in the queue."""

MACHINE = "deployments.jobs.machine.Machine"
"""The class with which jobs touch the machine; tests put another in its place."""

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
USE_I18N = False
STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATIC_ROOT = HOME.root / "static"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
WHITENOISE_USE_FINDERS = True

SESSION_ENGINE = "deployments.accounts.sessions"
SESSION_IDLE_S = int(os.environ.get("MM_SESSION_IDLE_MIN") or 24 * 60) * 60
"""A login without a request for so long ends; SESSION_COOKIE_AGE is its longest life."""
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = PUBLIC_ORIGIN.startswith("https://")
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "object-src": ["'none'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
        "form-action": ["'self'"],
    }
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "loggers": {
        # one line a request to an engine under proof says nothing that the job's log does not
        "httpx2": {"level": "WARNING"},
        "httpcore": {"level": "WARNING"},
    },
}
