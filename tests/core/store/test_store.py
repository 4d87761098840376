"""The store's promises: one inode a content, complete or absent, never edited."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmadmin.core.build.recipe import FixedFile
from mmadmin.core.errors import (
    DiskFull,
    InvalidInput,
    NotFound,
    StepFailed,
    StoreCorrupt,
)
from mmadmin.core.store import Realisation, Store
from mmadmin.core.store import commit as commit_module
from mmadmin.core.store.verify import verify
from tests.core.workshop import add, damage, in_child


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store", floor_bytes=0)


def sha(data: bytes) -> str:
    """Hex sha256."""
    return hashlib.sha256(data).hexdigest()


def test_an_object_is_a_read_only_tree_of_links_into_blobs(store: Store) -> None:
    """Modes, times, links and executable bits are canonical; bytes have one inode."""
    found = add(
        store,
        "x",
        {"bin/run*": b"#!", "lib/a": b"same", "lib/b": b"same", "run": "bin/run", "empty": b""},
    )
    assert damage(store) == []
    assert found.path.name == f"{found.hash}-x"
    assert found.size == 10
    assert (found.path / "lib/a").samefile(found.path / "lib/b")
    assert os.access(found.path / "bin/run", os.X_OK)
    assert (found.path / "run").read_bytes() == b"#!"
    assert [e.path for e in found.files] == [
        "bin",
        "bin/run",
        "empty",
        "lib",
        "lib/a",
        "lib/b",
        "run",
    ]
    assert store.object(found.name) == found
    assert list(store.objects()) == [found]


def test_executable_and_plain_bytes_are_two_inodes(store: Store) -> None:
    """The executable bit belongs to an inode, so it never leaks into another object."""
    one = add(store, "x", {"f*": b"data"})
    two = add(store, "y", {"f": b"data"})
    assert one.hash != two.hash
    assert damage(store) == []
    assert store.has_blob(sha(b"data"))
    assert store.has_blob(sha(b"data"), executable=True)


def test_the_same_content_is_the_same_object(store: Store) -> None:
    """Sealing again changes nothing and returns what is there; another name is another object."""
    one = add(store, "x", {"a": b"1"})
    before = one.path.stat()
    assert add(store, "x", {"a": b"1"}) == one
    after = one.path.stat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mode,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    other = add(store, "y", {"a": b"1"})
    assert other.hash == one.hash
    assert (other.path / "a").samefile(one.path / "a")


def test_known_digests_are_not_computed_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was hashed while it was written is not read; one that changed since is."""
    read: list[str] = []
    real = commit_module.hash_file

    def counting(path: Path, **options: Any) -> tuple[str, int]:
        read.append(path.name)
        return real(path, **options)

    monkeypatch.setattr(commit_module, "hash_file", counting)
    with store.lease("t") as lease, store.staging(lease) as staging:
        for name in ("told", "changed", "new"):
            (staging.out / name).write_text(name)
        staging.hashed(staging.out / "told", sha(b"told"))
        staging.hashed(staging.out / "changed", sha(b"changed"))
        (staging.out / "changed").write_text("longer than before")
        found = store.seal(staging, "x")
    assert sorted(read) == ["changed", "new"]
    assert {e.path: e.sha256 for e in found.files}["changed"] == sha(b"longer than before")
    assert damage(store) == []


def test_ingest_copies_once_and_seals_without_reading(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local file comes in hashed; sealing then only links."""
    monkeypatch.setattr(commit_module, "hash_file", None)
    (tmp_path / "m.gguf").write_bytes(b"weights" * 1000)
    with store.lease("t") as lease, store.staging(lease) as staging:
        assert store.ingest(tmp_path / "m.gguf", staging, "sub/m.gguf") == sha(b"weights" * 1000)
        found = store.seal(staging, "m")
    assert (found.path / "sub/m.gguf").read_bytes() == b"weights" * 1000
    assert damage(store) == []


def test_fixed_objects_are_found_by_content(store: Store) -> None:
    """An object whose files are pinned is found without a record of how it came."""
    files = [FixedFile("a/b", sha(b"1"), 1), FixedFile("c", sha(b"22"), 2, executable=True)]
    assert store.fixed(files, "x") is None
    found = add(store, "x", {"a/b": b"1", "c*": b"22"})
    assert store.fixed(files, "x") == found


def test_bad_output_is_refused_and_nothing_stays(store: Store) -> None:
    """An output that may not be an object is neither in the store nor in staging."""
    with pytest.raises(StepFailed, match="leaves the object"):
        add(store, "x", {"a": b"1", "bad": "/etc/passwd"})
    assert list(store.objects()) == []
    assert list(store.layout.staging.iterdir()) == []
    assert list(store.layout.objects.iterdir()) == []


def test_closures_follow_references(store: Store) -> None:
    """The closure is the object and all that it needs, also indirectly."""
    a = add(store, "a", {"f": b"a"})
    b = add(store, "b", {"f": b"b"}, refs=[a.name])
    c = add(store, "c", {"f": b"c"}, refs=[b.name])
    assert store.closure(c.name) == sorted([a.name, b.name, c.name])
    assert store.closure(a.name) == [a.name]
    assert store.lost_reference(c.name) is None
    with pytest.raises(NotFound):
        store.closure(f"{'0' * 64}-none")


def test_sealing_again_with_more_references_keeps_both(store: Store) -> None:
    """References only grow: the collector errs towards keeping."""
    a, b = add(store, "a", {"f": b"a"}), add(store, "b", {"f": b"b"})
    add(store, "c", {"f": b"c"}, refs=[a.name])
    both = add(store, "c", {"f": b"c"}, refs=[b.name])
    assert both.refs == tuple(sorted([a.name, b.name]))
    assert store.object(both.name) == both
    store.reindex()
    assert store.object(both.name) == both


def test_a_path_without_a_row_is_garbage(store: Store) -> None:
    """What a killed attempt left is not an object, and does not stand in the way."""
    found = add(store, "x", {"a": b"1"})
    with store.index.write() as index:
        index.execute("DELETE FROM object")
    (found.path / "a").unlink()
    assert store.object(found.name) is None
    assert add(store, "x", {"a": b"1"}).name == found.name
    assert damage(store) == []


def test_a_row_without_a_path_is_corrupt(store: Store) -> None:
    """The store says so, with the remedy, instead of building over it."""
    found = add(store, "x", {"a": b"1"})
    found.path.rename(store.root / "elsewhere")
    with pytest.raises(StoreCorrupt, match="mm store repair"):
        store.object(found.name)


def test_the_index_is_rebuilt_from_the_disk(store: Store) -> None:
    """Without its index a store opens with all objects, references and realisations."""
    a = add(store, "a", {"f": b"a", "run*": b"x", "l": "f"})
    b = add(store, "b", {"f": b"b"}, refs=[a.name])
    store.record(Realisation("1" * 64, "2" * 64, b.name, "bubblewrap", "h", 12, 34, "x.log"))
    before = (list(store.objects()), store.realisation("1" * 64))
    store.close()
    for path in store.root.glob("index.sqlite3*"):
        path.unlink()
    again = Store(store.root, floor_bytes=0)
    assert (list(again.objects()), again.realisation("1" * 64)) == before
    assert again.realisations_of(b.name) == [before[1]]


def test_an_index_of_an_earlier_version_is_made_anew(store: Store) -> None:
    """Nothing has to be migrated: the disk says everything."""
    found = add(store, "a", {"f": b"a"})
    with store.index.read() as index:
        index.execute("DROP TABLE derivation")
        index.execute("PRAGMA user_version=1")
    store.close()
    again = Store(store.root, floor_bytes=0)
    assert list(again.objects()) == [found]
    assert again.last_built("write", "a") is None
    with again.index.read() as index:
        index.execute("PRAGMA user_version=99")
    again.close()
    with pytest.raises(StoreCorrupt, match="newer mmadmin"):
        Store(store.root)


def test_a_damaged_index_is_said_in_words(store: Store) -> None:
    """Bytes that are no database are an error with the remedy, not a traceback."""
    store.close()
    for path in store.root.glob("index.sqlite3*"):
        path.unlink()
    store.layout.index.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreCorrupt, match="mm store reindex"):
        Store(store.root)


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t[:-1],
        lambda t: t.replace('"size":1', '"size":2'),
        lambda t: t.replace('"f"', '"g"'),
        lambda _: "{}",
    ],
)
def test_a_damaged_sidecar_stops_the_reindex(store: Store, edit: Callable[[str], str]) -> None:
    """A record that does not describe its object is never taken over."""
    found = add(store, "x", {"f": b"1"})
    sidecar = store.layout.sidecar(found.name)
    sidecar.write_text(edit(sidecar.read_text()))
    with pytest.raises(StoreCorrupt, match=r"damaged|describe|entry"):
        store.reindex()
    assert store.object(found.name) == found


def test_realisations_need_their_object(store: Store) -> None:
    """A record is answered while its object is here; an attestation stays."""
    found = add(store, "x", {"a": b"1"})
    record = Realisation("1" * 64, "2" * 64, found.name)
    store.record(record)
    assert store.realisation("1" * 64) == record
    assert store.realisation("3" * 64) is None
    with store.index.write() as index:
        index.execute("DELETE FROM object")
    assert store.realisation("1" * 64) is None
    assert store.realisation_record("1" * 64) == record
    with pytest.raises(NotFound):
        store.record(record)


def test_roots_say_what_is_kept_and_why(store: Store) -> None:
    """Roots are files with reasons; keys may be any text; a root needs its object."""
    found = add(store, "x", {"a": b"1"})
    store.add_root("generation", "a/b ../1", found.name, "live since noon")
    store.add_root("pin", "p", found.name, "asked by Alice")
    store.add_root("pin", "p", found.name, "asked by Bob")
    assert [(r.kind, r.key, r.reason) for r in store.roots()] == [
        ("generation", "a/b ../1", "live since noon"),
        ("pin", "p", "asked by Bob"),
    ]
    assert store.remove_root("pin", "p")
    assert not store.remove_root("pin", "p")
    with pytest.raises(NotFound):
        store.add_root("pin", "q", f"{'0' * 64}-gone", "")
    (path,) = store.layout.roots.glob("*/*.json")
    path.write_text("{")
    with pytest.raises(StoreCorrupt):
        store.roots()


def test_names_cannot_leave_the_store(store: Store) -> None:
    """Object names and digests are checked before they become paths."""
    for name in ("", "x", "../../etc", f"{'0' * 64}", f"{'0' * 64}-a/b", f"{'Z' * 64}-x"):
        with pytest.raises(InvalidInput):
            store.object_path(name)
    with pytest.raises(InvalidInput):
        store.blob_path("../../etc/passwd")


def test_a_damaged_blob_is_replaced_by_a_good_one(store: Store) -> None:
    """New content does not link to a blob whose size already shows that it is wrong."""
    add(store, "x", {"a": b"good"})
    blob = store.blob_path(sha(b"good"))
    blob.unlink()
    blob.write_bytes(b"cut")
    found = add(store, "y", {"b": b"good"})
    assert (found.path / "b").read_bytes() == b"good"
    assert blob.read_bytes() == b"good"


def test_too_many_links_make_a_new_inode(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system's limit of links an inode is no error."""
    add(store, "x", {"a": b"1"})
    real = os.link

    def limited(source: Any, target: Any, **options: Any) -> None:
        if "staging" in str(target):
            raise OSError(errno.EMLINK, "too many links")
        real(source, target, **options)

    monkeypatch.setattr(os, "link", limited)
    found = add(store, "y", {"b": b"1"})
    assert (found.path / "b").read_bytes() == b"1"
    assert not (found.path / "b").samefile(store.blob_path(sha(b"1")))


@pytest.mark.parametrize("where", ["link", "fsync", "rename", "index"])
def test_a_full_disk_fails_cleanly_and_a_retry_works(
    store: Store, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """ENOSPC at any step of the commit: a refusal in words, nothing visible, then success."""
    with monkeypatch.context() as patch:

        def full(*_: Any, **__: Any) -> None:
            if where == "index":
                raise sqlite3.OperationalError("database or disk is full")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if where == "index":
            patch.setattr(commit_module, "insert_object", full)
        elif where == "rename":
            patch.setattr(Path, "rename", _only_into_objects(full, Path.rename))
        else:
            patch.setattr(os, where, full)
        with pytest.raises(DiskFull, match="full"):
            add(store, "x", {"a": b"1", "d/b": b"2"})
    assert list(store.objects()) == []
    assert list(store.layout.staging.iterdir()) == []
    assert store.leases() == []
    add(store, "x", {"a": b"1", "d/b": b"2"})
    assert damage(store) == []


def _only_into_objects(full: Callable[..., None], real: Callable[..., Path]) -> Callable[..., Path]:
    def rename(self: Path, target: Path) -> Path:
        if "objects" in str(target):
            full()
        return real(self, target)

    return rename


def test_many_processes_may_make_the_store_at_once(tmp_path: Path) -> None:
    """Opening an empty place is no race, and each can write at once."""
    children = []
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                add(Store(tmp_path / "new", floor_bytes=0), f"n{number}", {"f": b"x"})
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
    made = Store(tmp_path / "new", floor_bytes=0)
    assert len(made.names()) == 8
    assert damage(made) == []


def test_a_forked_child_has_its_own_connection(store: Store) -> None:
    """What parent and child write is all there, in whatever order they end."""
    add(store, "before", {"f": b"1"})

    def work() -> None:
        add(store, "child", {"f": b"2"})

    assert in_child(work) == 0
    add(store, "after", {"f": b"3"})
    assert sorted(name[65:] for name in store.names()) == ["after", "before", "child"]
    assert damage(store) == []


def test_a_write_that_fails_half_way_leaves_nothing(store: Store, tmp_path: Path) -> None:
    """A real limit of the file system's (RLIMIT_FSIZE) in the middle of a copy; then it works."""
    (tmp_path / "big").write_bytes(b"x" * 5_000_000)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
        with store.lease("t") as lease, store.staging(lease) as staging:
            try:
                store.ingest(tmp_path / "big", staging, "big")
            except DiskFull:
                left = list(staging.out.iterdir())
                os._exit(0 if not left else 2)
        os._exit(1)

    assert in_child(limited) == 0
    with store.lease("t") as lease, store.staging(lease) as staging:
        store.ingest(tmp_path / "big", staging, "big")
        store.seal(staging, "big")
    assert damage(store) == []


def test_what_is_kept_early_survives_a_failed_attempt(store: Store) -> None:
    """A file of a download that then fails is in the store, and is never between two places."""
    with store.lease("t") as lease:
        with store.staging(lease) as staging:
            (staging.out / "a").write_bytes(b"data")
            staging.keep(staging.out / "a", sha(b"data"))
            assert (staging.out / "a").samefile(store.blob_path(sha(b"data")))
        with store.staging(lease) as staging:
            assert staging.take(sha(b"data"), 4, staging.out / "sub/a")
            assert not staging.take(sha(b"data"), 5, staging.out / "b")
            assert not staging.take(sha(b"none"), 4, staging.out / "b")
            found = store.seal(staging, "x")
    assert (found.path / "sub/a").read_bytes() == b"data"
    assert damage(store) == []


def test_reading_a_store_as_another_user_needs_no_write(store: Store) -> None:
    """Sealed folders cannot be changed by a plain user (root is not stopped by modes)."""
    found = add(store, "x", {"d/a": b"1"})

    def try_to_write() -> None:
        os.setgid(65534)
        os.setuid(65534)
        for path in (found.path / "new", found.path / "d/new", found.path / "d/a"):
            try:
                path.write_text("x")
            except PermissionError:
                continue
            os._exit(7)

    for parent in (store.root, *store.root.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    assert in_child(try_to_write) == 0


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_files_are_copied(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """A download becomes an object, whole by stat and by content; what is damaged is mended."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", refuse)
    data = b"bytes" * 1000
    download = tmp_path / "download"
    download.write_bytes(data)
    store.keep_blob(download, sha(data))
    with store.lease("x") as lease, store.staging(lease) as staging:
        assert staging.take(sha(data), len(data), staging.out / "model.gguf")
        (staging.out / "other").write_bytes(b"built")
        found = store.seal(staging, "x")
    assert (found.path / "model.gguf").read_bytes() == data
    assert verify(store, contents=True).damaged == ()
    (found.path / "model.gguf").chmod(0o644)
    (found.path / "model.gguf").write_bytes(b"wrong" * 1000)
    assert verify(store, contents=True).damaged
    assert add(store, "x", {"model.gguf": data, "other": b"built"}).hash == found.hash
    assert verify(store, contents=True).damaged == ()
    assert not list(store.root.rglob(".*.new"))
    store.reindex()
    assert store.has_object(found.name)
