"""A public address without an open port: Cloudflare tunnels as supervised programs.

A *quick* tunnel gets a random address for as long as it runs; a *named* one has an address of its
own and a token. Both lead to the gate. The panel is never reached through a tunnel unless
`expose_panel` says so, and then `PUBLIC_ORIGIN` must be set to the tunnel's address, since CSRF
checks and cookies are derived from it.

What runs is recorded in `MM_HOME/tunnels/<name>.json`, and each address that a tunnel ever had in
`history.jsonl` beside it. A tunnel's token lies in a 0600 file and never in argv, environment or
log.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

from mmadmin.core.build.recipe import Json
from mmadmin.core.callbacks import Report, silent
from mmadmin.core.errors import InvalidInput, NotFound, ToolMissing, Unreachable
from mmadmin.core.home import Home, Ports
from mmadmin.host.download import Remote, download
from mmadmin.host.supervisor import ProgramSpec, Supervisor

Kind = Literal["quick", "named"]
Target = Literal["gate", "panel"]

PROGRAM_PREFIX = "tunnel-"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
QUICK_URL = re.compile(r"https://[a-z0-9-]+(?:\.[a-z0-9-]+)*\.trycloudflare\.com\b")
LOG_TAIL_BYTES = 256 * 1024
START_TIMEOUT_S = 60.0
POLL_S = 0.2
STOP_S = 10
ENDED = frozenset({"FATAL", "EXITED", "STOPPED", "UNKNOWN"})


@dataclass(frozen=True, slots=True)
class Tunnel:
    """What shall be reachable, and how."""

    name: str
    kind: Kind = "quick"
    target: Target = "gate"
    hostname: str = ""
    """The public host name of a named tunnel."""
    token_file: str = ""
    """File (0600) with the token of a named tunnel."""


@dataclass(frozen=True, slots=True)
class TunnelState:
    """A tunnel as it was last seen."""

    tunnel: Tunnel
    url: str
    """The public address; empty = not known yet."""
    state: str
    """The supervisor's word: RUNNING, BACKOFF, FATAL, …; "GONE" = not supervised."""
    since: int
    """Unix seconds when the address was first seen."""

    def as_json(self) -> dict[str, Json]:
        """Plain data, for pages and `--json`."""
        return cast("dict[str, Json]", asdict(self))


def check(tunnel: Tunnel, *, expose_panel: bool = False) -> None:
    """Refuse what would not work, or would show more than was asked (`InvalidInput`)."""
    if not NAME.fullmatch(tunnel.name):
        raise InvalidInput(
            f"{tunnel.name!r} is not a valid tunnel name", remedy="use up to 31 of a-z, 0-9 and '-'"
        )
    if tunnel.target == "panel" and not expose_panel:
        raise InvalidInput(
            "a tunnel to the panel puts its login on the internet",
            remedy="ask for it (--expose-panel), and set PUBLIC_ORIGIN to the tunnel's address",
        )
    if tunnel.kind == "quick":
        return
    if not tunnel.hostname or urlsplit(f"https://{tunnel.hostname}").hostname != tunnel.hostname:
        raise InvalidInput(
            f"a named tunnel needs its public host name, not {tunnel.hostname!r}",
            remedy="write it as models.example.org",
        )
    path = Path(tunnel.token_file)
    if not tunnel.token_file or not path.is_file():
        raise InvalidInput(
            "a named tunnel needs a file with its token",
            remedy="save the token that Cloudflare shows into a file with mode 0600",
        )
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InvalidInput(f"{path} can be read by other users", remedy=f"chmod 600 {path}")


def find_cloudflared(home: Home) -> Path:
    """The program: `MM_HOME/bin/cloudflared`, else the system's. Raises `ToolMissing`."""
    own = home.root / "bin" / "cloudflared"
    if own.is_file() and os.access(own, os.X_OK):
        return own
    found = shutil.which("cloudflared")
    if found is None:
        raise ToolMissing(
            "cloudflared is not installed on this host",
            remedy="install Cloudflare's package, or fetch a release by its sha256 "
            "(`mm tunnel fetch URL SHA256 SIZE`)",
            program="cloudflared",
        )
    return Path(found)


def fetch_cloudflared(home: Home, url: str, sha256: str, size: int) -> Path:
    """Download a release by its digest into `MM_HOME/bin`. Blocking; resumes.

    Raises `DigestMismatch`, `SourceUnavailable` and its kinds.
    """
    target = home.root / "bin" / "cloudflared"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".new")
    download(
        Remote(url, label="cloudflared", headers={}),
        part,
        sha256,
        size,
        folder=home.root / "downloads",
    )
    part.chmod(0o755)
    part.replace(target)
    return target


def program(home: Home, ports: Ports, tunnel: Tunnel, cloudflared: Path) -> ProgramSpec:
    """The supervised program of a tunnel. Its argv names files, never a secret."""
    port = ports.gate if tunnel.target == "gate" else ports.panel
    argv = [str(cloudflared), "tunnel", "--no-autoupdate"]
    if tunnel.kind == "quick":
        argv += ["--url", f"http://127.0.0.1:{port}"]
    else:
        argv += ["run", "--token-file", tunnel.token_file]
    return ProgramSpec(
        name=f"{PROGRAM_PREFIX}{tunnel.name}",
        argv=argv,
        log=home.logs / f"{PROGRAM_PREFIX}{tunnel.name}.log",
        startsecs=2,
        startretries=10,
        stopwaitsecs=STOP_S,
        priority=60,
    )


def start(
    home: Home,
    ports: Ports,
    tunnel: Tunnel,
    *,
    expose_panel: bool = False,
    timeout_s: float = START_TIMEOUT_S,
    on_progress: Report = silent,
) -> TunnelState:
    """Start a tunnel and wait for its address. Replaces one of the same name.

    Raises `InvalidInput`, `ToolMissing`, and `Unreachable` with the last log line when no address
    comes; the program is stopped again then.
    """
    check(tunnel, expose_panel=expose_panel)
    spec = program(home, ports, tunnel, find_cloudflared(home))
    supervisor = Supervisor(home)
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    begin = spec.log.stat().st_size if spec.log.exists() else 0
    supervisor.start_program(spec)
    on_progress("waiting for the tunnel's address")
    deadline = time.monotonic() + timeout_s
    while True:
        url = _address(tunnel, spec.log, begin)
        found = supervisor.program(spec.name)
        state = found.state if found else "GONE"
        if url and state in ("RUNNING", "STARTING"):
            return _record(home, TunnelState(tunnel, url, state, int(time.time())))
        if state in ENDED or time.monotonic() > deadline:
            supervisor.remove_program(spec.name)
            raise Unreachable(
                f"the tunnel {tunnel.name} got no address: {_last_line(spec.log)}",
                remedy=f"check the network to Cloudflare (TCP and UDP 7844) and the log {spec.log}",
            )
        time.sleep(POLL_S)


def stop(home: Home, name: str) -> None:
    """Stop a tunnel and forget it; its history stays. Raises `NotFound`."""
    path = _folder(home) / f"{name}.json"
    if not path.exists():
        raise NotFound(f"there is no tunnel {name!r}", remedy="`mm tunnel list` shows them")
    Supervisor(home).remove_program(f"{PROGRAM_PREFIX}{name}")
    path.unlink()


def tunnels(home: Home) -> list[TunnelState]:
    """All recorded tunnels as they are now; a quick one that restarted has its new address."""
    supervisor = Supervisor(home)
    running = {p.name: p.state for p in supervisor.status()} if supervisor.running() else {}
    found = []
    for path in sorted(_folder(home).glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        tunnel = Tunnel(**data["tunnel"])
        known = TunnelState(tunnel, data["url"], data["state"], data["since"])
        name = f"{PROGRAM_PREFIX}{tunnel.name}"
        state = running.get(name, "GONE")
        url = _address(tunnel, home.logs / f"{name}.log", 0) or known.url
        if url != known.url:
            known = _record(home, TunnelState(tunnel, url, state, int(time.time())))
        found.append(TunnelState(tunnel, known.url, state, known.since))
    return found


def public_origin(states: list[TunnelState]) -> str:
    """What `PUBLIC_ORIGIN` should be: the address of the tunnel to the panel, or empty."""
    return next((s.url for s in states if s.tunnel.target == "panel" and s.url), "")


def public_url(log: str) -> str:
    """The newest quick-tunnel address in cloudflared's log, or empty.

    cloudflared prints it in a box; its API host (`api.trycloudflare.com`) is not an address.
    """
    found = [url for url in QUICK_URL.findall(log) if not url.startswith("https://api.")]
    return found[-1] if found else ""


def _address(tunnel: Tunnel, log: Path, begin: int) -> str:
    """The tunnel's address, once its log shows that it is connected."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(min(begin, size), size - LOG_TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    if tunnel.kind == "quick":
        return public_url(text)
    return f"https://{tunnel.hostname}" if "Registered tunnel connection" in text else ""


def _last_line(log: Path) -> str:
    if not log.exists():
        return "it wrote no log"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "its log is empty"


def _folder(home: Home) -> Path:
    return home.root / "tunnels"


def _record(home: Home, state: TunnelState) -> TunnelState:
    folder = _folder(home)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{state.tunnel.name}.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(state.as_json()), encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(path)
    with (folder / "history.jsonl").open("a", encoding="utf-8") as history:
        history.write(json.dumps(state.as_json()) + "\n")
    return state
