"""`mm tunnel` on the host's functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmadmin.cli.tunnel import app
from mmadmin.core.errors import InvalidInput
from mmadmin.core.home import Home, Ports
from mmadmin.host import tunnel
from mmadmin.host.tunnel import Tunnel, TunnelState


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Tunnel]:
    """Tunnels that would have been started."""
    asked: list[Tunnel] = []

    def start(home: Home, ports: Ports, wanted: Tunnel, **options: object) -> TunnelState:
        tunnel.check(wanted, expose_panel=bool(options["expose_panel"]))
        asked.append(wanted)
        return TunnelState(wanted, "https://a-b.trycloudflare.com", "RUNNING", 1)

    monkeypatch.setenv("MM_HOME", str(tmp_path))
    monkeypatch.setattr(tunnel, "start", start)
    return asked


def test_a_quick_tunnel_leads_to_the_gate(started: list[Tunnel]) -> None:
    """The address and how clients use it are printed."""
    done = CliRunner().invoke(app, ["start"])
    assert done.exit_code == 0, done.output
    assert started == [Tunnel("public")]
    assert "https://a-b.trycloudflare.com/v1" in done.output


def test_the_panel_wants_its_word_and_its_origin(started: list[Tunnel]) -> None:
    """`--expose-panel` says what must be set; JSON is one document."""
    done = CliRunner().invoke(app, ["start", "admin", "--expose-panel"])
    assert "PUBLIC_ORIGIN=https://a-b.trycloudflare.com" in done.output
    data = json.loads(CliRunner().invoke(app, ["start", "--json"]).stdout)
    assert data["url"] == "https://a-b.trycloudflare.com"
    bad = CliRunner().invoke(app, ["start", "own", "--hostname", "x.org"])
    assert isinstance(bad.exception, InvalidInput)
    assert len(started) == 2


def test_no_tunnels(started: list[Tunnel]) -> None:
    """An installation without tunnels says so."""
    assert "no tunnels" in CliRunner().invoke(app, ["list"]).output
    assert json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout) == []
