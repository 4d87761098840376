"""The way to an address that a deployment names, by the policy of who asks.

A connection is made to the very address that was checked, also after a redirect.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.request import getproxies, proxy_bypass

import httpcore2
import httpx2

from mmadmin.core.build.recipe import UrlSource
from mmadmin.core.errors import (
    Cancelled,
    DiskFull,
    MmError,
    SourceRefused,
    SourceUnavailable,
)
from mmadmin.core.source_policy import (
    Access,
    Address,
    is_public,
    literal_address,
    unmapped,
)


@dataclass(slots=True)
class Reach(httpcore2.NetworkBackend):
    """Connects to those addresses of a host that the policy allows, for one pinned file."""

    access: Access
    sha256: str
    where: str
    """The field of the deployment file that a refusal names."""
    hidden: bool = False
    """A private address was reached for an operator, who is not told what it answered."""
    inner: httpcore2.NetworkBackend = field(default_factory=httpcore2.SyncBackend)

    def addresses(self, host: str, port: int) -> list[Address]:
        """The allowed ones. Raises `SourceRefused`, also for a name that nobody knows."""
        known = resolved(host, port)
        if self.access.on_host:
            return known
        allowed = self.access.reachable(host, known, self.sha256, self.where)
        self.hidden |= not self.access.by_admin and not all(map(is_public, allowed))
        return allowed

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the first allowed address that takes the connection."""
        failed: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in self.addresses(host, port):
            try:
                return self.inner.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failed = error
        raise failed

    @contextmanager
    def telling(self, label: str) -> Iterator[None]:
        """What fails within at a private address is told an operator in one sentence only."""
        try:
            yield
        except (Cancelled, DiskFull, SourceRefused):
            raise
        except MmError:
            if not self.hidden:
                raise
            raise SourceUnavailable(
                f"{label}: the pinned file is not to be had from this address",
                remedy="ask an admin: a deploy of theirs, or `mm deploy` on the host, says why",
            ) from None

    def tell(self, report: Callable[[str], None]) -> Callable[[str], None]:
        """`report`, but for what a private address answered."""
        return lambda line: None if self.hidden else report(line)


def resolved(host: str, port: int) -> list[Address]:
    """The addresses of a host, each once; none for a name that is not known."""
    literal = literal_address(host)
    if literal is not None:
        return [literal]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    texts = [str(entry[4][0]).partition("%")[0] for entry in found]
    return list(dict.fromkeys(unmapped(ipaddress.ip_address(text)) for text in texts))


class GuardedTransport(httpx2.HTTPTransport):
    """Sends requests to allowed addresses; each hop of a redirect comes through here.

    Where the environment names a proxy, that one resolves names: they are checked as this host
    resolves them, and what only the proxy knows is left to it.
    """

    def __init__(self, reach: Reach, context: ssl.SSLContext) -> None:
        super().__init__(verify=context)
        self._pool = httpcore2.ConnectionPool(ssl_context=context, network_backend=reach)
        self._reach, self._context = reach, context
        self._proxied: dict[str, httpx2.HTTPTransport] = {}

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request."""
        url, reach = request.url, self._reach
        reach.access.check_source(UrlSource(str(url)), reach.sha256, reach.where)
        proxies = getproxies()
        proxy = proxies.get(url.scheme) or proxies.get("all")
        if not proxy or proxy_bypass(url.host):
            return super().handle_request(request)
        port = url.port or (80 if url.scheme == "http" else 443)
        if resolved(url.host, port):
            reach.addresses(url.host, port)
        if proxy not in self._proxied:
            self._proxied[proxy] = httpx2.HTTPTransport(verify=self._context, proxy=proxy)
        return self._proxied[proxy].handle_request(request)

    def close(self) -> None:
        """Close every connection."""
        super().close()
        for transport in self._proxied.values():
            transport.close()
