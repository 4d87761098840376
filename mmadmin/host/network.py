"""What the environment says about the network, in one place, and why nobody answers."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from mmadmin.core.errors import InvalidInput, SourceUnavailable

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
TRUE = frozenset({"1", "on", "yes", "true"})
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def credential(name: str, env: Mapping[str, str] = os.environ) -> str:
    """The credential that a variable holds; empty = none.

    Blanks and line ends around it are dropped. Raises `InvalidInput`, which never shows the value.
    """
    value = env.get(name, "").strip()
    if not all("!" <= c <= "~" for c in value) or value[:1] in {"'", '"'}:
        raise InvalidInput(
            f"{name} holds characters that no credential has: quotes around it, blanks, line ends"
            " or letters outside of ASCII",
            remedy=f"set {name} again, to the credential alone",
        )
    return value


def check_proxies(env: Mapping[str, str] = os.environ) -> None:
    """Refuse a proxy that our clients cannot speak to. Raises `InvalidInput`."""
    for name in (*PROXIES, *map(str.lower, PROXIES)):
        value = env.get(name, "").strip()
        scheme = value.partition("://")[0].lower() if "://" in value else "http"
        if value and scheme not in {"http", "https"}:
            raise InvalidInput(
                f"{name} names a proxy of the kind {scheme}://, which is not supported",
                remedy="name an http:// or https:// proxy, or unset it; NO_PROXY lists hosts that"
                " are asked directly",
            )


def offline_by(env: Mapping[str, str] = os.environ) -> str:
    """The variable that forbids asking the hub; empty = none does."""
    return next((name for name in OFFLINE if env.get(name, "").strip().lower() in TRUE), "")


def offline(name: str) -> SourceUnavailable:
    """The error that the hub is not asked because of that variable."""
    return SourceUnavailable(
        f"{name} is set, so the hub is not asked",
        remedy=f"unset {name}; what is pinned and in the store is used without the hub",
    )


@dataclass(frozen=True, slots=True)
class Silence:
    """Why a server could not be asked, where that is known."""

    message: str
    remedy: str
    final: bool
    """Trying again does not help."""


def why_silent(error: BaseException, host: str) -> Silence | None:
    """What is behind a connection's failure; None = it may be anything."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Silence(
                f"the certificate of {host} is not trusted ({cause.verify_message})",
                "set SSL_CERT_FILE to a file with the authority that signed it",
                final=True,
            )
        if isinstance(cause, socket.gaierror):
            return Silence(
                f"the name {host} is not known here",
                "check the address and this host's DNS; where only a proxy reaches it, set"
                " HTTPS_PROXY",
                final=True,
            )
        if isinstance(cause, ConnectionRefusedError):
            return Silence(
                f"{host} refuses the connection: nothing listens at that port",
                "check the address and its port, and that the server runs",
                final=False,
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def host_of(url: str) -> str:
    """Host and port of an address, without a login."""
    return urlsplit(url).netloc.rpartition("@")[2] or url
