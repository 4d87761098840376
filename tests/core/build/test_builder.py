"""Realising: early cutoff, pinned content, builders that meet, builders that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.build.builder import GoalRoot, realise
from mmadmin.core.build.derivation import Derivation
from mmadmin.core.build.planner import plan
from mmadmin.core.errors import Cancelled, DigestMismatch, DiskFull, StepFailed
from mmadmin.core.store import Store
from tests.core.workshop import Shop, Tools, Watch, damage, in_child, killer, pin, step, tools_for

STEPS = [
    "leased",
    "locked",
    "staged",
    "written",
    "hashed",
    "flushed",
    "committing",
    "blob",
    "linked",
    "renamed",
    "described",
    "realised",
    "indexed",
    "unlocked",
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", floor_bytes=0)


def text_of(store: Store, name: str) -> str:
    """What the recipe wrote."""
    return (store.object_path(name) / "text").read_text()


def test_a_graph_is_realised_in_order_and_only_once(store: Store) -> None:
    """Inputs first; the second time everything is cached."""
    shop, watch = Shop(), Watch()
    goal = step("c", x=step("a"), y=step("b", x=step("a")))
    done = realise(goal, store, tools_for, watch, recipe_of=shop.recipe_of, host="h")
    assert watch.names("built") == ["a", "b", "c"]
    assert text_of(store, done.object) == "c\na\nb\na\n"
    assert (done.derivation, done.host, done.sandbox) == (goal.digest, "h", "none")
    assert damage(store) == []

    again = Watch()
    assert realise(goal, store, tools_for, again, recipe_of=shop.recipe_of) == done
    assert again.names("cached") == ["a", "b", "c"]
    assert shop.ran == ["a", "b", "c"]


def test_early_cutoff_stops_the_rebuild(store: Store) -> None:
    """An input that comes out as before rebuilds nothing above it."""
    shop = Shop()
    realise(
        step("top", m=step("mid", drop=True, s=step("one"))),
        store,
        tools_for,
        Watch(),
        recipe_of=shop.recipe_of,
    )
    watch = Watch()
    realise(
        step("top", m=step("mid", drop=True, s=step("two"))),
        store,
        tools_for,
        watch,
        recipe_of=shop.recipe_of,
    )
    assert watch.names("built") == ["two", "mid"]
    assert watch.names("cached") == ["top"]


def test_early_cutoff_fetches_no_sources_that_nobody_builds_from(store: Store) -> None:
    """The other inputs of a step that turns out cached are not realised for it."""
    shop = Shop()

    def goal(start: str) -> Derivation:
        return step("top", m=step("mid", drop=True, s=step(start)), shards=pin("shards", "weights"))

    realise(goal("one"), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    shards = next(o.name for o in store.objects() if o.name.endswith("-shards"))
    with store.index.write() as index:
        index.execute("DELETE FROM object WHERE name = ?", (shards,))
    watch = Watch()
    realise(goal("two"), store, tools_for, watch, recipe_of=shop.recipe_of)
    assert watch.names("built") == ["two", "mid"]
    assert shop.pinned.ran == ["weights"]


def test_the_root_is_set_while_the_lease_holds(store: Store) -> None:
    """There is no moment at which the goal is neither leased nor a root."""
    shop = Shop()
    done = realise(
        step("a"),
        store,
        tools_for,
        Watch(),
        recipe_of=shop.recipe_of,
        root=GoalRoot("generation", "x/1", "kept"),
    )
    assert [(r.kind, r.key, r.object, r.reason) for r in store.roots()] == [
        ("generation", "x/1", done.object, "kept")
    ]
    assert store.leases() == []


def test_a_failed_step_leaves_nothing_behind(store: Store) -> None:
    """The error reaches the caller and the observer; staging is empty, the next try works."""
    shop, watch = Shop(), Watch()

    def fail() -> None:
        raise StepFailed("no luck")

    shop.write.hook = fail
    with pytest.raises(StepFailed, match="no luck"):
        realise(step("a"), store, tools_for, watch, recipe_of=shop.recipe_of)
    assert watch.events == [("started", "a"), ("failed", "a")]
    assert list(store.objects()) == []
    assert list(store.layout.staging.iterdir()) == []
    assert store.leases() == []
    shop.write.hook = lambda: None
    realise(step("a"), store, tools_for, Watch(), recipe_of=shop.recipe_of)


def test_pinned_content_is_refused_when_it_is_other_and_kept(store: Store) -> None:
    """The bytes stay under their true digest, so correcting the pin fetches nothing."""
    shop = Shop()
    with pytest.raises(DigestMismatch, match="text has sha256") as caught:
        realise(
            pin("source", "expected", serve="served"),
            store,
            tools_for,
            Watch(),
            recipe_of=shop.recipe_of,
        )
    assert list(store.objects()) == []
    corrected = pin("source", "served", serve="never asked")
    assert caught.value.details["actual"] == corrected.params["sha256"]
    (planned,) = plan(corrected, store, shop.recipe_of).steps
    assert (planned.action, planned.size_bytes) == ("fetch", 0)
    done = realise(corrected, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert text_of(store, done.object) == "served"
    assert shop.pinned.ran == ["served"]
    assert damage(store) == []


def test_a_download_that_says_mismatch_is_kept_too(store: Store) -> None:
    """A tool that noticed the mismatch itself passes the file on by path and digest."""
    shop = Shop()
    wanted = pin("source", "late", serve="late")
    part = store.layout.downloads / "x.part"
    part.write_text("late")

    def tools(*_: Any) -> Any:
        raise DigestMismatch("not as pinned", path=str(part), actual=wanted.params["sha256"])

    class Failing(Tools):
        known = property(tools)  # type: ignore[assignment]

    def broken(derivation: Any, inputs: Any, out: Any, toolbox: Any) -> None:
        tools()

    shop.pinned.build = broken  # type: ignore[method-assign]
    with pytest.raises(DigestMismatch):
        realise(wanted, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert store.has_blob(str(wanted.params["sha256"]))
    assert not part.exists()


def test_disk_full_in_a_recipe_is_said_in_words(store: Store) -> None:
    """ENOSPC is a refusal with a remedy, and a retry works."""
    shop = Shop()

    def full() -> None:
        raise OSError(28, os.strerror(28))

    shop.write.hook = full
    with pytest.raises(DiskFull, match="disk full while building write a"):
        realise(step("a"), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    shop.write.hook = lambda: None
    realise(step("a"), store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert damage(store) == []


def test_two_builders_of_the_same_build_it_once(store: Store, tmp_path: Path) -> None:
    """Real processes: one builds, the others wait and take its result."""
    marks = tmp_path / "marks"

    def work() -> None:
        shop = Shop()

        def slow() -> None:
            with marks.open("a") as file:
                file.write("ran\n")
            time.sleep(0.5)

        shop.write.hook = slow
        realise(
            step("b", x=step("a")),
            Store(store.root, floor_bytes=0),
            tools_for,
            Watch(),
            recipe_of=shop.recipe_of,
        )

    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            except BaseException:  # noqa: BLE001 (the status says it)
                os._exit(1)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0, 0]
    assert marks.read_text() == "ran\nran\n"
    assert damage(store) == []
    assert store.leases() == []
    assert len(list(store.objects())) == 2


def test_the_same_content_from_two_sources_is_fetched_once(store: Store, tmp_path: Path) -> None:
    """Pinned content is one thing, however many steps ask for it, and from wherever, at once."""
    marks = tmp_path / "marks"
    together = multiprocessing.get_context("fork").Barrier(2)

    def work(mirror: str) -> None:
        shop = Shop()

        def fetch(params: Any, inputs: Any, out: Path, tools: Any) -> None:
            with marks.open("a") as file:
                file.write("fetched\n")
            (out / "text").write_text(str(params["serve"]))

        shop.pinned.build = fetch  # type: ignore[method-assign]
        one = pin("weights", "content")
        mine = Derivation(one.name, one.recipe, one.version, {**one.params, "mirror": mirror})
        together.wait(60)
        realise(
            mine, Store(store.root, floor_bytes=0), tools_for, Watch(), recipe_of=shop.recipe_of
        )

    children = []
    for mirror in ("a", "b"):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(mirror)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    assert marks.read_text() == "fetched\n"
    assert damage(store) == []


def test_builders_of_different_things_do_not_wait_for_each_other(store: Store) -> None:
    """Only the same step is built by one at a time: a slow one holds up nobody else."""
    begun, go_on = threading.Event(), threading.Event()
    slow = Shop()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)

    slow.write.hook = wait
    done: list[str] = []

    def build_slowly() -> None:
        mine = Store(store.root, floor_bytes=0)
        done.append(
            realise(step("a"), mine, tools_for, Watch(), recipe_of=slow.recipe_of).object[65:]
        )
        mine.close()

    thread = threading.Thread(target=build_slowly)
    thread.start()
    try:
        assert begun.wait(60)
        shop = Shop()
        goal = step("c", x=step("b"))
        realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
        assert shop.ran == ["b", "c"]
        assert done == []
    finally:
        go_on.set()
        thread.join()
    assert done == ["a"]


class Waiter(Watch):
    """Acts each time it is told that its step waits."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__()
        self.act = act
        self.asked = 0

    def step_waiting(self, derivation: Derivation, holder: str) -> None:
        """Count, and act."""
        super().step_waiting(derivation, holder)
        self.asked += 1
        self.act(self.asked)


@contextmanager
def being_built(store: Store, shop: Shop, error: Exception | None = None) -> Iterator[Any]:
    """Another thread is in the middle of building "a", as build 7; goes on when told to."""
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(60)
        if error is not None:
            raise error

    shop.write.hook = hold

    def work() -> None:
        mine = Store(store.root, floor_bytes=0)
        with suppress(StepFailed):
            realise(step("a"), mine, tools_for, Watch(), recipe_of=shop.recipe_of, owner="build 7")
        mine.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(60)
        yield go_on.set
    finally:
        go_on.set()
        thread.join()


def test_a_step_that_another_makes_is_waited_for_and_taken(store: Store) -> None:
    """Who makes it is told at each look; once it is made it is cached here."""
    other, shop = Shop(), Shop()
    with being_built(store, other) as go_on:
        watch = Waiter(lambda asked: go_on() if asked == 3 else None)
        goal = step("b", x=step("a"))
        realise(goal, store, tools_for, watch, recipe_of=shop.recipe_of)
    assert watch.events == [
        ("started", "a"),
        ("waiting", "build 7"),
        ("cached", "a"),
        ("started", "b"),
        ("built", "b"),
    ]
    assert (other.ran, shop.ran) == (["a"], ["b"])


def test_a_step_that_another_did_not_get_made_is_built(store: Store) -> None:
    """After the wait the step begins again, as what it now is."""
    other, shop = Shop(), Shop()
    with being_built(store, other, StepFailed("it broke")) as go_on:
        watch = Waiter(lambda _asked: go_on())
        realise(step("a"), store, tools_for, watch, recipe_of=shop.recipe_of)
    assert watch.events == [
        ("started", "a"),
        ("waiting", "build 7"),
        ("started", "a"),
        ("built", "a"),
    ]
    assert (other.ran, shop.ran) == (["a"], ["a"])


def test_a_wait_ends_when_the_observer_says_so(store: Store) -> None:
    """A cancel is heeded while the other one still builds; nothing stays leased."""
    other, shop = Shop(), Shop()

    def cancel(asked: int) -> None:
        if asked == 2:
            raise Cancelled("cancelled by a person")

    watch = Waiter(cancel)
    with being_built(store, other):
        with pytest.raises(Cancelled):
            realise(step("a"), store, tools_for, watch, recipe_of=shop.recipe_of)
        assert [lease.owner for lease in store.leases()] == ["build 7"]
    assert watch.events == [("started", "a"), ("waiting", "build 7"), ("failed", "a")]
    assert (other.ran, shop.ran) == (["a"], [])


@pytest.mark.parametrize("when", STEPS)
def test_killed_after_each_step(store: Store, when: str) -> None:
    """SIGKILL after any step of the commit: objects complete or absent, no lease, and it goes on."""
    goal = step("b", x=step("a"), recipe="links")

    def work() -> None:
        shop = Shop()
        realise(
            goal,
            Store(store.root, floor_bytes=0, after=killer(when, 2)),
            tools_for,
            Watch(),
            recipe_of=shop.recipe_of,
        )

    # the second "leased" never comes: one lease holds for the whole graph
    status = in_child(work if when != "leased" else lambda: _killed_in_lease(store))
    assert status == -signal.SIGKILL
    assert damage(store) == []
    assert store.leases() == []

    shop = Shop()
    done = realise(goal, store, tools_for, Watch(), recipe_of=shop.recipe_of)
    assert damage(store) == []
    assert len(list(store.objects())) == 2
    assert store.closure(done.object) == sorted(o.name for o in store.objects())
    if when in {"indexed", "unlocked"}:
        assert shop.ran == []
    objects = {p.name for p in store.layout.objects.iterdir()}
    assert objects == {n for o in store.objects() for n in (o.name, f"{o.name}.json")}
    assert list(store.layout.leases.iterdir()) == []
    before = store.reindex()
    assert before == 2
    assert plan(goal, store, shop.recipe_of).count("cached") == 2


def _killed_in_lease(store: Store) -> None:
    with Store(store.root, floor_bytes=0, after=killer("leased")).lease("dying"):
        pass
