"""Whether the broker answers and takes writes: it can do the first and refuse the second."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

TIMEOUT_S = 6.0
FULL_DISK = "free room on its disk, and look whether that is mounted read-only; it recovers then"


@dataclass(frozen=True, slots=True)
class BrokerProblem:
    """Why the broker cannot be used."""

    fact: str
    remedy: str
    answers: bool = True
    """False = nobody answers there."""


def place_of(redis_url: str) -> str:
    """Where the broker is, for people."""
    url = urlsplit(redis_url)
    return url.path if url.scheme == "unix" else f"{url.hostname}:{url.port or 6379}"


def broker_problem(redis_url: str) -> BrokerProblem | None:
    """Ask the broker; None = it answers and takes writes. Blocking, for `TIMEOUT_S` at most."""
    try:
        ping, info = _ask(redis_url)
    except OSError as error:
        embedded = urlsplit(redis_url).scheme == "unix"
        return BrokerProblem(
            f"does not answer ({error.strerror or type(error).__name__})",
            "run `mm up`" if embedded else "check REDIS_URL and that server",
            answers=False,
        )
    if ping.startswith("-MISCONF") or info.get("aof_last_write_status") == "err":
        return BrokerProblem("refuses writes: it cannot write to its disk", FULL_DISK)
    if not ping.startswith("+PONG"):
        return BrokerProblem(f"says {ping!r}", "check REDIS_URL and its password")
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if limit and used >= limit:
        return BrokerProblem(
            f"refuses writes: it holds {used >> 20} MiB of at most {limit >> 20} MiB (maxmemory)",
            "raise maxmemory in its configuration, or set it to 0; what waits begins then",
        )
    if info.get("role") == "slave":
        return BrokerProblem("refuses writes: it is a replica", "let REDIS_URL name the primary")
    return None


def _ask(redis_url: str) -> tuple[str, dict[str, str]]:
    """PING and INFO in the broker's protocol, with its password where the address has one."""
    url = urlsplit(redis_url)
    if url.scheme == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: str | tuple[str, int] = url.path
    else:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        address = (url.hostname or "127.0.0.1", url.port or 6379)
    connection.settimeout(TIMEOUT_S)
    with connection:
        connection.connect(address)
        file = connection.makefile("rb")
        if url.password:
            words = [w for w in (unquote(url.username or ""), unquote(url.password)) if w]
            connection.sendall(_command("AUTH", *words))
            said = file.readline().decode(errors="replace").strip()
            if not said.startswith("+OK"):
                return said, {}
        connection.sendall(_command("PING"))
        said = file.readline().decode(errors="replace").strip()
        connection.sendall(_command("INFO"))
        head = file.readline()
        text = file.read(int(head[1:])).decode(errors="replace") if head.startswith(b"$") else ""
    lines = (line.partition(":") for line in text.splitlines() if ":" in line)
    return said, {name: value for name, _, value in lines}


def _command(*words: str) -> bytes:
    parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
    return f"*{len(words)}\r\n{''.join(parts)}".encode()
