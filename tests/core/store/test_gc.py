"""The collector frees what nobody needs, and never anything else."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmadmin.core.build.builder import GoalRoot, realise
from mmadmin.core.build.planner import plan
from mmadmin.core.errors import DiskFull, NotFound, StoreCorrupt
from mmadmin.core.store import Store
from mmadmin.core.store.explain import sizes, why
from mmadmin.core.store.gc import collect
from mmadmin.core.store.graph import all_roots
from mmadmin.core.store.locks import file_lock
from mmadmin.core.store.runtime import InUse, in_use
from mmadmin.core.store.verify import verify
from tests.core.workshop import Shop, Watch, add, damage, in_child, killer, step, tools_for
from tests.support.disks import needs_root, small_disk


def nobody(objects: Path, blobs: Path) -> Iterable[InUse]:
    """No process uses anything."""
    return []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", floor_bytes=0)


def names(store: Store) -> set[str]:
    """The plain names of the objects that are there."""
    return {found.name[65:] for found in store.objects()}


def on_disk(store: Store) -> list[str]:
    """Everything in `objects/`, `blobs/` and `trash/`."""
    layout = store.layout
    places = [*layout.objects.iterdir(), *layout.blobs.glob("*/*"), *layout.trash.iterdir()]
    return sorted(path.name for path in places)


def test_what_no_root_needs_goes(store: Store) -> None:
    """Rows, records, folders and bytes of the rest are gone; what a root needs stays whole."""
    a = add(store, "a", {"f": b"a" * 5000, "shared": b"s" * 9000})
    b = add(store, "b", {"f": b"b" * 5000}, refs=[a.name])
    add(store, "c", {"f": b"c" * 50_000, "shared": b"s" * 9000})
    store.add_root("pin", "p", b.name, "wanted")
    done = collect(store, look=nobody)
    assert names(store) == {"a", "b"}
    assert [name[65:] for name in done.objects] == ["c"]
    assert (done.blobs, done.kept_objects) == (1, 2)
    assert 50_000 <= done.freed_bytes <= 60_000
    assert damage(store) == []
    assert not any("-c" in name for name in on_disk(store))
    assert list(store.layout.trash.iterdir()) == []
    store.reindex()
    assert names(store) == {"a", "b"}


def test_a_dry_run_says_the_same_and_changes_nothing(store: Store) -> None:
    """What would be freed is what is then freed."""
    a = add(store, "a", {"f": b"a" * 5000, "g": b"both" * 5000})
    add(store, "b", {"f": b"b" * 50_000, "x/f": b"b" * 50_000, "g": b"both" * 5000})
    store.add_root("pin", "p", a.name, "wanted")
    before = on_disk(store)
    would = collect(store, dry_run=True, look=nobody)
    assert on_disk(store) == before
    done = collect(store, look=nobody)
    assert (would.objects, would.blobs, would.freed_bytes, would.kept_objects) == (
        done.objects, done.blobs, done.freed_bytes, done.kept_objects,
    )  # fmt: skip
    assert done.freed_bytes >= 50_000


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[set[int]], set[int], int | None]:
    """References between objects (to earlier ones), which of them are roots, and a limit."""
    count = draw(st.integers(1, 9))
    references = [
        draw(st.sets(st.integers(0, n - 1), max_size=3)) if n else set() for n in range(count)
    ]
    roots = draw(st.sets(st.integers(0, count - 1)))
    return references, roots, draw(st.none() | st.integers(1, 100_000))


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(worlds())
def test_the_live_is_never_freed(
    tmp_path_factory: pytest.TempPathFactory, world: tuple[list[set[int]], set[int], int | None]
) -> None:
    """Whatever the graph: roots and all they need stay; without a limit, nothing else does.

    With a limit, no object is left that lost something it needs.
    """
    references, roots, limit = world
    store = Store(tmp_path_factory.mktemp("s") / "store", floor_bytes=0)
    made: list[str] = []
    for number, targets in enumerate(references):
        content = {"own": f"{number}".encode() * 5000, "shared": b"s" * 100}
        made.append(add(store, f"n{number}", content, refs=[made[t] for t in targets]).name)
    for number in roots:
        store.add_root("pin", str(number), made[number], "")
    live: set[int] = set()
    todo = list(roots)
    while todo:
        number = todo.pop()
        if number not in live:
            live.add(number)
            todo.extend(references[number])

    done = collect(store, max_free_bytes=limit, look=nobody)

    left = {int(name[1:]) for name in names(store)}
    assert live <= left
    for number in left:
        assert references[number] <= left
    if limit is None:
        assert left == live
    elif left != live:
        assert done.freed_bytes >= limit
    assert damage(store) == []
    assert [name for name in made if store.has_object(name)] == [made[n] for n in sorted(left)]


def test_leases_keep_what_they_protect(store: Store) -> None:
    """A running build's inputs and fresh outputs stay, rooted or not; then they may go."""
    a = add(store, "a", {"f": b"a"})
    with store.lease("build 7") as lease:
        assert store.protect(lease, [a.name]) == []
        with store.staging(lease) as staging:
            (staging.out / "f").write_bytes(b"fresh")
            store.seal(staging, "b")
        collect(store, look=nobody)
        assert names(store) == {"a", "b"}
        assert {(r.kind, r.object[65:]) for r in all_roots(store, nobody)} == {
            ("lease", "a"),
            ("lease", "b"),
        }
        assert "build 7" in all_roots(store, nobody)[0].reason
    collect(store, look=nobody)
    assert names(store) == set()


def test_protecting_what_is_gone_says_so(store: Store) -> None:
    """Whoever wants to rely on an object learns that it was collected."""
    a = add(store, "a", {"f": b"a"})
    collect(store, look=nobody)
    with store.lease("late") as lease:
        assert store.protect(lease, [a.name]) == [a.name]


def test_running_processes_keep_what_they_use(store: Store) -> None:
    """A mapped model, an open file, a program that runs, an argument: each is a root."""
    add(store, "model", {"m.gguf": b"m" * 10_000})
    add(store, "open", {"f": b"open"})
    add(store, "argument", {"f": b"argument"})
    add(store, "blob", {"f": b"by its blob"})
    add(store, "unused", {"f": b"unused"})
    path = {found.name[65:]: found for found in store.objects()}
    code = (
        "import mmap,sys,time\n"
        "f=open(sys.argv[1]+'/m.gguf','rb'); m=mmap.mmap(f.fileno(),0,access=mmap.ACCESS_READ); f.close()\n"
        "g=open(sys.stdin.readline().strip())\n"
        "h=open(sys.stdin.readline().strip())\n"
        "print('ready',flush=True); time.sleep(600)"
    )
    blob = store.blob_path(path["blob"].files[0].sha256)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path["model"].path), f"--x={path['argument'].path}/f"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    try:
        child.stdin.write(f"{path['open'].path}/f\n{blob}\n")
        child.stdin.flush()
        assert child.stdout.readline() == "ready\n"
        done = collect(store)
        assert names(store) == {"model", "open", "argument", "blob"}
        assert {r.key for r in done.roots if r.kind == "running"} >= {str(child.pid)}
        assert "python" in next(n.root.reason for n in why(store, path["model"].name))
    finally:
        child.kill()
        child.communicate()
    used = {found.pid for found in in_use(store.layout.objects, store.layout.blobs)}
    assert child.pid not in used


def test_a_store_behind_a_link_is_recognised(store: Store, tmp_path: Path) -> None:
    """The kernel names mapped files by their real path, whatever path the store was opened by."""
    found = add(store, "model", {"m.gguf": b"m" * 10_000})
    (tmp_path / "link").symlink_to(store.root)
    linked = Store(tmp_path / "link", floor_bytes=0)
    with (linked.object_path(found.name) / "m.gguf").open("rb") as file:
        assert file.read(1) == b"m"
        assert collect(linked).objects == ()
    assert collect(linked).objects == (found.name,)


def test_older_than_leaves_what_is_recent_and_what_that_needs(store: Store) -> None:
    """An hour-old limit leaves today's work, also the old object that it builds on."""
    old = add(store, "old", {"f": b"old"})
    add(store, "lone", {"f": b"lone"})
    add(store, "new", {"f": b"new"}, refs=[old.name])
    with store.index.write() as index:
        index.execute("UPDATE object SET sealed_at = 1000 WHERE name NOT LIKE '%-new'")
        index.execute("UPDATE object SET sealed_at = 9000 WHERE name LIKE '%-new'")
    done = collect(store, older_than_s=3600, now=10_000, look=nobody)
    assert names(store) == {"old", "new"}
    assert done.blobs == 1
    assert damage(store) == []


def test_max_free_stops_when_it_is_enough(store: Store) -> None:
    """Oldest first, and no more than was asked for."""
    for number in range(4):
        add(store, f"n{number}", {"f": f"{number}".encode() * 100_000})
    with store.index.write() as index:
        for number in range(4):
            index.execute(
                "UPDATE object SET sealed_at = ? WHERE name LIKE ?", (number, f"%-n{number}")
            )
    collect(store, max_free_bytes=150_000, look=nobody)
    assert names(store) == {"n2", "n3"}


def test_a_shortage_of_room_collects_just_enough(tmp_path: Path) -> None:
    """A refused promise frees what is lacking and is then kept; roots are never touched for it."""
    store = Store(tmp_path / "store", floor_bytes=0)
    kept = add(store, "kept", {"f": b"k" * 100_000})
    store.add_root("pin", "p", kept.name, "")
    add(store, "loose", {"f": b"l" * 100_000})
    free = 50_000
    real = store.free_bytes()
    store.disk.free_bytes = lambda: free + max(0, 100_000 if names(store) == {"kept"} else 0)  # type: ignore[method-assign]
    heard: list[str] = []
    with store.reserve(100_000, on_wait=heard.append):
        assert names(store) == {"kept"}
    assert "disk full" in heard[0]
    with pytest.raises(DiskFull), store.reserve(real + (1 << 40)):
        pass
    assert names(store) == {"kept"}


def test_bytes_linked_elsewhere_are_not_counted(store: Store, tmp_path: Path) -> None:
    """An adopted file whose other link stays frees no bytes when it is collected."""
    found = add(store, "a", {"f": b"x" * 100_000})
    os.link(found.path / "f", tmp_path / "outside")
    assert collect(store, dry_run=True, look=nobody).freed_bytes == 0
    done = collect(store, look=nobody)
    assert (len(done.objects), done.blobs) == (1, 1)
    assert done.freed_bytes < 20_000
    assert (tmp_path / "outside").read_bytes() == b"x" * 100_000


@pytest.mark.parametrize(
    "what",
    ["root", "root object", "reference", "record", "record gone", "refs differ", "lease", "path"],
)
def test_a_record_that_cannot_be_trusted_stops_it(store: Store, what: str) -> None:
    """Nothing at all is freed until the record is mended."""
    a = add(store, "a", {"f": b"a"})
    b = add(store, "b", {"f": b"b"}, refs=[a.name])
    add(store, "garbage", {"f": b"garbage"})
    store.add_root("pin", "p", b.name, "wanted")
    before = on_disk(store)
    sidecar = store.layout.sidecar(a.name)
    if what == "root":
        store.layout.root_file("pin", "p").write_text('{"kind":')
    elif what == "root object":
        with store.index.write() as index:
            index.execute("DELETE FROM object WHERE name = ?", (b.name,))
    elif what == "reference":
        with store.index.write() as index:
            index.execute("DELETE FROM object WHERE name = ?", (a.name,))
    elif what == "record":
        sidecar.write_bytes(sidecar.read_bytes()[:-10])
    elif what == "record gone":
        sidecar.rename(store.root / "kept-elsewhere")
        before.remove(sidecar.name)
    elif what == "refs differ":
        store.layout.sidecar(b.name).write_text(
            store.layout.sidecar(b.name).read_text().replace(a.name, "x")
        )
    elif what == "lease":
        (store.layout.leases / "1-x.json").write_text("{")
        (store.layout.leases / "1-x.objects").write_text("")
    elif what == "path":
        a.path.rename(store.root / "kept-elsewhere")
        before.remove(a.name)
    with pytest.raises(StoreCorrupt):
        collect(store, dry_run=True, look=nobody)
    if what != "lease":  # a real collection first clears away what dead processes left
        with pytest.raises(StoreCorrupt):
            collect(store, look=nobody)
        assert on_disk(store) == before


STEPS = ["rows removed", "record removed", "object trashed", "trashed", "blobs trashed"]


@pytest.mark.parametrize("when", STEPS)
def test_killed_after_each_step(store: Store, when: str) -> None:
    """A killed collection leaves a sound store, and the next one finishes its work."""
    a = add(store, "a", {"f": b"a", "s": b"shared"})
    for number in range(3):
        add(store, f"n{number}", {"f": f"{number}".encode(), "s": b"shared"})
    store.add_root("pin", "p", a.name, "")

    def work() -> None:
        collect(Store(store.root, floor_bytes=0, after=killer(when)), look=nobody)

    assert in_child(work) == -signal.SIGKILL
    assert damage(store) == []
    assert "a" in names(store)
    collect(store, look=nobody)
    assert names(store) == {"a"}
    assert damage(store) == []
    assert on_disk(store) == sorted([a.name, f"{a.name}.json", *(e.sha256 for e in a.files)])


def test_collecting_beside_builds(store: Store) -> None:
    """Processes build and root, unroot and collect at random; nothing rooted is ever lost."""

    def build_for_a_while(seed: int) -> None:
        rnd = random.Random(seed)
        mine = Store(store.root, floor_bytes=0)
        shop = Shop()
        for turn in range(12):
            base = step(f"base{rnd.randrange(3)}")
            goal = step(f"top{rnd.randrange(4)}", recipe="links", a=base, b=step("b", x=base))
            done = realise(
                goal, mine, tools_for, Watch(),
                recipe_of=shop.recipe_of, root=GoalRoot("g", f"{seed}/{turn}", ""),
            )  # fmt: skip
            for name in mine.closure(done.object):
                found = mine.object(name)
                assert found
                assert (found.path / "text").is_file()
            if rnd.random() < 0.7:
                mine.remove_root("g", f"{seed}/{turn}")

    stop = threading.Event()
    problems: list[BaseException] = []

    def keep_collecting() -> None:
        mine = Store(store.root, floor_bytes=0)
        try:
            while not stop.is_set():
                collect(mine, look=nobody)
                time.sleep(0.01)
        except BaseException as error:  # noqa: BLE001 (shown below)
            problems.append(error)
        finally:
            mine.close()

    children = []
    for seed in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                build_for_a_while(seed)
            except BaseException:  # noqa: BLE001 (shown by the child)
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    collector = threading.Thread(target=keep_collecting)
    collector.start()
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    stop.set()
    collector.join()
    assert statuses == [0, 0, 0]
    assert problems == []
    assert damage(store) == []
    for root in store.roots():
        for name in store.closure(root.object):
            assert store.has_object(name)
    collect(store, look=nobody)
    assert damage(store) == []


def test_a_collected_intermediate_does_not_rebuild_what_is_kept(store: Store) -> None:
    """The record of what an intermediate came out as outlives it."""
    shop = Shop()
    goal = step("goal", m=step("mid", s=step("source")))
    realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of, root=GoalRoot("g", "1", ""))
    collect(store, look=nobody)
    assert names(store) == {"goal"}
    assert [s.action for s in plan(goal, store, shop.recipe_of).steps] == ["cached"]


def test_why_shows_the_way_from_each_root(store: Store) -> None:
    """Who needs an object: every root, with the chain; nobody, when it may go."""
    a = add(store, "a", {"f": b"a"})
    b = add(store, "b", {"f": b"b"}, refs=[a.name])
    c = add(store, "c", {"f": b"c"}, refs=[b.name, a.name])
    d = add(store, "d", {"f": b"d"})
    store.add_root("generation", "x/1", b.name, "live")
    store.add_root("pin", "p", c.name, "asked")
    assert [(n.root.key, [p[65:] for p in n.path]) for n in why(store, a.name, look=nobody)] == [
        ("x/1", ["b", "a"]),
        ("p", ["c", "a"]),
    ]
    assert why(store, d.name, look=nobody) == []
    with pytest.raises(NotFound):
        why(store, f"{'0' * 64}-none", look=nobody)


def test_sizes_tell_shared_from_own(store: Store) -> None:
    """Own bytes are those that would be freed; equal files count once."""
    a = add(store, "a", {"f": b"1" * 10, "g": b"1" * 10, "s": b"2" * 100})
    b = add(store, "b", {"s": b"2" * 100})
    assert [(s.size_bytes, s.own_bytes) for s in sizes(store, [a.name, b.name])] == [
        (110, 10),
        (100, 0),
    ]


def test_a_store_that_nobody_needs_ends_empty(store: Store) -> None:
    """Objects, records, blobs, derivations, locks: nothing at all is left of what was built."""
    shop = Shop()
    realise(step("b", x=step("a")), store, tools_for, Watch(), recipe_of=shop.recipe_of)

    def killed() -> None:
        mine = Store(store.root, floor_bytes=0)
        with mine.lock("build-x"), mine.lease("x"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == -signal.SIGKILL
    assert (store.layout.locks / "build-x.lock").exists()
    collect(store, look=nobody, expire_after_s=0)
    files = [path.name for path in store.root.rglob("*") if path.is_file()]
    assert [name for name in files if not name.startswith("index.sqlite3")] == []


def test_locks_that_someone_holds_are_left(store: Store) -> None:
    """Only files that nobody holds go."""
    with store.lock("build-x"):
        collect(store, look=nobody)
        with pytest.raises(BlockingIOError), (store.layout.locks / "build-x.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_garbage_between_the_objects_goes(store: Store) -> None:
    """Whatever lies there without a row, whoever put it there; what is known stays as it is."""
    kept = add(store, "kept", {"f": b"kept"})
    store.add_root("pin", "p", kept.name, "")
    (store.layout.objects / f"{'0' * 64}-half").mkdir()
    (store.layout.objects / f"{'0' * 64}-half.json").write_text("{}")
    (store.layout.objects / "something.lock").touch()
    (store.layout.objects / "link").symlink_to(kept.path)
    collect(store, look=nobody)
    assert sorted(path.name for path in store.layout.objects.iterdir()) == [
        kept.name,
        f"{kept.name}.json",
    ]
    assert damage(store) == []


def test_half_written_records_go(store: Store) -> None:
    """A process that is killed while it replaces a record leaves the new one beside it."""
    kept = add(store, "kept", {"f": b"kept"})
    store.add_root("pin", "p", kept.name, "")
    records = store.layout.derivations
    for folder in (records, records / "realised", store.layout.objects, store.layout.roots / "pin"):
        (folder / ".0123.new").write_bytes(b"{")
    collect(store, look=nobody)
    assert list(store.root.rglob(".*.new")) == []
    assert [root.key for root in store.roots()] == ["p"]
    assert damage(store) == []


def test_stale_downloads_are_given_up(store: Store) -> None:
    """A part that nobody went on with for a week goes; a fresh one stays; a dry run says so."""
    old, new = store.layout.downloads / "old.part", store.layout.downloads / "new.part"
    for path in (old, new):
        path.write_bytes(b"x" * 10_000)
    os.utime(old, (time.time() - 8 * 86400,) * 2)
    would = collect(store, look=nobody, dry_run=True)
    assert old.exists()
    done = collect(store, look=nobody)
    assert (done.expired, done.freed_bytes) == (would.expired, would.freed_bytes)
    assert done.expired == 1
    assert done.freed_bytes >= 10_000
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("suffix", ["part", "state"])
@pytest.mark.parametrize("holder", ["a fetch", "a pull"])
def test_a_download_under_way_is_left(store: Store, holder: str, suffix: str) -> None:
    """However long ago its bytes came: who transfers it holds a lock."""
    sha256 = "a" * 64
    path = store.layout.downloads / f"{sha256}.{suffix}"
    path.write_bytes(b"x")
    os.utime(path, (1, 1))
    mine = store.layout.downloads / f"{sha256}.lock"
    with file_lock(mine if holder == "a fetch" else store.layout.lock(f"blob-{sha256}")):
        assert collect(store, look=nobody, expire_after_s=0).expired == 0
        assert path.exists()
    collect(store, look=nobody, expire_after_s=0)
    assert list(store.layout.downloads.iterdir()) == []


def test_the_age_of_expired_files_can_be_set(store: Store) -> None:
    """One age for all kinds in place of the usual ones."""
    store.layout.quarantine.mkdir()
    folders = (store.layout.logs, store.layout.quarantine, store.layout.downloads)
    paths = [folder / "x" for folder in folders]
    for path in paths:
        path.write_bytes(b"x")
    later = time.time() + 2 * 86400
    assert collect(store, look=nobody, now=later).expired == 0
    assert collect(store, look=nobody, now=later, expire_after_s=3 * 86400).expired == 0
    assert collect(store, look=nobody, now=later, expire_after_s=86400).expired == 3
    assert not any(path.exists() for path in paths)


def test_old_logs_and_quarantined_files_go(store: Store) -> None:
    """After 30 days, counted in the answer; younger ones stay, and a dry run takes nothing."""
    store.layout.quarantine.mkdir()
    old = [store.layout.logs / "a.log", store.layout.quarantine / "b"]
    for path in old:
        path.write_bytes(b"x" * 10_000)
    assert collect(store, look=nobody).expired == 0
    later = time.time() + 31 * 86400
    would = collect(store, look=nobody, dry_run=True, now=later)
    assert would.expired == 2
    assert all(path.exists() for path in old)
    done = collect(store, look=nobody, now=later)
    assert (done.expired, done.freed_bytes) == (2, would.freed_bytes)
    assert done.freed_bytes >= 20_000
    assert not any(path.exists() for path in old)


@contextmanager
def full_store(folder: Path, *, in_use: bool) -> Iterator[tuple[Path, str]]:
    """A store with something dead on a disk without a free byte; its folder, and what is kept.

    `in_use`: another process has its index open.
    """
    with small_disk(folder, "4m") as disk:
        store = Store(disk / "store", floor_bytes=0)
        kept = add(store, "kept", {"f": b"k" * 1000})
        store.add_root("pin", "p", kept.name, "")
        add(store, "dead", {"f": os.urandom(1 << 20)})
        if not in_use:
            store.close()
        for block in (4096, 1):
            with suppress(OSError), (disk / f"filler{block}").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(block))
        assert store.free_bytes() == 0
        yield store.root, kept.name
        store.close()


@needs_root
@pytest.mark.parametrize("in_use", [True, False])
def test_a_full_disk_is_freed_without_writing_first(tmp_path: Path, *, in_use: bool) -> None:
    """Not one byte is free, and nothing is needed before the first bytes go."""
    with full_store(tmp_path / "small", in_use=in_use) as (root, kept):
        store = Store(root, floor_bytes=0)
        assert collect(store, dry_run=True, look=nobody).freed_bytes >= 1 << 20
        done = collect(store, look=nobody)
        assert (len(done.objects), done.blobs) == (1, 1)
        assert done.freed_bytes >= 1 << 20
        assert store.names() == [kept]
        assert store.free_bytes() >= 900_000
        assert verify(store, contents=True).damaged == ()
        assert collect(store, look=nobody).objects == ()
        store.close()


@needs_root
def test_killed_while_a_full_disk_is_freed(tmp_path: Path) -> None:
    """The files of what is dead are gone, its row is not: the next collection ends it."""
    with full_store(tmp_path / "small", in_use=False) as (root, kept):

        def work() -> None:
            collect(Store(root, floor_bytes=0, after=killer("unlinked")), look=nobody)

        assert in_child(work) == -signal.SIGKILL
        store = Store(root, floor_bytes=0)
        assert len(store.names()) == 2
        collect(store, look=nobody)
        assert store.names() == [kept]
        assert damage(store) == []
        store.close()


@needs_root
def test_nothing_to_collect_on_a_full_disk_is_no_error(tmp_path: Path) -> None:
    """What is kept stays, and the collection says that it freed nothing."""
    with full_store(tmp_path / "small", in_use=False) as (root, kept):
        store = Store(root, floor_bytes=0)
        dead = next(name for name in store.names() if name != kept)
        running = InUse(1, "x", frozenset({dead}), frozenset())
        assert collect(store, look=lambda *_: [running]).objects == ()
        store.close()
