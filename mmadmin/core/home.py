"""Where one installation keeps its state: the layout of `MM_HOME` and its ports.

Everything that mmadmin writes lies under one folder (default `./var`). This module only names
the places; it creates nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmadmin.core.errors import InvalidInput

DEFAULT_BIND = "127.0.0.1"
DEFAULT_PANEL_PORT = 8000
DEFAULT_GATE_PORT = 20000
NAME_MAX, PATH_MAX = 255, 1024
"""Bytes of a folder's name, and of a path that has room for ours below it."""
BEFORE_POSTGRESQL = ".before-postgresql"
"""What `mm migrate` appends to the name of the embedded database's file."""
SOCKET_PATH_LIMIT = 80
"""Bytes of the longest folder path under which our socket names still fit `sun_path` (108 bytes).

supervisord binds `supervisor.sock.<pid>` first and renames it; an engine has a folder of its own.
"""
ENGINE_SOCKET = "engine.sock"


@dataclass(frozen=True, slots=True)
class Home:
    """The layout of one installation's state folder."""

    root: Path

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Home:
        """`MM_HOME`, else `./var` of the current folder, absolute. Raises `InvalidInput`."""
        env = os.environ if env is None else env
        root = Path(env.get("MM_HOME") or "var").absolute()
        longest = max(len(os.fsencode(part)) for part in root.parts)
        if not str(root).isprintable() or longest > NAME_MAX or len(os.fsencode(root)) > PATH_MAX:
            raise InvalidInput(
                f"MM_HOME cannot be {str(root)[:80]!r}",
                remedy="use a shorter path, without control characters",
            )
        return cls(root)

    @property
    def store(self) -> Path:
        """The root of this host's store."""
        return self.root / "store"

    @property
    def database(self) -> Path:
        """The embedded SQLite database."""
        return self.root / "db.sqlite3"

    @property
    def digests(self) -> Path:
        """What is known of files outside the store that were read before."""
        return self.root / "digests.sqlite3"

    @property
    def private(self) -> tuple[Path, ...]:
        """What no deployment takes a file from, not even one by who could read it all."""
        database = [
            self.root / f"{self.database.name}{more}"
            for more in ("", "-wal", "-shm", BEFORE_POSTGRESQL)
        ]
        others = (self.secrets, self.replicas, self.supervisor, self.broker, self.gate)
        return (*database, *others, self.run_dir, self.root / "settings.env")

    @property
    def secrets(self) -> Path:
        """Folder (0700) of generated secrets, one 0600 file each."""
        return self.root / "secrets"

    def secret_file(self, variable: str) -> Path:
        """Where the value of a secret variable is kept, as `secrets/hf_token`."""
        return self.secrets / variable.removeprefix("MM_").lower()

    @property
    def identity(self) -> Path:
        """A random name of this installation's host; it moves with the folder."""
        return self.root / "host-id"

    @property
    def logs(self) -> Path:
        """Logs of the supervised processes; engines have theirs under `logs/engines`."""
        return self.root / "logs"

    def engine_log(self, uid: str) -> Path:
        """Where the output of a replica's engine goes."""
        return self.logs / "engines" / f"{uid}.log"

    @property
    def supervisor(self) -> Path:
        """Generated supervisord configuration; one file an engine under `engines/`."""
        return self.root / "supervisor"

    @property
    def broker(self) -> Path:
        """Data of the embedded broker."""
        return self.root / "broker"

    @property
    def gate(self) -> Path:
        """The gate's snapshot copy and usage spool."""
        return self.root / "gate"

    @property
    def replicas(self) -> Path:
        """Launch files (0600) of the engines, one a replica."""
        return self.root / "replicas"

    def scratch(self, uid: str) -> Path:
        """A replica's private folder (0700), from its start to its end."""
        return self.replicas / f"{uid}.scratch"

    @property
    def run_dir(self) -> Path:
        """Unix sockets and pid files; elsewhere when the path would not fit a socket address."""
        run_dir = self.root / "run"
        if len(os.fsencode(run_dir)) <= SOCKET_PATH_LIMIT:
            return run_dir
        tag = hashlib.sha256(str(self.root).encode()).hexdigest()[:12]
        return Path("/tmp") / f"mmadmin-{os.getuid()}-{tag}"  # noqa: S108 (made 0700 by `mm up`)

    def engine_socket(self, uid: str) -> Path:
        """Where a replica's engine listens: in a folder (0700) that nothing else is in."""
        return self.run_dir / hashlib.sha256(uid.encode()).hexdigest()[:12] / ENGINE_SOCKET

    @property
    def broker_socket(self) -> Path:
        """The embedded broker's Unix socket."""
        return self.run_dir / "broker.sock"

    @property
    def supervisor_socket(self) -> Path:
        """The supervisor's Unix socket (XML-RPC)."""
        return self.run_dir / "supervisor.sock"

    @property
    def broker_url(self) -> str:
        """`REDIS_URL` of the embedded broker."""
        return f"unix://{self.broker_socket}"


def own_address(env: Mapping[str, str] = os.environ) -> str:
    """The address at which this machine reaches its own panel and gate, by `MM_BIND`."""
    bind = env.get("MM_BIND") or DEFAULT_BIND
    return {"0.0.0.0": DEFAULT_BIND, "::": "::1"}.get(bind, bind)  # noqa: S104 (compared only)


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of the installation, all on the addresses that `mm up` is told."""

    panel: int
    gate: int
    metrics: int

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Ports:
        """`MM_PANEL_PORT`, `MM_GATE_PORT`, `MM_METRICS_PORT`.

        The metrics port follows the gate's port unless it is set.
        """
        env = os.environ if env is None else env
        gate = int(env.get("MM_GATE_PORT") or DEFAULT_GATE_PORT)
        return cls(
            panel=int(env.get("MM_PANEL_PORT") or DEFAULT_PANEL_PORT),
            gate=gate,
            metrics=int(env.get("MM_METRICS_PORT") or gate + 1),
        )
