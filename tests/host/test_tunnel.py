"""Tunnels as supervised programs, with a stub in cloudflared's place."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mmadmin.core.errors import DigestMismatch, InvalidInput, NotFound, ToolMissing, Unreachable
from mmadmin.core.home import Home, Ports
from mmadmin.host import tunnel as tunnel_module
from mmadmin.host.supervisor import Supervisor
from mmadmin.host.tunnel import (
    Tunnel,
    check,
    fetch_cloudflared,
    find_cloudflared,
    program,
    public_origin,
    public_url,
    start,
    stop,
    tunnels,
)
from tests.support.hub import local_hub

STUB = Path(__file__).with_name("stub_cloudflared.py")
PORTS = Ports(panel=8080, gate=28000, metrics=28001)
TOKEN = "eyJ-canary-77c1"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """An installation with a running supervisor and a stub cloudflared in its own bin folder."""
    home = Home(tmp_path_factory.mktemp("home"))
    stub = home.root / "bin" / "cloudflared"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(STUB)])} "$@"\n')
    stub.chmod(0o755)
    supervisor = Supervisor(home)
    supervisor.launch()
    yield home
    supervisor.shutdown(30, lambda _line: None)
    assert supervisor.end_leftovers() == []


def token_file(folder: Path, mode: int = 0o600) -> Path:
    """A token as Cloudflare gives it, in a file."""
    path = folder / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    return path


def test_a_quick_tunnel_is_started_shown_and_recorded(home: Home) -> None:
    """Its address comes from its log; state and history are kept; stopping ends the process."""
    state = start(home, PORTS, Tunnel("public"))
    assert state.url == "https://crossing-exhibit-mlb-stub.trycloudflare.com"
    assert [(t.url, t.tunnel.target) for t in tunnels(home)] == [(state.url, "gate")]
    record = home.root / "tunnels" / "public.json"
    assert record.stat().st_mode & 0o777 == 0o600
    history = (home.root / "tunnels" / "history.jsonl").read_text().splitlines()
    assert json.loads(history[-1])["url"] == state.url
    pid = Supervisor(home).pid("tunnel-public")
    assert pid is not None
    assert "http://127.0.0.1:28000" in psutil.Process(pid).cmdline()
    stop(home, "public")
    assert not psutil.pid_exists(pid)
    assert tunnels(home) == []
    with pytest.raises(NotFound, match="no tunnel 'public'"):
        stop(home, "public")


def test_a_named_tunnel_keeps_its_token_to_itself(home: Home, tmp_path: Path) -> None:
    """The address is its own; the token is in no argv, configuration, record or log."""
    named = Tunnel(
        "own", "named", hostname="models.example.org", token_file=str(token_file(tmp_path))
    )
    state = start(home, PORTS, named)
    assert state.url == "https://models.example.org"
    pid = Supervisor(home).pid("tunnel-own")
    assert pid is not None
    process = psutil.Process(pid)
    assert TOKEN not in " ".join(process.cmdline()) + str(process.environ())
    for path in home.root.rglob("*"):
        with suppress(FileNotFoundError):  # put in another's place just now
            assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    stop(home, "own")


def test_no_address_is_explained_and_nothing_stays(home: Home) -> None:
    """A program that ends is not waited for; the last log line says why."""
    nowhere = Ports(panel=1, gate=9, metrics=2)
    with pytest.raises(Unreachable, match="no route to host"):
        start(home, nowhere, Tunnel("broken"), timeout_s=60)
    assert Supervisor(home).program("tunnel-broken") is None
    assert tunnels(home) == []


def test_the_panel_is_not_exposed_unless_asked(tmp_path: Path) -> None:
    """A tunnel to the panel needs the word, and then its address is the public origin."""
    panel = Tunnel("admin", target="panel")
    with pytest.raises(InvalidInput, match="login on the internet"):
        check(panel)
    check(panel, expose_panel=True)
    argv = program(Home(tmp_path), PORTS, panel, Path("/bin/cloudflared")).argv
    assert argv[-1] == "http://127.0.0.1:8080"
    gate = tunnel_module.TunnelState(Tunnel("a"), "https://a.trycloudflare.com", "RUNNING", 1)
    admin = tunnel_module.TunnelState(panel, "https://b.trycloudflare.com", "RUNNING", 1)
    assert public_origin([gate]) == ""
    assert public_origin([gate, admin]) == "https://b.trycloudflare.com"
    assert admin.as_json()["url"] == "https://b.trycloudflare.com"


@pytest.mark.parametrize(
    ("tunnel", "message"),
    [
        (Tunnel("No Good"), "not a valid tunnel name"),
        (Tunnel("own", "named"), "host name"),
        (Tunnel("own", "named", hostname="https://x.org"), "host name"),
        (Tunnel("own", "named", hostname="x.org"), "file with its token"),
        (
            Tunnel("own", "named", hostname="x.org", token_file="/nonexistent"),
            "file with its token",
        ),
    ],
)
def test_bad_tunnels_are_refused(tunnel: Tunnel, message: str) -> None:
    """Each refusal names what is missing."""
    with pytest.raises(InvalidInput, match=message):
        check(tunnel)


def test_a_readable_token_is_refused(tmp_path: Path) -> None:
    """A token file that others can read is refused with the command that mends it."""
    path = token_file(tmp_path, 0o644)
    with pytest.raises(InvalidInput) as caught:
        check(Tunnel("own", "named", hostname="x.org", token_file=str(path)))
    assert caught.value.remedy == f"chmod 600 {path}"


def test_addresses_in_logs() -> None:
    """The newest address counts; the API's host is none."""
    assert public_url("POST https://api.trycloudflare.com/tunnel") == ""
    assert (
        public_url("| https://one-two.trycloudflare.com |\n| https://three.trycloudflare.com |")
        == "https://three.trycloudflare.com"
    )
    assert public_url("https://evil.example/trycloudflare.com") == ""


def test_cloudflared_is_found_or_fetched_by_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing: said with the remedy. Fetched: only the bytes with the digest, executable."""
    monkeypatch.setenv("PATH", str(tmp_path))
    home = Home(tmp_path / "home")
    with pytest.raises(ToolMissing, match="not installed"):
        find_cloudflared(home)
    data = b"#!/bin/sh\necho cloudflared\n" * 100
    with local_hub() as hub:
        hub.plain["cloudflared"] = data
        url = f"{hub.url}/cloudflared"
        with pytest.raises(DigestMismatch):
            fetch_cloudflared(home, url, "0" * 64, len(data))
        found = fetch_cloudflared(home, url, hashlib.sha256(data).hexdigest(), len(data))
    assert found == find_cloudflared(home)
    assert os.access(found, os.X_OK)
    assert found.read_bytes() == data
