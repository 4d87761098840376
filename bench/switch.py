"""Activations and roll-backs with the real engine: `make bench-switch`.

First, with nothing else to do, roll-backs: from the click to the first token of the generation
that came back, less the engine's own loading (its process's start to its first healthy answer,
seen by a watcher of its own every 5 ms). What is left is ours: the way to the worker, looking at
closure and memory, start, proof, route, and the first token itself. Overlap and swap.

Then a steady load of plain and streamed requests goes through the gate while two generations of the
demo model follow each other: beside each other (overlap), and one after the other (swap, where the
gate holds requests). Counted are failed requests, and answers that a generation still sent after it
had drained.

A table, and one line at the end; exit 1 names what falls short. The goal of a roll-back is 1.5 s,
for the median; no single one may take more than twice that, which leaves room for what else a
machine does. `--rounds`, `--quiet-rounds`, `--clients`, `--modes` shorten it; `--json FILE` keeps
everything that was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import httpx2

from mmadmin.core.process_identity import start_time
from mmadmin.host import process_tree
from tests.e2e.installation import CATALOG, Installation, installation
from tests.support.engine import engine_store

NAME = "smollm2-135m"
OVERHEAD_S = 1.5
"""What a roll-back may take beyond the engine's own loading; the median is held to it."""
WORST_S = 2 * OVERHEAD_S
"""And any single one to this."""
LATE_S = 1.0
"""What a busy client may take to notice that an answer has ended."""
PATIENCE_S = 600
HEALTH_EVERY_S = 0.005
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    """One figure of the table, beside its limit where it has one."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """True when it holds."""
        return self.limit is None or self.value <= self.limit


@dataclass
class Request:
    """One request of the load."""

    began: float
    streamed: bool
    generation: str = ""
    first: float = 0.0
    ended: float = 0.0
    failure: str = ""


@dataclass
class Load:
    """Clients that ask without a pause, half of them for streams."""

    url: str
    key: str
    clients: int
    requests: list[Request] = field(default_factory=list)
    stopping: bool = False

    async def run(self) -> None:
        """Ask until told to stop."""
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, n) for n in range(self.clients)))

    async def _client(self, session: aiohttp.ClientSession, n: int) -> None:
        while not self.stopping:
            request = Request(time.time(), streamed=n % 2 == 0)
            self.requests.append(request)
            await ask(session, self.url, self.key, request)


async def ask(
    session: aiohttp.ClientSession, url: str, key: str, request: Request, *, tokens: int = 16
) -> None:
    """One chat completion; what went wrong is noted in words."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Count from one to ten."}],
        "max_tokens": tokens,
        "stream": request.streamed,
    }
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            request.generation = answer.headers.get("x-mm-generation", "")
            text = b""
            async for chunk in answer.content.iter_any():
                if not request.first and (not request.streamed or b"data:" in chunk):
                    request.first = time.time()
                text += chunk
            if answer.status != 200:
                request.failure = f"{answer.status} {text[:200]!r}"
            elif request.streamed and b"[DONE]" not in text:
                request.failure = f"the stream did not end: {text[-200:]!r}"
            elif not request.streamed and not json.loads(text)["choices"]:
                request.failure = "no choice"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        request.failure = f"{type(error).__name__}: {error}"
    request.ended = time.time()


@dataclass(frozen=True)
class Switch:
    """One activation or roll-back."""

    mode: str
    target: str
    left: str
    state: str
    clicked: float
    drained: float
    """When the old generation had no request any more (or the drain's time was over)."""
    routed: float
    """When the gates were told to send requests to the target."""
    load_s: float
    """From the start of the engine's process to its first healthy answer; nan = never seen."""
    phases: dict[str, float]
    """Seconds."""


def phases_of(row: Any) -> tuple[dict[str, float], float, float]:
    """Seconds by phase, and when the drain ended and the flip began."""
    seconds: dict[str, float] = {}
    drained = routed = 0.0
    for entry in row.phases:
        began = datetime.fromisoformat(entry["started"]).timestamp()
        ended = datetime.fromisoformat(entry["ended"]).timestamp() if entry["ended"] else began
        seconds[entry["phase"]] = round(ended - began, 3)
        if entry["phase"] == "drain":
            drained = ended
        if entry["phase"] == "flip":
            routed = began
    return seconds, drained, routed


class Records:
    """The installation's records, through the actions that the panel uses."""

    def __init__(self, site: Installation) -> None:
        os.environ.update({k: v for k, v in site.env.items() if k.startswith("MM_")})
        os.environ["DJANGO_SETTINGS_MODULE"] = "mmadmin.settings"
        import django  # noqa: PLC0415 (the environment comes first)

        django.setup()
        from deployments import actions  # noqa: PLC0415
        from deployments.models import (  # noqa: PLC0415
            Activation,
            Deployment,
            Replica,
            User,
        )

        self.actions, self.activations, self.deployments = actions, Activation, Deployment
        self.replicas, self.home = Replica, site.home
        self.me = User.objects.filter(role="admin").earliest("pk")

    def live(self) -> int:
        """The live generation's number."""
        return int(self.deployments.objects.values_list("live__number", flat=True).get(name=NAME))

    def switch(self, number: int, mode: str, *, back: bool) -> Switch:
        """Click, and wait until it has ended."""
        left = self.live()
        clicked = time.time()
        if back:
            started = self.actions.rollback(self.me, NAME, to=number, reason="bench")
        else:
            started = self.actions.activate(self.me, NAME, number, reason="bench")
        loading = Loading(lambda: self._socket(started.pk))
        loading.start()
        while True:
            row = self.activations.objects.get(pk=started.pk)
            if row.state not in ("queued", "running"):
                break
            if time.time() - clicked > PATIENCE_S:
                raise TimeoutError(f"activation {row.pk} hangs in {row.phase}")
            time.sleep(0.02)
        loading.stop()
        seconds, drained, routed = phases_of(row)
        return Switch(
            mode,
            f"{NAME}/{number}",
            f"{NAME}/{left}",
            row.state if row.mode == mode else f"{row.state} ({row.mode}): {row.error}",
            clicked,
            drained,
            routed,
            loading.seconds,
            seconds,
        )

    def _socket(self, activation: int) -> str | None:
        """Where the activation's new engine listens, once it has a seat."""
        found = self.replicas.objects.filter(activation=activation)
        uid = found.values_list("uid", flat=True).first()
        return str(self.home.engine_socket(uid)) if uid else None


class Loading(threading.Thread):
    """Watches one engine from its seat to its first healthy answer."""

    def __init__(self, socket: Callable[[], str | None]) -> None:
        super().__init__(daemon=True)
        self._socket = socket
        self._stopped = threading.Event()
        self.seconds = math.nan

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Ask for its health until it has some."""
        from django.db import connection  # noqa: PLC0415 (set up by now)

        path = None
        while path is None and not self._stopped.wait(HEALTH_EVERY_S):
            path = self._socket()
        connection.close()
        while path is not None and not self._stopped.wait(HEALTH_EVERY_S):
            if not healthy(path):
                continue
            seen = time.clock_gettime(time.CLOCK_BOOTTIME)
            owner = process_tree.listener(path)
            began = start_time(owner) if owner else None
            if began is not None:
                self.seconds = seen - began / TICKS
            return


def healthy(path: str) -> bool:
    """True when the engine there says so."""
    transport = httpx2.HTTPTransport(uds=path)
    with httpx2.Client(transport=transport, timeout=5) as client:
        try:
            return client.get("http://localhost/health").status_code == 200
        except httpx2.HTTPError:
            return False


@contextmanager
def site_up() -> Iterator[Installation]:
    """An installation of its own."""
    with tempfile.TemporaryDirectory(prefix="mm-switch-") as folder:
        run = installation(Path(folder), engine_store())
        try:
            yield next(run)
        finally:
            next(run, None)


def spec(mode: str, temperature: str) -> str:
    """The catalog's deployment, to be activated in that mode."""
    text = (CATALOG / f"{NAME}.toml").read_text(encoding="utf-8")
    text = text.replace("temperature = 0.2", f"temperature = {temperature}")
    return f'{text}\n[activation]\nmode = "{mode}"\ndrain_timeout_s = 120\n'


def deploy(site: Installation, folder: Path, mode: str, temperature: str, *, live: bool) -> int:
    """A generation, live or only built; its number."""
    path = folder / "spec.toml"
    path.write_text(spec(mode, temperature), encoding="utf-8")
    more = [] if live else ["--no-activate"]
    return int(site.json("deploy", str(path), "--reason", "bench", *more)["number"])


async def under_load(
    site: Installation, records: Records, key: str, mode: str, options: argparse.Namespace
) -> tuple[list[Switch], list[Request]]:
    """So many activations and roll-backs in one mode."""
    folder = Path(tempfile.mkdtemp(dir=site.home.root))
    first = await asyncio.to_thread(deploy, site, folder, mode, "0.2", live=True)
    second = await asyncio.to_thread(deploy, site, folder, mode, "0.3", live=False)
    load = Load(site.gate, key, options.clients)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(2)
    switches = []
    for n in range(options.rounds):
        for number, back in ((second, False), (first, True)):
            if await asyncio.to_thread(records.live) == number:
                continue  # the one before has failed, and is counted as that
            done = await asyncio.to_thread(records.switch, number, mode, back=back)
            switches.append(done)
            took = f"{sum(done.phases.values()):.1f} s {done.phases}"
            say(f"{mode} {n + 1}/{options.rounds} → {done.target}: {done.state} {took}")
    load.stopping = True
    await running
    return switches, load.requests


def late_by_s(request: Request, switches: Sequence[Switch]) -> float:
    """How long after its generation had drained, and before it came back, the answer ended."""
    down = 0.0
    for s in switches:
        if s.target == request.generation:
            if down and down < request.ended < s.routed:
                return request.ended - down
            down = 0.0
        if s.left == request.generation:
            down = s.drained
    return request.ended - down if down and request.ended > down else 0.0


async def click_to_token(
    site: Installation, records: Records, key: str, mode: str, rounds: int
) -> dict[str, Any]:
    """Roll-backs with nothing else to do: from the click to the first token, beyond the load.

    In overlap small requests follow each other and the first that the target answers counts; in
    swap the one that was held does. That one is plain: the head of a stream that had to wait does
    not say who will answer.
    """
    folder = Path(tempfile.mkdtemp(dir=site.home.root))
    first = await asyncio.to_thread(deploy, site, folder, mode, "0.2", live=True)
    second = await asyncio.to_thread(deploy, site, folder, mode, "0.3", live=False)
    beyond, backs, failures = [], [], []
    broken: list[Switch] = []
    async with aiohttp.ClientSession() as session:
        for n in range(rounds):
            there = await asyncio.to_thread(records.switch, second, mode, back=False)
            if there.state != "succeeded":
                broken.append(there)
                continue
            back = asyncio.create_task(asyncio.to_thread(records.switch, first, mode, back=True))
            while True:
                request = Request(time.time(), streamed=mode == "overlap")
                await ask(session, site.gate, key, request, tokens=1)
                if request.failure:
                    failures.append(request.failure)
                if request.generation == f"{NAME}/{first}" or back.done():
                    break
                await asyncio.sleep(0.02)
            done = await back
            backs.append(done)
            beyond.append(request.first - done.clicked - done.load_s)
            say(f"quiet {mode} {n + 1}/{rounds}: load {done.load_s:.2f} s, ours {beyond[-1]:.2f} s")
    return {
        "mode": f"quiet {mode}",
        "beyond_load_s": [round(seconds, 3) for seconds in beyond],
        "engine_load_s": [round(switch.load_s, 3) for switch in backs],
        "phases_median_s": medians(backs),
        "failures": failures,
        "not_succeeded": [
            asdict(switch) for switch in [*broken, *backs] if switch.state != "succeeded"
        ],
    }


def quiet_rows(found: dict[str, Any]) -> list[Row]:
    """The figures of roll-backs without load."""
    name, beyond = found["mode"].removeprefix("quiet "), found["beyond_load_s"]
    broken = len(found["failures"]) + len(found["not_succeeded"])
    head = f"click to first token, {name}"
    failures = Row(f"{head}: failures", broken, "", 0)
    if not beyond:
        return [failures]
    loads, of = statistics.median(found["engine_load_s"]), f"of {len(beyond)}"
    return [
        failures,
        Row(f"{head}: engine loads", loads, "s", note=f"median {of}; not counted below"),
        Row(f"{head}: median beyond", statistics.median(beyond), "s", OVERHEAD_S, of),
        Row(f"{head}: p95 beyond", percentile(beyond, 95), "s", note=of),
        Row(f"{head}: worst beyond", max(beyond), "s", WORST_S, of),
    ]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of them do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def medians(switches: Sequence[Switch]) -> dict[str, float]:
    """The median seconds of each phase."""
    names = dict.fromkeys(phase for switch in switches for phase in switch.phases)
    return {
        name: round(statistics.median(s.phases[name] for s in switches if name in s.phases), 3)
        for name in names
    }


def held_s(switch: Switch) -> float:
    """How long a swap's requests waited: from the hold to the flip's end."""
    names = list(switch.phases)
    first, last = names.index("hold"), names.index("flip")
    return sum(switch.phases[name] for name in names[first : last + 1])


def judge(mode: str, switches: Sequence[Switch], requests: Sequence[Request]) -> dict[str, Any]:
    """The numbers of one mode under load."""
    failed = [r for r in requests if r.failure]
    late = [late_by_s(r, switches) for r in requests]
    found: dict[str, Any] = {
        "mode": mode,
        "switches": len(switches),
        "not_succeeded": [asdict(s) for s in switches if s.state != "succeeded"],
        "requests": len(requests),
        "by_generation": dict(Counter(r.generation for r in requests)),
        "failed": len(failed),
        "failures": [r.failure for r in failed[:5]],
        "late_answers": sum(by > LATE_S for by in late),
        "latest_by_s": round(max(late), 3),
        "longest_request_s": round(max(r.ended - r.began for r in requests), 2),
        "phases_median_s": medians(switches),
    }
    holds = [(held_s(s), s.load_s) for s in switches if s.state == "succeeded" and mode == "swap"]
    if len(holds) > 1:
        found["first_hold_s"], found["first_hold_load_s"] = (round(x, 2) for x in holds[0])
        found["later_hold_s"] = round(statistics.median(held for held, _ in holds[1:]), 2)
        found["later_hold_load_s"] = round(statistics.median(load for _, load in holds[1:]), 2)
    return found


def loaded_rows(found: dict[str, Any]) -> list[Row]:
    """The figures of one mode under load."""
    head, switches = f"under load, {found['mode']}", f"of {found['switches']}"
    requests = f"of {found['requests']}"
    rows = [
        Row(f"{head}: activations that failed", len(found["not_succeeded"]), "", 0, switches),
        Row(f"{head}: requests that failed", found["failed"], "", 0, requests),
        Row(f"{head}: answers after the drain", found["late_answers"], "", 0, requests),
        Row(f"{head}: longest request", found["longest_request_s"], "s"),
    ]
    if "first_hold_s" in found:
        for which in ("first", "later"):
            load = f"of which the engine's loading {found[f'{which}_hold_load_s']:.2f}"
            name = f"{head}: hold, {which} time proved"
            rows.append(Row(name, found[f"{which}_hold_s"], "s", note=load))
    return rows


def say(line: str) -> None:
    """How far it is."""
    print(f"  {line}", file=sys.stderr, flush=True)


def show(rows: Sequence[Row]) -> None:
    """The table."""
    for row in rows:
        limit = "" if row.limit is None else f"(limit {row.limit:g})"
        word = "    " if row.limit is None else "ok  " if row.ok else "MISS"
        print(f"{word} {row.name:46} {row.value:9.2f} {row.unit:2} {limit:12} {row.note}")


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Row]]:
    """Everything, one after the other."""
    results: list[dict[str, Any]] = []
    rows: list[Row] = []
    with site_up() as site:
        records = Records(site)
        key = site.key()
        for mode in options.modes if options.quiet_rounds else []:
            quiet = click_to_token(site, records, key, mode, options.quiet_rounds)
            results.append(asyncio.run(quiet))
            rows += quiet_rows(results[-1])
        for mode in options.modes if options.rounds else []:
            switches, requests = asyncio.run(under_load(site, records, key, mode, options))
            results.append(judge(mode, switches, requests))
            rows += loaded_rows(results[-1])
    return results, rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and end with one line."""
    parser = argparse.ArgumentParser(prog="bench.switch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="activations (and roll-backs)")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--quiet-rounds", type=int, default=10, help="roll-backs without load")
    parser.add_argument("--modes", nargs="*", default=["overlap", "swap"])
    parser.add_argument("--json", type=Path, help="write all that was measured there")
    options = parser.parse_args(arguments)
    results, rows = measure(options)
    show(rows)
    if options.json:
        data = {"results": results, "rows": [asdict(row) | {"ok": row.ok} for row in rows]}
        options.json.write_text(json.dumps(data, indent=2), encoding="utf-8")
    limits = [row for row in rows if row.limit is not None]
    short = [f"{row.name} is {row.value:.2f}" for row in limits if not row.ok]
    print(
        f"bench-switch: {len(limits) - len(short)} of {len(limits)} figures hold"
        + (f"; short: {', '.join(short)}" if short else "")
    )
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
