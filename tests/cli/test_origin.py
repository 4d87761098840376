"""What follows from PUBLIC_ORIGIN, and whose headers are believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmadmin.cli.services import services
from mmadmin.core.home import Home, Ports
from mmadmin.settings import allowed_hosts


@pytest.mark.parametrize(
    ("origin", "named", "hosts"),
    [
        ("", "", ["*"]),
        (
            "https://mm.example.org",
            "",
            ["mm.example.org", "localhost", "127.0.0.1", "[::1]"],
        ),
        ("https://mm.example.org", "a.org, b.org,", ["a.org", "b.org"]),
        ("", "a.org", ["a.org"]),
    ],
)
def test_hosts_follow_the_origin(origin: str, named: str, hosts: list[str]) -> None:
    """Names that are given win; else the origin's and loopback; without both every name."""
    assert allowed_hosts(origin, named) == hosts


def test_only_configured_peers_are_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwarded headers count from loopback alone, unless proxies are named."""

    def trusted() -> str:
        found = services(Home(tmp_path), Ports(1, 2, 3, 4))
        argv = list(next(s.spec.argv for s in found if s.spec.name == "panel"))
        return argv[argv.index("--forwarded-allow-ips") + 1]

    monkeypatch.delenv("MM_TRUSTED_PROXIES", raising=False)
    assert trusted() == "127.0.0.1"
    monkeypatch.setenv("MM_TRUSTED_PROXIES", "10.0.0.2,10.0.0.3")
    assert trusted() == "10.0.0.2,10.0.0.3"
