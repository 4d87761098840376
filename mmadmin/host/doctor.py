"""Is this installation well? One check for each thing that it stands on, each with a remedy.

Every check looks and changes nothing, ends within seconds, and answers as data. Checks that need
what this room may not import (the database) are handed in by the caller. A check that itself
breaks is a failed check that says so; the others still run.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx2
import psutil

from mmadmin.core import catalog
from mmadmin.core.build.recipe import Json
from mmadmin.core.bytes_text import bytes_text
from mmadmin.core.errors import MmError, ToolMissing
from mmadmin.core.fit.facts import HostFacts
from mmadmin.core.fit.rules import Case, judge, version_of
from mmadmin.core.home import Home, Ports
from mmadmin.core.store.files import link
from mmadmin.host import compiler
from mmadmin.host.broker_health import broker_problem, place_of
from mmadmin.host.download import client
from mmadmin.host.engine_sandbox import holds_here, level_setting
from mmadmin.host.hub import Hub
from mmadmin.host.network import host_of, why_silent
from mmadmin.host.ports import listener
from mmadmin.host.private_files import exposed
from mmadmin.host.service_health import silent_services
from mmadmin.host.supervisor import Supervisor
from mmadmin.host.tunnel import find_cloudflared, tunnels

Level = Literal["ok", "warn", "fail"]

NET_TIMEOUT_S = 6.0
CLOCK_WARN_S, CLOCK_FAIL_S = 30, 300
DISK_WARN_BYTES, DISK_FAIL_BYTES = 20 * 1024**3, 2 * 1024**3
EXPOSED_SHOWN = 5
MEMORY_WARN_BYTES = 2 * 1024**3
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"
SERVICES = ("broker", "panel", "gate", "worker", "beat", "watchdog")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found."""

    name: str
    level: Level
    fact: str
    remedy: str = ""

    def as_json(self) -> dict[str, Json]:
        """Plain data."""
        return {"name": self.name, "level": self.level, "fact": self.fact, "remedy": self.remedy}


Check = Callable[[], Result]


@dataclass(frozen=True, slots=True)
class Patient:
    """The installation that is looked at."""

    home: Home
    ports: Ports
    facts: HostFacts
    redis_url: str
    hub: Hub
    public_origin: str = ""
    now: Callable[[], float] = time.time
    """Unix seconds, as the machine has them."""


def run_checks(patient: Patient, extra: Sequence[tuple[str, Check]] = ()) -> list[Result]:
    """All checks at once, in a fixed order; `extra` are the caller's own, by name."""
    checks = [*_checks(patient), *extra]
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        return list(pool.map(_guarded, checks))


def worst(results: Sequence[Result]) -> Level:
    """`fail` when one failed, else `warn` when one warns, else `ok`."""
    levels = {result.level for result in results}
    return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"


def _checks(patient: Patient) -> Iterator[tuple[str, Check]]:
    for name, check in (
        ("host", host),
        ("driver", driver),
        ("compiler", compilers),
        ("disk", disk),
        ("permissions", permissions),
        ("sandbox", sandbox),
        ("store", store),
        ("supervisor", supervisor),
        ("ports", ports),
        ("broker", broker),
        ("hub", hub),
        ("clock", clock),
        ("tunnel", tunnel),
    ):
        yield name, partial(check, patient)


def _guarded(named: tuple[str, Check]) -> Result:
    name, check = named
    try:
        return check()
    except MmError as error:
        return Result(name, "fail", error.message, error.remedy)
    except Exception as error:  # the other checks must still be seen
        log.exception("the check %s broke", name)
        return Result(
            name,
            "fail",
            f"the check itself broke: {type(error).__name__}: {error}",
            "report this as a bug of mmadmin, with the log",
        )


# -- the machine


def host(patient: Patient) -> Result:
    """CPU and memory."""
    facts = patient.facts
    words = (
        f"{facts.cpu_count} CPUs ({facts.cpu_model}), "
        f"{bytes_text(facts.memory_available_bytes)} of {bytes_text(facts.memory_total_bytes)}"
        " memory available"
    )
    if facts.memory_available_bytes < MEMORY_WARN_BYTES:
        return Result("host", "warn", words, "stop what is not needed: builds and models will swap")
    return Result("host", "ok", words)


def driver(patient: Patient) -> Result:
    """NVIDIA cards that the machine has, and whether their driver shows them."""
    facts = patient.facts
    cards = nvidia_cards()
    if facts.gpus:
        names = ", ".join(f"{gpu.name} ({gpu.compute_capability})" for gpu in facts.gpus)
        if len(facts.gpus) < cards:
            return Result(
                "driver",
                "warn",
                f"{cards} NVIDIA cards are plugged in, the driver shows {len(facts.gpus)}: {names}",
                "look at `nvidia-smi` and the kernel's log (Xid); a card may have fallen off",
            )
        return Result("driver", "ok", f"driver {facts.driver}: {names}")
    if cards:
        return Result(
            "driver",
            "fail",
            f"{cards} NVIDIA cards are plugged in, and no driver shows them",
            "install NVIDIA's driver (in a container: start it with --gpus all)",
        )
    return Result("driver", "ok", "no NVIDIA card: models run on the CPU")


def compilers(patient: Patient) -> Result:
    """What engine builds need: g++, cmake, ninja, and nvcc where there are GPUs."""
    found: list[str] = []
    try:
        found.append(compiler.compiler().label)
        for program in ("cmake", "ninja"):
            compiler.find(program)
            found.append(program)
    except ToolMissing as error:
        return Result("compiler", "fail", error.message, error.remedy)
    facts = patient.facts
    if not facts.gpus:
        return Result("compiler", "ok", ", ".join(found))
    if not facts.cuda:
        return Result(
            "compiler",
            "warn",
            f"{', '.join(found)}; no CUDA toolkit, so that engines are built for the CPU alone",
            "install a CUDA toolkit (nvcc); for a V100 one of version 12",
        )
    for kind in sorted(catalog.engines()):
        case = Case(kind, architectures=facts.cuda_architectures, cuda=version_of(facts.cuda))
        for finding in judge(case).refusals:
            return Result("compiler", "fail", finding.message, finding.remedy)
    return Result("compiler", "ok", ", ".join([*found, f"CUDA {facts.cuda}"]))


def disk(patient: Patient) -> Result:
    """Room on the store's file system."""
    usage = shutil.disk_usage(_existing(patient.home.store))
    words = f"{bytes_text(usage.free)} of {bytes_text(usage.total)} free for {patient.home.store}"
    remedy = "`mm store gc` shows what can go; or move MM_HOME to a larger disk"
    if usage.free < DISK_FAIL_BYTES:
        return Result("disk", "fail", words, remedy)
    if usage.free < DISK_WARN_BYTES:
        return Result("disk", "warn", words, remedy)
    return Result("disk", "ok", words)


def clock(patient: Patient) -> Result:
    """The clock against the hub's: leases, key expiry and tokens rely on it."""
    answer = "" if patient.hub.unusable else _ask(patient.hub.endpoint)
    if isinstance(answer, str) or "date" not in answer.headers:
        return Result(
            "clock",
            "ok",
            f"it is {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}; not compared",
        )
    off = abs(patient.now() - parsedate_to_datetime(answer.headers["date"]).timestamp())
    words = f"{off:.0f} s apart from {urlsplit(patient.hub.endpoint).hostname}"
    if off > CLOCK_WARN_S:
        level: Level = "fail" if off > CLOCK_FAIL_S else "warn"
        return Result("clock", level, words, "set the clock: install chrony or systemd-timesyncd")
    return Result("clock", "ok", words)


# -- the installation


def permissions(patient: Patient) -> Result:
    """The state folder and all below it are ours alone."""
    home = patient.home
    if not home.root.exists():
        return Result("permissions", "warn", f"{home.root} does not exist yet", "run `mm up`")
    wrong = list(exposed(home))
    if not wrong:
        return Result("permissions", "ok", f"{home.root} and all below it are ours alone")
    shown = [str(found) for found in wrong[:EXPOSED_SHOWN]]
    if len(wrong) > EXPOSED_SHOWN:
        shown.append(f"and {len(wrong) - EXPOSED_SHOWN} more")
    foreign = any(found.foreign for found in wrong)
    remedy = f"chown -R $(id -u) {home.root}, then `mm up`" if foreign else "`mm up` corrects it"
    return Result("permissions", "fail", "; ".join(shown), remedy)


def sandbox(_patient: Patient) -> Result:
    """What engines are kept from here, as it was tried."""
    held = holds_here(level_setting())
    if held.all:
        return Result("sandbox", "ok", held.message)
    if held.level == "bubblewrap":
        remedy = "nothing: this kind of processor has no filter of system calls yet"
    else:
        remedy = (
            "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, AppArmor's "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container: --security-opt "
            "seccomp=unconfined) and leave MM_SANDBOX unset; until then, an engine can read what "
            "the user of mmadmin can read"
        )
    return Result("sandbox", "warn", held.message, remedy)


def store(patient: Patient) -> Result:
    """The store's folder can be written, whether links work, and that it is one file system."""
    root = patient.home.store
    if not root.exists():
        return Result("store", "ok", f"{root} does not exist yet; the first build makes it")
    parts = [
        part for part in ("blobs", "objects", "staging", "downloads") if (root / part).exists()
    ]
    devices = {(root / part).stat().st_dev for part in parts}
    if len(devices) > 1:
        return Result(
            "store",
            "fail",
            f"parts of {root} lie on different file systems, so that nothing can be linked",
            "keep the whole store on one file system",
        )
    try:
        with tempfile.TemporaryDirectory(dir=root, prefix=".doctor-") as folder:
            one = Path(folder) / "one"
            one.write_bytes(b"1")
            links = link(one, Path(folder) / "two")
    except OSError as error:
        return Result(
            "store",
            "fail",
            f"{root} cannot be written: {error.strerror}",
            "check the disk, its mount options and the owner of the folder",
        )
    objects = sum(1 for path in (root / "objects").glob("*.json")) if parts else 0
    if not links:
        return Result(
            "store",
            "warn",
            f"{objects} objects in {root}, whose file system has no hard links: files are copied",
            "a file system with hard links needs about half the room",
        )
    return Result("store", "ok", f"{objects} objects in {root}")


def supervisor(patient: Patient) -> Result:
    """The supervisor answers and its programs run."""
    control = Supervisor(patient.home)
    if not control.running():
        if (pid := control.without_socket()) is not None:
            fact = (
                f"it runs (pid {pid}), but its socket {patient.home.supervisor_socket} was removed"
            )
            return Result("supervisor", "fail", fact, "wait some seconds: it makes it again")
        return Result("supervisor", "warn", "it does not run", "run `mm up`")
    programs = control.status()
    bad = [p for p in programs if p.state in ("FATAL", "BACKOFF", "UNKNOWN")]
    if bad:
        return Result(
            "supervisor",
            "fail",
            "; ".join(
                f"{p.name} is {p.state}{f' ({p.message})' if p.message else ''}" for p in bad
            ),
            f"look at {bad[0].log} (`mm logs {bad[0].name}`)",
        )
    stopped = [p.name for p in programs if p.name in SERVICES and p.state != "RUNNING"]
    if stopped:
        return Result("supervisor", "warn", f"not running: {', '.join(stopped)}", "run `mm up`")
    if silent := silent_services(programs, patient.ports):
        return Result(
            "supervisor",
            "fail",
            f"not answering: {', '.join(program.name for program in silent)}",
            f"wait a minute: the watchdog ends a service that hangs; else read {silent[0].log}",
        )
    return Result("supervisor", "ok", f"{len(programs)} programs run")


def ports(patient: Patient) -> Result:
    """The panel's, the gate's and its metrics port: ours, or free."""
    home = patient.home
    control = Supervisor(home)
    ours: set[int | None] = set(control.own_pids())
    if control.running():
        ours |= {p.pid for p in control.status()}
    taken: list[str] = []
    for name, port in (
        ("panel", patient.ports.panel),
        ("gate", patient.ports.gate),
        ("metrics", patient.ports.metrics),
    ):
        found = listener(port)
        if found is None or (found.pid is not None and _is_under(found.pid, ours)):
            continue
        taken.append(f"the {name} port {port} is held by {found}")
    if taken:
        return Result(
            "ports",
            "fail",
            "; ".join(taken),
            "stop that program, or set MM_PANEL_PORT, MM_GATE_PORT, MM_METRICS_PORT",
        )
    numbers = f"{patient.ports.panel}, {patient.ports.gate}, {patient.ports.metrics}"
    return Result("ports", "ok", f"{numbers} are ours or free")


def broker(patient: Patient) -> Result:
    """The broker answers and takes writes."""
    where = place_of(patient.redis_url)
    problem = broker_problem(patient.redis_url)
    if problem is None:
        return Result("broker", "ok", f"{where} answers and takes writes")
    down = not problem.answers and not Supervisor(patient.home).running()
    return Result("broker", "warn" if down else "fail", f"{where} {problem.fact}", problem.remedy)


# -- the world


def hub(patient: Patient) -> Result:
    """The model hub can be reached; only new builds need it."""
    if (why := patient.hub.unusable) is not None:
        return Result("hub", "warn", why.message, why.remedy)
    answer = _ask(patient.hub.endpoint)
    name = urlsplit(patient.hub.endpoint).hostname or patient.hub.endpoint
    if isinstance(answer, str):
        return Result(
            "hub",
            "warn",
            f"{name} cannot be reached ({answer}); what is built serves on without it",
            "check network, proxy (HTTPS_PROXY) and HF_ENDPOINT; SSL_CERT_FILE names authorities",
        )
    if answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
        return Result("hub", "warn", f"{name} answers {answer.status_code}", "try again later")
    token = "with a token" if patient.hub.token else "without a token: gated models are refused"
    return Result("hub", "ok", f"{name} answers, {token}")


def tunnel(patient: Patient) -> Result:
    """Tunnels run, and a panel behind one has its public origin set."""
    states = tunnels(patient.home)
    if not states:
        try:
            found = find_cloudflared(patient.home)
        except ToolMissing:
            return Result("tunnel", "ok", "none, and cloudflared is not installed")
        return Result("tunnel", "ok", f"none; {found} is there for one")
    down = [s for s in states if s.state != "RUNNING"]
    if down:
        return Result(
            "tunnel",
            "fail",
            "; ".join(f"{s.tunnel.name} is {s.state}" for s in down),
            f"look at {patient.home.logs / f'tunnel-{down[0].tunnel.name}.log'}, start it again",
        )
    for state in states:
        if state.tunnel.target == "panel" and patient.public_origin != state.url:
            return Result(
                "tunnel",
                "fail",
                f"the panel is reached at {state.url}, PUBLIC_ORIGIN is "
                f"{patient.public_origin or 'not set'}: forms are refused",
                f"set PUBLIC_ORIGIN={state.url} and run `mm up`",
            )
    return Result("tunnel", "ok", "; ".join(f"{s.tunnel.name}: {s.url}" for s in states))


# -- repairs


def nvidia_cards(pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA display or 3D controllers on the PCI bus, whatever drives them."""
    count = 0
    for device in pci.glob("*"):
        try:
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
        except OSError:
            continue
        count += vendor == NVIDIA_VENDOR and kind.startswith(DISPLAY_CLASS)
    return count


def _ask(url: str) -> httpx2.Response | str:
    """The answer of a server, or in a word why there is none."""
    try:
        with client(stall_s=NET_TIMEOUT_S) as http:
            return http.head(url, timeout=NET_TIMEOUT_S)
    except httpx2.HTTPError as error:
        silence = why_silent(error, host_of(url))
        return silence.message if silence else type(error).__name__


def _is_under(pid: int, ours: set[int | None]) -> bool:
    """True when a process is one of ours or a child of one."""
    if pid in ours:
        return True
    try:
        return any(parent.pid in ours for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def _existing(path: Path) -> Path:
    return next(p for p in [path.absolute(), *path.absolute().parents] if p.exists())
