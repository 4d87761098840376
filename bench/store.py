"""What the store costs, and what it survives: `make bench-store`.

Ratios are of one run on one machine, alternating: a local file of 2 GiB is ingested beside `cp` and
`sha256sum` of the same file; a verified merge beside the bare tool; then planning over a thousand
cached nodes, a `mm build` that has nothing to do, the memory of ingesting a sparse file of 70 GiB,
the collector's mark over ten thousand objects, the stat check of them, and five hundred builds and
collections that are killed. Ends with one line; exit 1 names what falls short.
`--only NAME…`, `--gib N`, `--sparse-gib N` and `--kills N` shorten it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from mmadmin.core.build.builder import GoalRoot, realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.planner import plan
from mmadmin.core.callbacks import silent
from mmadmin.core.canonical import canonical
from mmadmin.core.store import Realisation, Store, StoreObject
from mmadmin.core.store.gc import collect, mark
from mmadmin.core.store.graph import all_roots, read_graph
from mmadmin.core.store.rows import insert_object, insert_realisation
from mmadmin.core.store.tree import Entry, object_name
from mmadmin.core.store.verify import verify
from tests.core.workshop import Shop, Watch, damage, in_child, killer, step, tools_for

GIB = 1 << 30
ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """One figure beside its limit."""

    name: str
    value: float
    limit: float
    unit: str
    note: str = ""

    @property
    def ok(self) -> bool:
        """True when it holds."""
        return self.value <= self.limit


def ingest(folder: Path, options: argparse.Namespace) -> Row:
    """A local file comes in: copied and hashed in one pass, sealed as an object."""
    source = folder / "model.gguf"
    block = random.Random(1).randbytes(64 << 20)
    with source.open("wb") as file:
        for _ in range(options.gib * GIB // len(block)):
            file.write(block)
    os.sync()
    times: dict[str, list[float]] = {"cp": [], "sha256sum": [], "ingest": []}
    for turn in range(ROUNDS):
        copy = folder / "copy"
        times["cp"].append(timed(lambda to=copy: run("cp", str(source), str(to))))
        copy.unlink()
        times["sha256sum"].append(timed(lambda: run("sha256sum", str(source))))
        root = folder / f"store{turn}"
        times["ingest"].append(timed(lambda to=root: ingest_once(Store(to), source)))
        shutil.rmtree(root, onerror=lambda f, p, _: (Path(p).parent.chmod(0o755), f(p)))
        os.sync()
    source.unlink()
    mid = {name: statistics.median(found) for name, found in times.items()}
    note = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in mid.items())
    return Row(
        "ingest ÷ slower of cp, sha256sum",
        mid["ingest"] / max(mid["cp"], mid["sha256sum"]),
        1.25,
        "x",
        note,
    )


def ingest_once(store: Store, source: Path) -> None:
    """The whole way in, to the index."""
    with store.lease("bench") as lease, store.staging(lease) as staging:
        store.ingest(source, staging, source.name)
        store.seal(staging, "model")


def merge(folder: Path, options: argparse.Namespace) -> Row:
    """Shards to one file, with every check, beside the tool alone."""
    from bench.merge import PROMISE, measure  # noqa: PLC0415 (needs numpy and the engine)

    found = measure(options.gib * GIB, folder)
    note = (
        f"bare {found.bare_s:.2f} s, verified {found.verified_s:.2f} s; "
        f"flushed too: {found.bare_flushed_s:.1f} s, {found.built_s:.1f} s"
    )
    return Row("verified merge ÷ bare tool", found.ratio, PROMISE, "x", note)


def planning(folder: Path, _: argparse.Namespace) -> Row:
    """A thousand cached nodes, each with up to three inputs."""
    shop, store = Shop(), Store(folder / "plan")
    nodes = []
    for number in range(1000):
        below = nodes[max(0, number - 3) : number]
        nodes.append(step(f"s{number}", **{f"i{i}": one for i, one in enumerate(below)}))
    hashes: dict[str, str] = {}
    with store.index.write() as index:
        for node in nodes:
            name = fake_object(store, node.name, ())
            hashes[node.digest] = name[:64]
            found = StoreObject(
                name, name[:64], 1, entries_of(node.name), (), store.object_path(name), 1
            )
            insert_object(index, found)
            key = node.resolved_key({i: hashes[d.digest] for i, d in node.inputs.items()})
            insert_realisation(index, Realisation(key, node.digest, name))
    seconds = []
    for _turn in range(5):
        begin = time.perf_counter()
        assert plan(nodes[-1], store, shop.recipe_of).count("cached") == 1000
        seconds.append(time.perf_counter() - begin)
    return Row("plan over 1,000 cached nodes", statistics.median(seconds) * 1000, 250, "ms")


def entries_of(text: str) -> tuple[Entry, ...]:
    """One small file."""
    return (Entry("f", size=len(text), sha256=hashlib.sha256(text.encode()).hexdigest()),)


def fake_object(store: Store, text: str, refs: tuple[str, ...]) -> str:
    """An object's folder and record without the cost of sealing; returns its name."""
    entries = entries_of(text)
    name = object_name(entries, text)
    path = store.object_path(name)
    path.mkdir()
    (path / "f").write_text(text)
    (path / "f").chmod(0o444)
    os.utime(path / "f", (1, 1))
    blob = store.blob_path(entries[0].sha256)
    blob.parent.mkdir(exist_ok=True)
    if not blob.exists():
        os.link(path / "f", blob)
    path.chmod(0o555)
    os.utime(path, (1, 1))
    found = StoreObject(name, name[:64], len(text), entries, refs, path, 1)
    store.layout.sidecar(name).write_bytes(canonical(store.record_of(found)))
    return name


def ten_thousand(folder: Path, _: argparse.Namespace) -> list[Row]:
    """The collector's mark, and the stat check, over ten thousand objects in chains of ten."""
    store = Store(folder / "many")
    name = ""
    names = []
    for number in range(10_000):
        refs = (name,) if number % 10 else ()
        name = fake_object(store, f"o{number}", refs)
        names.append(name)
    store.reindex()
    for number in range(9, 10_000, 20):
        store.add_root("pin", str(number), names[number], "bench")
    begin = time.perf_counter()
    roots = all_roots(store)
    live = mark(store, read_graph(store), roots)
    marked = time.perf_counter() - begin
    assert len(live) == 5000
    begin = time.perf_counter()
    assert not verify(store).damaged
    checked = time.perf_counter() - begin
    return [
        Row("mark over 10,000 objects", marked, 1.0, "s", "half of them live, with /proc"),
        Row("stat check of 10,000 objects", checked, 10.0, "s"),
    ]


def no_op_build(folder: Path, _: argparse.Namespace) -> Row:
    """`mm build` of the small model's deployment, all of it in the store."""
    from tests.support.engine import engine_store  # noqa: PLC0415 (builds it the first time)

    cache = engine_store()
    home = folder / "home"
    home.mkdir()
    (home / "store").symlink_to(cache.store.root)
    env = {**os.environ, "MM_HOME": str(home)}
    mm = str(Path(sys.executable).with_name("mm"))
    argv = [mm, "build", "deployments/catalog/smollm2-135m.toml"]
    first = subprocess.run(argv, env=env, check=True, capture_output=True, text=True)
    seconds = [timed(lambda: run(*argv, env=env)) for _turn in range(5)]
    note = "all cached" if "✓" not in first.stdout else "the first run built something"
    return Row("no-op mm build", statistics.median(seconds), 1.0, "s", note)


PEAK = """
import re, sys
from pathlib import Path
from bench.store import ingest_once
from mmadmin.core.store import Store
ingest_once(Store(Path(sys.argv[1])), Path(sys.argv[2]))
# VmHWM is this program's own peak; ru_maxrss begins with that of the process that started it
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def memory(folder: Path, options: argparse.Namespace) -> Row:
    """Peak memory of a process that ingests a sparse file."""
    source = folder / "sparse.gguf"
    with source.open("wb") as file:
        file.truncate(options.sparse_gib * GIB)
        file.seek(options.sparse_gib * GIB // 2)
        file.write(b"island")
    begin = time.perf_counter()
    argv = [sys.executable, "-c", PEAK, str(folder / "big"), str(source)]
    peak_kib = int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    note = f"{time.perf_counter() - begin:.0f} s"
    return Row(
        f"peak memory, {options.sparse_gib} GiB sparse file", peak_kib / 1024, 200, "MiB", note
    )


STEPS = [
    "leased", "locked", "staged", "written", "hashed", "flushed", "committing", "blob", "linked",
    "renamed", "described", "realised", "indexed", "unlocked",
    "rows removed", "record removed", "object trashed", "trashed", "blobs trashed",
    "realisation removed", "records deleted",
]  # fmt: skip


def kill_goal() -> Derivation:
    """What the killed processes build."""
    return step("top", recipe="links", a=step("a"), b=step("b", x=step("a")))


def build_and_collect(root: Path, after: Callable[[str], None], delay_s: float | None) -> None:
    """Build and collect a few times; with a delay, until SIGKILL comes at that moment."""
    if delay_s is not None:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    store, shop = Store(root, floor_bytes=0, after=after), Shop()
    claim = GoalRoot("g", "1", "")
    for turn in range(3):
        realise(kill_goal(), store, tools_for, Watch(), recipe_of=shop.recipe_of, root=claim)
        store.remove_root("g", "1")
        if turn < 2:
            collect(store, look=lambda *_: [])


def one_kill(root: Path, turn: int, rnd: random.Random, longest_s: float) -> bool:
    """Run a process that is killed: after a step, or at a random moment. True when it was."""
    if turn % 2 == 0:
        after, delay = killer(rnd.choice(STEPS), rnd.randint(1, 4)), None
    else:
        after, delay = silent, rnd.uniform(0, longest_s) + 0.001
    return in_child(partial(build_and_collect, root, after, delay)) == -signal.SIGKILL


def what_is_wrong(store: Store, rnd: random.Random) -> list[str]:
    """After a kill: every object complete or absent, no lease, and the next build succeeds."""
    wrong = damage(store)
    if store.leases():
        wrong.append("a lease leaked")
    shop = Shop()
    realise(kill_goal(), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    wrong += damage(store)
    left = sorted(found.name[65:] for found in store.objects())
    if left != ["a", "b", "top"]:
        wrong.append(f"the next build left {left}")
    if rnd.random() < 0.5:
        for root in store.roots():  # of one that was killed while it kept its result
            store.remove_root(root.kind, root.key)
        collect(store, look=lambda *_: [])
        layout = store.layout
        folders = (layout.objects, layout.trash, layout.derivations / "realised")
        if any(any(folder.iterdir()) for folder in folders):
            wrong.append("the next collection left something")
    return wrong


def kills(folder: Path, options: argparse.Namespace) -> Row:
    """Builds and collections end by SIGKILL: after each step, and anywhere in between."""
    rnd = random.Random(7)
    store = Store(folder / "kills", floor_bytes=0)
    wrong: list[str] = []
    killed = 0
    longest_s = timed(lambda: in_child(partial(build_and_collect, store.root, silent, None)))
    for turn in range(options.kills * 2):  # some are done before their moment comes
        killed += one_kill(store.root, turn, rnd, longest_s)
        for line in what_is_wrong(store, rnd):
            wrong.append(line)
            print(f"    run {turn}: {line}", flush=True)
        if killed == options.kills:
            break
    else:
        wrong.append(f"only {killed} were killed")
    note = f"{killed} killed in {turn + 1} runs"
    return Row("faults after kills", len(wrong), 0, "", note)


def show(rows: list[Row]) -> None:
    """Print figures as they come, each with the load that it was measured at."""
    for row in rows:
        word = "ok" if row.ok else "MISS"
        figure = f"{row.value:9.2f}{row.limit:8g} {row.unit:4}{os.getloadavg()[0]:5.1f}"
        print(f"{word:5}{row.name:38}{figure}  {row.note}", flush=True)


def timed(work: Callable[[], object]) -> float:
    """Seconds that it took."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def run(*argv: str, env: dict[str, str] | None = None) -> None:
    """Run to the end, silently."""
    subprocess.run(argv, check=True, capture_output=True, env=env)


FIGURES: dict[str, Callable[[Path, argparse.Namespace], Row | list[Row]]] = {
    "ingest": ingest,
    "merge": merge,
    "plan": planning,
    "many": ten_thousand,
    "noop": no_op_build,
    "memory": memory,
    "kills": kills,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and end with one line."""
    parser = argparse.ArgumentParser(prog="bench.store", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--gib", type=int, default=2, help="size of the large files")
    parser.add_argument("--sparse-gib", type=int, default=70)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to work")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    if not options.json:
        print(f"{'':5}{'figure':38}{'measured':>9}{'limit':>8} {'':4}{'load':>5}  note", flush=True)
    for name in options.only:
        with tempfile.TemporaryDirectory(
            prefix=".bench-", dir=options.folder, ignore_cleanup_errors=True
        ) as folder:
            found = FIGURES[name](Path(folder), options)
            fresh = found if isinstance(found, list) else [found]
            rows += fresh
            if not options.json:
                show(fresh)
    short = [row.name for row in rows if not row.ok]
    if options.json:
        print(json.dumps([asdict(row) | {"ok": row.ok} for row in rows]))
    print(
        f"bench-store: {len(rows) - len(short)} of {len(rows)} figures hold"
        + (f"; short: {', '.join(short)}" if short else "")
    )
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
