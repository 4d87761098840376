"""How long the panel's pages take with years of records: `python -m bench.panel`.

A SQLite database gets 10,000 generations, 10,000 keys and 1,000,000 usage rows. Every page is
asked for many times, in this process, with nothing remembered from the time before: the 95th
percentile of its time, the number of queries (compared with that of a nearly empty database) and
its weight with all that it loads are held against their aims. Then 200 pages are open while a
build writes, and a browser beside them shows how late an event is on the screen. Exits 1 naming
what falls short.

`--home DIR` keeps the database there and uses it again; `--postgres` measures on a PostgreSQL
server of its own.
"""

# ruff: noqa: PLC0415 (Django's models can be imported only once it is set up)

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import panel_live, panel_records
from tests.support.ports import free_ports
from tests.with_postgres import postgres

PAGE_MS = 100.0
"""Server time of a page, 95th percentile."""
PAGE_KB = 200.0
"""A page with all that it loads, nothing cached or compressed."""
SCREEN_S = 1.0
"""From what a worker writes to the screen, 95th percentile, with 200 pages open."""
BESIDE_MS = 250.0
"""Somebody else's overview meanwhile, from asking to having it, 95th percentile."""
STATIC = re.compile(rb"/static/[^\"'#?]+")


def main() -> int:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--usage", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--home", type=Path, help="keep the records here and use them again")
    parser.add_argument("--postgres", action="store_true", help="measure on PostgreSQL")
    parser.add_argument("--only", default="", help="just the pages whose address holds this")
    parser.add_argument("--queries", action="store_true", help="just count queries, as JSON")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    if wanted.home and wanted.postgres:
        parser.error("--postgres keeps nothing: leave --home out")
    with installation(wanted.home, on_postgres=wanted.postgres) as folder:
        filled_s = fill(folder, wanted)
        if wanted.queries:
            print(json.dumps([count_queries(page) for page in pages()]))
            return 0
        rows = [measure(page, wanted.rounds) for page in pages() if wanted.only in page]
        if not wanted.only:
            for row, few in zip(rows, queries_of_few(), strict=True):
                row["queries_of_few"] = few
        seen = None if wanted.only else live()
    return report(wanted, filled_s, rows, seen)


@contextmanager
def installation(home: Path | None, *, on_postgres: bool = False) -> Iterator[Path]:
    """A folder with a broker that answers, and Django set up on it."""
    with ExitStack() as stack:
        passing = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mm-bench-panel-")))
        folder = home or passing
        folder.mkdir(parents=True, exist_ok=True)
        url = stack.enter_context(panel_live.broker(passing))
        os.environ |= {"MM_HOME": str(folder), "REDIS_URL": url}
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        os.environ.pop("DATABASE_URL", None)
        if on_postgres:
            os.environ["DATABASE_URL"] = stack.enter_context(postgres())
        import django

        django.setup()
        yield folder


def fill(folder: Path, wanted: argparse.Namespace) -> float:
    """Write the records, unless they are there; returns seconds."""
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    done = folder / "filled.json"
    sizes = [wanted.generations, wanted.keys, wanted.usage]
    if done.exists() and json.loads(done.read_text()) == sizes:
        return 0.0
    begin = time.monotonic()
    panel_records.fill(*sizes)
    done.write_text(json.dumps(sizes))
    return time.monotonic() - begin


def queries_of_few() -> list[int]:
    """The number of queries of each page where there is little of everything."""
    few = ["--generations", "60", "--keys", "60", "--usage", "600", "--queries"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.panel", *few], check=True, capture_output=True, text=True
    )
    return list(json.loads(done.stdout))


def live() -> panel_live.Seen:
    """Open pages while a build writes."""
    from deployments.models import Build, LogChunk

    build = Build.objects.get(state="running")
    build.steps.update(progress_done=0)  # an earlier run on the same records
    last = LogChunk.objects.order_by("-pk")[0].pk
    (port,) = free_ports(1)
    return panel_live.measure(port, logged_in().cookies["sessionid"].value, build.pk, last)


def pages() -> list[str]:
    """Every page that shows records, and the fragments that live pages ask for."""
    from deployments.models import Activation, Build, ClientKey, Generation

    running = Build.objects.get(state="running").pk
    ended = Build.objects.filter(state="succeeded").order_by("-pk")[0].pk
    g = max(3, Generation.objects.filter(deployment__name="model-03").count() // 2)
    activation = Activation.objects.order_by("-pk")[0].pk
    key = ClientKey.objects.filter(revoked_at=None)[0].key_id
    here = "/deployments/model-03/"
    return [
        "/", "/?archived", "/?part=deployments", "/?part=alarms", "/?part=activity",
        "/?part=memory", here, f"{here}?page=9", f"{here}?part=now", f"{here}?part=under-way",
        f"{here}?part=timeline", f"{here}generations/{g}/", f"{here}compare/?a={g - 1}&b={g}",
        f"{here}generations/{g}/rollback/", f"{here}generations/{g}/activate/",
        f"{here}stop/", f"{here}edit/", f"{here}measured/",
        "/deployments/new/?from=smollm2-135m", "/builds/", "/builds/?page=150",
        "/builds/?deployment=model-03", f"/builds/{ended}/", f"/builds/{running}/",
        f"/builds/{running}/?part=head", f"/builds/{running}/?part=steps",
        f"/activations/{activation}/", "/keys/", "/keys/?page=150", "/keys/?search=dana+search",
        "/keys/?search=nobody", "/keys/?state=active", f"/keys/{key}/", f"/keys/{key}/edit/",
        "/keys/new/", "/usage/?span=24h", "/usage/?span=7d", "/usage/?span=7d&deployment=model-03",
        "/usage/?span=30d&by=key", "/usage/?span=30d&by=generation", "/usage/?span=90d&by=day",
        f"/usage/?span=90d&by=key&key={key}", "/usage/?span=90d&by=key", "/playground/", "/store/",
        "/store/?part=tasks", "/hosts/", "/hosts/?part=hosts", "/audit/", "/audit/?page=150",
        "/audit/?search=model-03", "/audit/?search=nothing+such", "/audit/?verb=key.&who=ada",
        "/people/", "/account/",
    ]  # fmt: skip


def logged_in() -> Any:
    """A client that is logged in as the admin."""
    from django.test import Client

    from deployments.models import Session, User

    Session.objects.all().delete()  # each client is a login, and the account page lists them
    client = Client()
    client.force_login(User.objects.get(username="ada"))
    return client


def forget() -> None:
    """What was counted or made for an earlier request is not there for the next."""
    from deployments.panel import live as live_pages
    from deployments.queries.history import _known_differences
    from deployments.views.usage import _answers
    from mmadmin.core.generations.diff import _spec_fields

    live_pages.Hub().tell({"kind": "tick"})
    _answers.clear()
    _known_differences.clear()
    _spec_fields.cache_clear()


def count_queries(page: str) -> int:
    """How many queries a page makes."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    client = logged_in()
    forget()
    with CaptureQueriesContext(connection) as seen:
        answer = client.get(page)
    if answer.status_code != 200:
        raise RuntimeError(f"{page} was answered {answer.status_code}")
    return len(seen)


def measure(page: str, rounds: int) -> dict[str, Any]:
    """Ask for a page many times; times in milliseconds."""
    queries = count_queries(page)
    client = logged_in()
    times, busy = [], []
    for _ in range(rounds):
        forget()
        begin, cpu = time.perf_counter(), time.thread_time()
        answer = client.get(page)
        times.append((time.perf_counter() - begin) * 1000)
        busy.append((time.thread_time() - cpu) * 1000)
    times.sort()
    busy.sort()
    high = max(0, int(rounds * 0.95) - 1)
    return {
        "page": page,
        "p50_ms": round(statistics.median(times), 1),
        "p95_ms": round(times[high], 1),
        "cpu_p95_ms": round(busy[high], 1),
        "queries": queries,
        "kb": round(weight(answer.content) / 1000, 1),
        "html_kb": round(len(answer.content) / 1000, 1),
    }


def weight(html: bytes) -> int:
    """Bytes of a page with every file that it loads, each once."""
    from django.contrib.staticfiles import finders

    names = {found.decode().removeprefix("/static/") for found in STATIC.findall(html)}
    return len(html) + sum(Path(str(finders.find(name))).stat().st_size for name in names)


def report(
    wanted: argparse.Namespace,
    filled_s: float,
    rows: list[dict[str, Any]],
    seen: panel_live.Seen | None,
) -> int:
    """Print the figures and what falls short; returns the exit status."""
    short = [problem for row in rows for problem in problems(row)]
    told: dict[str, float] = {}
    if seen is not None:
        told = {
            "on_screen_p95_s": p95(seen.on_screen_s),
            "streamed_p95_s": p95(seen.streamed_s),
            "beside_p95_ms": p95(seen.looks_ms),
            "panel_memory_mb": round(seen.memory_mb),
            "panel_cpu_percent": round(100 * seen.cpu_share),
        }
        aims = {"on_screen_p95_s": SCREEN_S, "streamed_p95_s": SCREEN_S, "beside_p95_ms": BESIDE_MS}
        short += [f"{name} {told[name]}" for name, aim in aims.items() if told[name] > aim]
    if wanted.json:
        print(json.dumps({"filled_s": round(filled_s, 1), "pages": rows, "live": told}, indent=1))
    else:
        print(f"{'p50':>8} {'p95':>8} {'cpu p95':>8} {'queries':>8} {'kB':>7}  page")
        for row in rows:
            print(
                f"{row['p50_ms']:>6.1f}ms {row['p95_ms']:>6.1f}ms {row['cpu_p95_ms']:>6.1f}ms"
                f" {row['queries']:>8} {row['kb']:>7.1f}  {row['page']}"
            )
        for name, value in told.items():
            print(f"{name:>20} {value:g}  ({panel_live.PAGES} pages open)")
    worst = max(rows, key=lambda row: row["p95_ms"])
    print(
        f"{len(rows)} pages, slowest p95 {worst['p95_ms']} ms ({worst['page']}), heaviest"
        f" {max(row['kb'] for row in rows)} kB, load {os.getloadavg()[0]:.1f}: "
        + (f"SHORT of {'; '.join(short)}" if short else "all within their aims"),
        file=sys.stderr if wanted.json else sys.stdout,
    )
    return 1 if short else 0


def problems(row: dict[str, Any]) -> list[str]:
    """What of a page misses its aim."""
    found = []
    if row["p95_ms"] > PAGE_MS:
        found.append(f"{row['page']} p95 {row['p95_ms']} ms")
    if row["kb"] > PAGE_KB:
        found.append(f"{row['page']} {row['kb']} kB")
    if row["queries"] > row.get("queries_of_few", row["queries"]):
        found.append(f"{row['page']} {row['queries']} queries, {row['queries_of_few']} with few")
    return found


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return round(statistics.quantiles(values, n=20, method="inclusive")[-1], 3)


if __name__ == "__main__":
    sys.exit(main())
