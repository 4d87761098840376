"""One installation on this machine: its folder, secrets, remembered settings and ports.

Importing this loads no framework. `load_environment` must have run before anything reads
`mmadmin.settings`, because the settings come from the environment.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from mmadmin.cli.settings_file import (
    Problem,
    check_settings,
    read_settings,
    settings_file,
    write_settings,
)
from mmadmin.core.errors import Conflict, InvalidInput
from mmadmin.core.home import DEFAULT_BIND, Home, Ports, own_address
from mmadmin.core.private_file import write_private
from mmadmin.core.variables import VARIABLES
from mmadmin.host.private_files import make_private

CHECKOUT = Path(__file__).resolve().parents[2]
SECRETS = ("django_secret_key", "key_pepper", "engine_master")
SECRET_BYTES = 48


def load_environment() -> tuple[Problem, ...]:
    """Fix `MM_HOME` and fill the environment with remembered settings that it does not have.

    Without `MM_HOME` the state is in `var/` of the checkout, wherever the command is typed. A
    variable that is set to nothing is one that is not set. Returns the lines that cannot be used.
    """
    if not os.environ.get("MM_HOME"):
        os.environ["MM_HOME"] = str(CHECKOUT / "var")
    home = Home.from_env()
    os.environ["MM_HOME"] = str(home.root)
    for name, variable in VARIABLES.items():
        if os.environ.get(name) == "":  # as if it were not set: what is kept holds
            del os.environ[name]
        if variable.kind == "proxy" and (value := os.environ.pop(name.lower(), "")):
            os.environ[name] = value  # what libraries prefer to the name in capitals
        if (path := os.environ.get(f"{name}_FILE")) and name not in os.environ:
            os.environ[name] = _file_value(f"{name}_FILE", Path(path))
    _check_environment()
    kept = read_settings(home)
    for name, value in kept.values.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mmadmin.settings")
    return kept.problems


def check_settings_file(home: Home) -> None:
    """Refuse to start services while a line of the settings cannot be used."""
    if problems := read_settings(home).problems:
        raise InvalidInput(
            "; ".join(problem.message for problem in problems),
            remedy="; ".join(dict.fromkeys(problem.remedy for problem in problems)),
        )


def _check_environment() -> None:
    """Bring our variables into their form; refuse wrong ones before a service fails on them.

    Those that a library reads may be meant for other programs: `mm up` and `mm set` check them.
    """
    for name, variable in VARIABLES.items():
        if not (value := os.environ.get(name)):
            continue
        os.environ[name] = clean = variable.clean(value)
        own = name.startswith(("MM_", "PUBLIC_"))
        if own and not variable.secret and (problem := variable.problem(clean)):
            raise InvalidInput(f"{name}: {problem}", remedy=f"set {name} to another value")


def _file_value(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidInput(f"{name}: {path} cannot be read: {error.strerror}") from error


def bind_address() -> str:
    """The address that panel and gate listen on."""
    return os.environ.get("MM_BIND") or DEFAULT_BIND


def reachable_address() -> str:
    """The address in a URL by which this machine reaches its own panel and gate."""
    address = own_address()
    return f"[{address}]" if ":" in address else address


def panel_url(ports: Ports) -> str:
    """Where people open the panel."""
    origin = os.environ.get("PUBLIC_ORIGIN", "").rstrip("/")
    return origin or f"http://{reachable_address()}:{ports.panel}"


def public_gate_url(ports: Ports) -> str:
    """Where clients find the gate, without `/v1`."""
    return os.environ.get("MM_GATE_ORIGIN") or gate_url(ports)


def gate_url(ports: Ports) -> str:
    """Where this machine finds its own gate, without `/v1`."""
    return f"http://{reachable_address()}:{ports.gate}"


def is_set_up(home: Home) -> bool:
    """True when `mm up`, `mm init` or `mm run` has made this folder."""
    return settings_file(home).exists()


def has_sqlite_records(home: Home) -> bool:
    """True when this installation's records are, or were, in the embedded database."""
    return home.database.exists() and home.database.stat().st_size > 0


def refuse_other_database(home: Home, url: str) -> None:
    """Refuse to start silently with another, empty database. Raises `Conflict`."""
    if url and has_sqlite_records(home) and not read_settings(home).values.get("DATABASE_URL"):
        raise Conflict(
            f"the records of this installation are in {home.database}, not in the database that"
            " DATABASE_URL names",
            remedy="`mm migrate` moves them there; to begin without them, move that file away",
        )


def remember(home: Home) -> None:
    """Keep the settings of this run for services and later commands. Raises `InvalidInput`."""
    check_settings(os.environ)
    refuse_other_database(home, os.environ.get("DATABASE_URL", ""))
    write_settings(home, os.environ)


def prepare(home: Home) -> None:
    """Make the layout and the secrets; changes nothing that is there. Idempotent."""
    try:
        _make(home)
    except OSError as error:
        raise InvalidInput(
            f"{home.root} cannot hold an installation: {error.strerror} ({error.filename})",
            remedy="let MM_HOME name a folder of your own, on a disk with room",
        ) from error


def _make(home: Home) -> None:
    home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    private = (home.secrets, home.run_dir, home.replicas, home.gate, home.broker)
    for folder in (*private, home.logs / "engines", home.supervisor, home.root / "static"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.run_dir.chmod(0o700)  # may lie elsewhere
    for name in SECRETS:
        path = home.secrets / name
        if not path.exists():
            write_private(path, secrets.token_urlsafe(SECRET_BYTES) + "\n")
    if not settings_file(home).exists():
        write_settings(home, {})
    if not os.environ.get("DATABASE_URL"):
        home.database.touch(mode=0o600)
    make_private(home)


def _free_after(port: int) -> int:
    """The next port that nothing holds at the moment."""
    for candidate in range(port + 1, 65536):
        with suppress(OSError):
            _listen_on(candidate)
            return candidate
    return port + 1


def _listen_on(port: int) -> None:
    """Listen for a moment where our services would. Raises `OSError` when that cannot be."""
    family = socket.AF_INET6 if ":" in bind_address() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((bind_address(), port))
        probe.listen(1)


def check_port(port: int, variable: str, what: str) -> None:
    """Raise `Conflict`, naming the process, when a port that we need is taken."""
    try:
        _listen_on(port)
    except PermissionError as error:
        raise Conflict(
            f"port {port} ({what}) may not be opened by this user",
            remedy=f"choose one above 1023: {variable}=NUMBER make up",
        ) from error
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise InvalidInput(
                f"MM_BIND: {bind_address()} is not an address of this machine",
                remedy="use 127.0.0.1, 0.0.0.0, or one of its addresses",
            ) from error
        from mmadmin.host.ports import listener

        holder = listener(port)
        raise Conflict(
            f"port {port} ({what}) is taken by {holder or f'something: {error.strerror}'}",
            remedy=f"end that process, or choose another port: {variable}={_free_after(port)}"
            " make up",
            port=port,
            pid=holder.pid if holder else None,
        ) from error
