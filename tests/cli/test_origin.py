"""What follows from PUBLIC_ORIGIN, and whose headers are believed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mmadmin.cli.services import services
from mmadmin.core.home import Home, Ports
from mmadmin.settings import LOOPBACK_NAMES, allowed_hosts


@pytest.mark.parametrize(
    ("origin", "named", "bind", "hosts"),
    [
        ("", [], "127.0.0.1", [""]),
        ("https://mm.example.org", [], "0.0.0.0", ["mm.example.org"]),
        ("https://mm.example.org", ["a.org", "B.org"], "::", ["a.org", "b.org", "mm.example.org"]),
        ("http://[2001:db8::1]:8000", [], "::", ["[2001:db8::1]"]),
        ("", ["a.org"], "0.0.0.0", ["a.org"]),
    ],
)
def test_hosts_follow_the_origin(
    origin: str, named: list[str], bind: str, hosts: list[str]
) -> None:
    """Those that are named and the origin's; loopback is never locked out, and never all are in."""
    found = allowed_hosts(origin, named, bind)
    assert found[:3] == list(LOOPBACK_NAMES)
    assert sorted(found[3:]) == sorted(filter(None, hosts))


def test_a_panel_of_the_network_answers_to_its_machine() -> None:
    """Its host names, and the addresses that it listens on; no other name."""
    one = allowed_hosts("", [], "10.1.2.3")
    assert "10.1.2.3" in one
    assert socket.gethostname().lower() in one
    every = allowed_hosts("", [], "0.0.0.0")
    assert "*" not in every
    assert "127.0.0.1" in every
    assert set(one) - {"10.1.2.3"} <= set(every)


def test_only_configured_peers_are_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's forwarded headers count, unless proxies are named: not even loopback's."""

    def argv() -> list[str]:
        found = services(Home(tmp_path), Ports(1, 2, 3))
        return list(next(s.spec.argv for s in found if s.spec.name == "panel"))

    monkeypatch.delenv("MM_TRUSTED_PROXIES", raising=False)
    assert "--no-proxy-headers" in argv()
    assert "--forwarded-allow-ips" not in argv()
    monkeypatch.setenv("MM_TRUSTED_PROXIES", "10.0.0.2,10.0.0.3")
    assert argv()[argv().index("--forwarded-allow-ips") + 1] == "10.0.0.2,10.0.0.3"
