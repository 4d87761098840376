"""Activations and roll-backs under load, with the real engine: `make bench-switch`.

A steady load of plain and streamed requests goes through the gate while two generations of the
demo model follow each other: first beside each other (overlap), then one after the other (swap,
where the gate holds requests). Counted are failed requests and answers that a generation still
sent after it had drained; before that, without load, the time from the click on a roll-back to the
first token of the generation that came back. Ends with 1 when a request failed, an answer came
late, or a roll-back took more than 1.5 s beyond the engine's own loading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from mmadmin.host.engine_process import port_owner
from tests.e2e.installation import CATALOG, Installation, installation
from tests.support.engine import engine_store

NAME = "smollm2-135m"
OVERHEAD_S = 1.5
LATE_S = 1.0
"""What a busy client may take to notice that an answer has ended."""
PATIENCE_S = 600


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
    """From the engine's process to its first healthy answer."""
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
        self.replicas = Replica
        self.me = User.objects.filter(role="admin").first()

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
        load_s = 0.0
        while True:
            load_s = load_s or self._load_s(started.pk)
            row = self.activations.objects.get(pk=started.pk)
            if row.state not in ("queued", "running"):
                break
            if time.time() - clicked > PATIENCE_S:
                raise TimeoutError(f"activation {row.pk} hangs in {row.phase}")
            time.sleep(0.02)
        seconds, drained, routed = phases_of(row)
        return Switch(
            mode,
            f"{NAME}/{number}",
            f"{NAME}/{left}",
            row.state if row.mode == mode else f"{row.state} ({row.mode}): {row.error}",
            clicked,
            drained,
            routed,
            load_s,
            seconds,
        )

    def _load_s(self, activation: int) -> float:
        """How long the activation's new engine took to be healthy; 0 while it is not."""
        replica = self.replicas.objects.filter(activation=activation).first()
        if replica is None:
            return 0.0
        try:
            address = f"http://127.0.0.1:{replica.port}/health"
            with urllib.request.urlopen(address, timeout=5) as answer:
                healthy = answer.status == 200
            owner = port_owner(replica.port)
        except OSError:
            return 0.0
        return time.time() - owner.started if healthy and owner else 0.0


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
            done = await asyncio.to_thread(records.switch, number, mode, back=back)
            switches.append(done)
            print(
                f"  {mode} {n + 1}/{options.rounds} → {done.target}: {done.state} "
                f"{sum(done.phases.values()):.1f} s {done.phases}",
                file=sys.stderr,
            )
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
    site: Installation, records: Records, key: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Roll-backs with nothing else to do: from the click to the first token, beyond the load."""
    folder = Path(tempfile.mkdtemp(dir=site.home.root))
    first = await asyncio.to_thread(deploy, site, folder, "overlap", "0.2", live=True)
    second = await asyncio.to_thread(deploy, site, folder, "overlap", "0.3", live=False)
    beyond, loads, backs = [], [], []
    async with aiohttp.ClientSession() as session:
        for _ in range(options.quiet_rounds):
            await asyncio.to_thread(records.switch, second, "overlap", back=False)
            back = asyncio.create_task(
                asyncio.to_thread(records.switch, first, "overlap", back=True)
            )
            while True:
                request = Request(time.time(), streamed=True)
                await ask(session, site.gate, key, request, tokens=1)
                if request.generation == f"{NAME}/{first}":
                    break
                await asyncio.sleep(0.05)
            done = await back
            loads.append(done.load_s)
            backs.append(done)
            beyond.append(request.first - done.clicked - done.load_s)
    return {
        "mode": "quiet",
        "rollbacks": len(beyond),
        "engine_load_s": round(statistics.median(loads), 2),
        "phases_median_s": medians(backs),
        "click_to_first_token_beyond_load_s": {
            "median": round(statistics.median(beyond), 2),
            "max": round(max(beyond), 2),
        },
    }


def medians(switches: Sequence[Switch]) -> dict[str, float]:
    """The median seconds of each phase."""
    return {
        phase: round(statistics.median(s.phases.get(phase, 0) for s in switches), 2)
        for phase in switches[0].phases
    }


def judge(mode: str, switches: Sequence[Switch], requests: Sequence[Request]) -> dict[str, Any]:
    """The numbers of one mode."""
    failed = [r for r in requests if r.failure]
    late = [late_by_s(r, switches) for r in requests]
    return {
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; prints JSON."""
    parser = argparse.ArgumentParser(prog="bench.switch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="activations (and roll-backs)")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--quiet-rounds", type=int, default=5, help="roll-backs without load")
    parser.add_argument("--modes", nargs="*", default=["overlap", "swap"])
    options = parser.parse_args(arguments)
    results = []
    with site_up() as site:
        records = Records(site)
        key = site.key()
        if options.quiet_rounds:
            results.append(asyncio.run(click_to_token(site, records, key, options)))
        for mode in options.modes:
            switches, requests = asyncio.run(under_load(site, records, key, mode, options))
            results.append(judge(mode, switches, requests))
    print(json.dumps(results, indent=2))
    loaded = [r for r in results if r["mode"] != "quiet"]
    bad = any(r["failed"] or r["late_answers"] or r["not_succeeded"] for r in loaded)
    slow = any(
        r["click_to_first_token_beyond_load_s"]["median"] > OVERHEAD_S
        for r in results
        if r["mode"] == "quiet"
    )
    return 1 if bad or slow else 0


if __name__ == "__main__":
    sys.exit(main())
