"""Every variable of the environment that mmadmin reads: the one table.

`mm up` and `mm set` keep those that describe an installation, the docs are written from it, and a
test fails when the code reads a variable that is not here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

MAX_PORT = 65535
MAX_NUMBER = 2**53
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
PYTHON_SERVICES = ("worker", "beat", "panel", "gate", "watchdog")
"""All but the broker, in the order in which they are restarted."""
BUILDERS = ("worker",)
NETWORK_USERS = ("worker", "panel")
"""The panel asks a single sign-on provider."""
_PASSWORD = re.compile(r"(://[^/@:]*:)[^/@]*@")


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable: what it is for and what holds without it."""

    name: str
    meaning: str
    default: str
    remembered: bool = True
    """`mm up` and `mm set` keep it in `MM_HOME`."""
    secret: bool = False
    """It is kept in a file of its own in `MM_HOME/secrets`, and never printed."""
    services: tuple[str, ...] = PYTHON_SERVICES
    """Who reads it: what is restarted when it changes."""
    least: int | None = None
    """The variable is a whole number, and this the smallest; None = it is text."""
    kind: Literal["", "origin", "level", "address", "proxy", "file"] = ""
    """What a text must be: scheme and host of a web address, a level of logging, a web address, the
    address of a proxy, or an existing file."""

    def clean(self, value: str) -> str:
        """The value in the form in which it is compared and kept."""
        if self.kind == "origin":
            return value.strip().rstrip("/").lower()
        if self.kind == "level":
            return value.strip().upper()
        if self.kind or self.secret:
            return value.strip()
        return value

    def problem(self, value: str) -> str:
        """What is wrong with a cleaned value; empty when nothing is."""
        if not value.isprintable():
            return "it holds a line end or another control character"
        if not self.secret and (("'" in value and '"' in value) or value.strip("'\"") != value):
            return f"{value!r} holds both kinds of quotation marks, or one at an end"
        return self._kind_problem(value) or self._number_problem(value)

    def _kind_problem(self, value: str) -> str:
        if self.kind == "origin" and not _is_origin(value):
            return f"{value!r} is not a web address without a path, like https://mm.example.org"
        if self.kind == "level" and value not in LEVELS:
            return f"{value!r} is not one of {', '.join(LEVELS)}"
        if self.kind in ("address", "proxy") and not _is_web_address(value):
            return "it is not a web address, like http://host:port"
        if self.kind == "file" and not Path(value).is_file():
            return f"{value} is not a file"
        return ""

    def _number_problem(self, value: str) -> str:
        if self.least is None:
            return ""
        most = MAX_PORT if "_PORT" in self.name else MAX_NUMBER
        plain = value.isascii() and value.isdigit() and len(value) <= len(str(MAX_NUMBER))
        if plain and self.least <= int(value) <= most:
            return ""
        return f"{value!r} is not a whole number from {self.least} to {most}"

    def shown(self, value: str) -> str:
        """The value for people: without secrets, and without the password of an address."""
        return "(secret)" if self.secret else _PASSWORD.sub(r"\1***@", value)


def _is_web_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_origin(value: str) -> bool:
    try:
        parts = urlsplit(value)
        default = {"http": 80, "https": 443}.get(parts.scheme)
        named = bool(parts.hostname) and parts.port != default and parts.username is None
    except ValueError:
        return False
    return named and default is not None and value == f"{parts.scheme}://{parts.netloc}"


SECTIONS: dict[str, tuple[Variable, ...]] = {
    "Places and ports": (
        Variable("MM_HOME", "folder of all state", "`var/` of the checkout", remembered=False),
        Variable("MM_PANEL_PORT", "port of the panel", "8000", least=1),
        Variable("MM_GATE_PORT", "port of the gate, the OpenAI API", "20000", least=1),
        Variable(
            "MM_METRICS_PORT", "port of the gate's metrics and health", "gate's port + 1", least=1
        ),
        Variable("MM_BIND", "address that panel and gate listen on", "127.0.0.1"),
        Variable("MM_HOST_NAME", "name of this machine among the hosts", "local"),
    ),
    "The panel": (
        Variable(
            "PUBLIC_ORIGIN",
            "where people find the panel: `https://mm.example.org`",
            "",
            kind="origin",
        ),
        Variable(
            "MM_GATE_ORIGIN",
            "where clients find the gate: `https://api.example.org`",
            "",
            kind="origin",
        ),
        Variable("MM_GATE_URL", "where the panel finds the gate", "the gate's port on 127.0.0.1"),
        Variable(
            "MM_ALLOWED_HOSTS",
            "host names that the panel answers to, with commas",
            "that of `PUBLIC_ORIGIN`, else the machine's own; always loopback",
        ),
        Variable(
            "MM_TRUSTED_PROXIES",
            "addresses of proxies whose `X-Forwarded-*` headers the panel believes, with commas",
            "none",
        ),
        Variable(
            "MM_SESSION_IDLE_MIN",
            "minutes without a request after which a login ends; after 14 days it ends anyway",
            "1440, a day",
            services=("panel",),
            least=1,
        ),
        Variable(
            "MM_API_RPM",
            "requests that one token may make to the panel's API per minute",
            "600",
            services=("panel",),
            least=1,
        ),
        Variable("MM_LOG_LEVEL", f"how much is logged: {', '.join(LEVELS)}", "INFO", kind="level"),
        Variable(
            "MM_DEBUG",
            "1 = Django's debug pages; never where others can reach it",
            "0",
            remembered=False,
        ),
    ),
    "Single sign-on": (
        Variable(
            "MM_OIDC_ISSUER",
            "the OpenID Connect provider that people may log in with: `https://id.example.org`",
            "none: passwords only",
        ),
        Variable("MM_OIDC_CLIENT_ID", "what the provider calls this panel", ""),
        Variable(
            "MM_OIDC_CLIENT_SECRET",
            "the panel's secret at the provider",
            "",
            secret=True,
            services=("panel",),
        ),
        Variable("MM_OIDC_NAME", 'what the button says after "Log in with"', "single sign-on"),
        Variable("MM_OIDC_SCOPES", "what the provider is asked for", "openid email profile"),
        Variable(
            "MM_OIDC_ROLES_CLAIM",
            "claim that holds a person's groups; `a.b` = b inside a",
            "groups",
        ),
        Variable(
            "MM_OIDC_ADMINS",
            "groups whose people are admins, with commas",
            "without it and the next, roles are given in the panel",
        ),
        Variable("MM_SSO_ONLY", "1 = nobody logs in by password", "0", services=("panel",)),
        Variable("MM_OIDC_OPERATORS", "groups whose people are operators, with commas", ""),
    ),
    "Grown up": (
        Variable(
            "DATABASE_URL",
            "a PostgreSQL database",
            "SQLite in `MM_HOME`",
            services=("worker", "beat", "panel"),
        ),
        Variable("REDIS_URL", "a Redis or Valkey server", "the embedded one, on a Unix socket"),
    ),
    "The gate": (
        Variable("MM_GATE_HOST", "address of the gate alone", "`MM_BIND`", remembered=False),
        Variable("MM_METRICS_HOST", "address of metrics and health", "127.0.0.1"),
        Variable("MM_GATE_WORKERS", "processes of the gate", "1", least=1),
        Variable("MM_GATE_BODY_LIMIT_MIB", "largest request body, MiB", "64", least=1),
        Variable(
            "MM_GATE_SILENCE_S", "a stream silent for so long gets a comment, s", "10", least=1
        ),
        Variable(
            "MM_GATE_QUEUE_LIMIT", "waiting requests per deployment and worker", "64", least=1
        ),
        Variable("MM_GATE_QUEUE_TIMEOUT_S", "longest wait in the queue, s", "300", least=1),
        Variable("MM_GATE_REQUEST_TIMEOUT_S", "longest request, s", "3600", least=1),
        Variable("MM_GATE_STOP_S", "streams may finish for so long at a stop, s", "120", least=1),
        Variable(
            "MM_GATE_CORS_ORIGINS",
            "origins whose web pages may call the gate, with commas; `*` = all",
            "none",
        ),
        Variable("MM_GATE_ACCESS_LOG", "0 = no line a request", "1"),
        Variable("MM_GATE_SPOOL_FSYNC", "`always` = each event synced before its answer ends", ""),
    ),
    "Building": (
        Variable(
            "MM_SANDBOX",
            "sandbox of engines and build steps: bubblewrap, unshare or none",
            "the best",
            services=BUILDERS,
        ),
        Variable("MM_JOBS", "compile jobs at the same time", "number of cores", services=BUILDERS),
        Variable("MM_BUILDS_AT_ONCE", "builds at the same time on this host", "2", least=1),
        Variable(
            "MM_STEP_TIME_S",
            "longest time of a program in a step, s",
            "1 day, or the recipe's",
            services=BUILDERS,
        ),
        Variable(
            "MM_STEP_SILENCE_S",
            "longest silence of a program in a step, s",
            "2 hours, or the recipe's",
            services=BUILDERS,
        ),
        Variable("MM_STEP_LOG_BYTES", "largest log of a step, bytes", "64 MiB", services=BUILDERS),
        Variable(
            "MM_STEP_MEMORY_BYTES",
            "most memory of a program in a step, bytes",
            "no limit",
            services=BUILDERS,
        ),
    ),
    "Network": (
        Variable(
            "HF_ENDPOINT", "another model hub", "huggingface.co", kind="address", services=BUILDERS
        ),
        Variable("HF_TOKEN", "token for gated repositories", "", secret=True, services=BUILDERS),
        Variable(
            "HTTPS_PROXY", "proxy for https addresses", "", kind="proxy", services=NETWORK_USERS
        ),
        Variable(
            "HTTP_PROXY", "proxy for http addresses", "", kind="proxy", services=NETWORK_USERS
        ),
        Variable("ALL_PROXY", "proxy for both", "", kind="proxy", services=NETWORK_USERS),
        Variable(
            "NO_PROXY",
            "hosts that are asked directly, with commas",
            "",
            services=NETWORK_USERS,
        ),
        Variable(
            "SSL_CERT_FILE",
            "file with the certificates to trust instead of the system's",
            "",
            kind="file",
            services=NETWORK_USERS,
        ),
    ),
    "Binary caches in buckets": (
        Variable("AWS_ACCESS_KEY_ID", "who asks", "the machine's role", services=BUILDERS),
        Variable("AWS_SECRET_ACCESS_KEY", "the secret of that", "", secret=True, services=BUILDERS),
        Variable(
            "AWS_SESSION_TOKEN", "of credentials for a time", "", secret=True, services=BUILDERS
        ),
        Variable("AWS_SKIP_SIGNATURE", "true = public buckets", "false", services=BUILDERS),
        Variable("AWS_REGION", "where the bucket is", "us-east-1", services=BUILDERS),
        Variable("AWS_DEFAULT_REGION", "the same", "", services=BUILDERS),
        Variable(
            "AWS_ENDPOINT_URL_S3",
            "an S3 service of one's own",
            "Amazon's",
            kind="address",
            services=BUILDERS,
        ),
        Variable(
            "AWS_ENDPOINT_URL",
            "the same, for all services",
            "",
            kind="address",
            services=BUILDERS,
        ),
        Variable("AWS_ENDPOINT", "the same", "", kind="address", services=BUILDERS),
        Variable(
            "AWS_CA_BUNDLE",
            "file with certificates to trust besides the system's",
            "",
            kind="file",
            services=BUILDERS,
        ),
    ),
    "Secrets": (
        Variable(
            "MM_DJANGO_SECRET_KEY", "signs sessions", "file in `MM_HOME/secrets`", remembered=False
        ),
        Variable(
            "MM_KEY_PEPPER", "HMAC of client keys", "file in `MM_HOME/secrets`", remembered=False
        ),
        Variable(
            "MM_ENGINE_MASTER", "secrets of engines", "file in `MM_HOME/secrets`", remembered=False
        ),
    ),
    "Tests": (
        Variable(
            "MM_TEST_CACHE", "keeps the engine of the tests", "~/.cache/mmadmin", remembered=False
        ),
    ),
}

BY_FILE = (
    "Each may also be given as the path of a file that holds it, in the same name with `_FILE`."
)

GONE = frozenset({"MM_ENGINE_PORTS_FROM"})
"""Settings of earlier versions: a line of theirs that is still kept says nothing."""
VARIABLES: dict[str, Variable] = {
    variable.name: variable for section in SECTIONS.values() for variable in section
}
REMEMBERED: dict[str, Variable] = {
    name: variable for name, variable in VARIABLES.items() if variable.remembered
}
